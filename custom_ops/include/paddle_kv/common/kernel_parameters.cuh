// How many bytes of parameters a kernel may have.
#pragma once

#include <cuda_runtime.h>

namespace paddle_kv {

constexpr int kSmallParameterBytes = 4096;
// From CUDA 12.1 on. A kernel with more than the small ones is not launched where the driver is older than that.
constexpr int kLargestParameterBytes = CUDART_VERSION >= 12010 ? 32764 : kSmallParameterBytes;

inline bool HasLargeParameters() {
  static const bool has = [] {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
    return kLargestParameterBytes > kSmallParameterBytes && driver >= 12010;
  }();
  return has;
}

}  // namespace paddle_kv
