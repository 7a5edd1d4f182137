// In place of the library's own: a kernel runs on the CPU before the launch returns.
#pragma once

#include "device_code.h"
#include "paddle_kv/common/cuda_status.cuh"

namespace paddle_kv {

inline void WaitForKernelBefore() { KernelBeforeIsAwaited(); }
inline void LetKernelBehindBegin() {}

template <class... Parameters>
Status LaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, bool dependent, cudaStream_t, const char*,
                    const Parameters&... parameters) {
  RunGrid(grid, block, dependent, [&] { kernel(parameters...); });
  return {};
}

}  // namespace paddle_kv
