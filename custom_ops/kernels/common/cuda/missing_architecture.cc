#include "paddle_kv/common/missing_architecture.h"

#include "paddle_kv/common/cuda_status.cuh"

namespace paddle_kv {

std::string MissingArchitecture(const Status& status, int device) {
  const std::string name = status.name;
  if (name != "cudaErrorNoKernelImageForDevice" && name != "cudaErrorUnsupportedPtxVersion") return {};
  int major = 0;
  int minor = 0;
  if (!ToStatus(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "").ok() ||
      !ToStatus(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "").ok()) {
    return {};
  }
  const std::string found = std::to_string(major * 10 + minor);
  return "GPU " + std::to_string(device) + " has architecture " + found +
         ", the operators were built for " PADDLE_KV_BUILT_CUDA_ARCHS "; rebuild with PADDLE_KV_CUDA_ARCHS=\"" + found +
         "\"";
}

}  // namespace paddle_kv
