#include "paddle_kv/common/cuda_device.h"

#include <algorithm>
#include <cstdint>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/pointer_facts.h"

namespace paddle_kv {

Status ComputeCapability(int device, int* architecture) {
  int major = 0;
  int minor = 0;
  PADDLE_KV_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  PADDLE_KV_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  *architecture = major * 10 + minor;
  return {};
}

Status HostRangeIsReachable(const void* first, std::int64_t bytes, int device, bool* reachable) {
  DeviceGuard guard(device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  *reachable = true;
  auto address = reinterpret_cast<std::uintptr_t>(first);
  const std::uintptr_t end = address + static_cast<std::uintptr_t>(std::max<std::int64_t>(bytes, 0));
  while (address < end && *reachable) {
    PointerFacts facts;
    PADDLE_KV_RETURN_IF_ERROR(DescribePointer(address, &facts));
    *reachable = facts.kind == MemoryKind::kHost;
    address = NextToAsk(address, end, facts);
  }
  return {};
}

Status StreamIsCapturing(const DeviceStream& where, bool* capturing) {
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  PADDLE_KV_CUDA(cudaStreamIsCapturing(StreamOf(where), &capture));
  *capturing = capture != cudaStreamCaptureStatusNone;
  return {};
}

Status CopyToHost(void* target, const void* source, std::int64_t bytes, const DeviceStream& where) {
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  PADDLE_KV_CUDA(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToHost, StreamOf(where)));
  PADDLE_KV_CUDA(cudaStreamSynchronize(StreamOf(where)));
  return {};
}

Status SynchronizeStream(const DeviceStream& where) {
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  PADDLE_KV_CUDA(cudaStreamSynchronize(StreamOf(where)));
  return {};
}

}  // namespace paddle_kv
