// Functions of the driver that the runtime does not wrap, or not in every version. Looked up when the program runs:
// linking with the driver's library would keep the operators from loading on a machine without one.
#pragma once

#include <cuda_runtime.h>

namespace paddle_kv {

// The function as the driver of CUDA `version` (12080 for 12.8) had it, or null.
inline void* DriverEntry(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
#else
  // This call knows versions up to its own runtime's only.
  const cudaError_t error = version > CUDART_VERSION
                                ? cudaErrorNotSupported
                                : cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

}  // namespace paddle_kv
