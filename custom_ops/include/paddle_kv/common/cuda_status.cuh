// Turning CUDA results into Status, and making a device current for the time of one call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "paddle_kv/common/device_context.cuh"
#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

inline Status ToStatus(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // a failed launch must not be reported again by the next one
  return {static_cast<int>(error), cudaGetErrorName(error), cudaGetErrorString(error), call};
}

#define PADDLE_KV_RETURN_IF_ERROR(status_expression)         \
  do {                                                       \
    const ::paddle_kv::Status status_ = (status_expression); \
    if (!status_.ok()) return status_;                       \
  } while (0)

#define PADDLE_KV_CUDA(call) PADDLE_KV_RETURN_IF_ERROR(::paddle_kv::ToStatus((call), #call))

// Asked in vain: the runtime would report that as the error of the next launch.
inline bool IsNotReady(cudaError_t result) {
  if (result != cudaSuccess) cudaGetLastError();
  return result == cudaErrorNotReady;
}

// Reads and clears the launch error: to be returned right after <<<>>>.
inline Status LaunchStatus(const char* kernel) { return ToStatus(cudaGetLastError(), kernel); }

// CTAs that a launch may have in x.
constexpr std::int64_t kLargestGrid = (std::int64_t{1} << 31) - 1;

inline cudaStream_t StreamOf(const DeviceStream& where) { return reinterpret_cast<cudaStream_t>(where.stream); }

// The caller's current device is restored: an op that leaks another one breaks the thread that called it.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    int current = 0;
    status_ = ToStatus(cudaGetDevice(&current), "cudaGetDevice");
    if (status_.ok() && current != device) {
      status_ = ToStatus(PushDevice(device), "cuCtxPushCurrent");
      pushed_ = status_.ok();
    }
  }
  ~DeviceGuard() {
    if (pushed_) PopDevice();
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  bool pushed_ = false;
  Status status_;
};

}  // namespace paddle_kv
