// Programmatic dependent launch (sm_90 and newer): the CTAs of a kernel take their places while the kernel before it in
// the stream drains, and wait there until it has ended and all that it wrote can be seen.
#pragma once

#include "paddle_kv/common/cuda_status.cuh"

namespace paddle_kv {

constexpr int kDependentArchitecture = 90;

// By every thread, before it touches memory. Returns at once in a kernel that was launched as usual.
__device__ inline void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The kernel behind, if it was launched dependently too, may take its places as soon as all CTAs have come here; it
// waits there itself for the end of this one. Only behind WaitForKernelBefore: else a kernel that never waits would run
// beside one that it knows nothing of.
__device__ inline void LetKernelBehindBegin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Launches a kernel. `dependent`: dependently, if it calls WaitForKernelBefore; as usual where the GPU, or what the
// kernel was compiled for, knows no dependent launch (the wait would be missing).
template <class... Parameters>
Status LaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, bool dependent, cudaStream_t stream,
                    const char* name, const Parameters&... parameters) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  if (dependent) {
    cudaFuncAttributes compiled{};
    PADDLE_KV_CUDA(cudaFuncGetAttributes(&compiled, reinterpret_cast<const void*>(kernel)));
    config.numAttrs = compiled.ptxVersion >= kDependentArchitecture ? 1 : 0;
  }
  return ToStatus(cudaLaunchKernelEx(&config, kernel, parameters...), name);
}

}  // namespace paddle_kv
