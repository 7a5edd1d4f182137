#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/transfer/copy_segments.h"

namespace paddle_kv {

// The device does not tell: the driver compiles the kernels of an older build for it, and they hold what their own
// architecture can do.
Status RunsWithBulkCopies(const void* kernel, int shared_bytes, int device, bool* runs) {
  cudaFuncAttributes attributes{};
  int largest_bytes = 0;
  PADDLE_KV_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  PADDLE_KV_CUDA(cudaDeviceGetAttribute(&largest_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  *runs = attributes.ptxVersion >= kBulkArchitecture && largest_bytes >= shared_bytes;
  return {};
}

}  // namespace paddle_kv
