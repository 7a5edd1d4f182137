// Turning CUDA results into Status, and making a device current for the time of one call.
#pragma once

#include <cuda_runtime.h>

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

// Reads and clears the launch error: to be returned right after <<<>>>.
inline Status LaunchStatus(const char* kernel) { return ToStatus(cudaGetLastError(), kernel); }

inline cudaStream_t StreamOf(const DeviceStream& where) { return reinterpret_cast<cudaStream_t>(where.stream); }

// The caller's current device is restored: an op that leaks cudaSetDevice breaks the thread that called it.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    status_ = ToStatus(cudaGetDevice(&previous_), "cudaGetDevice");
    if (status_.ok() && previous_ != device) {
      status_ = ToStatus(cudaSetDevice(device), "cudaSetDevice");
      changed_ = status_.ok();
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = 0;
  bool changed_ = false;
  Status status_;
};

}  // namespace paddle_kv
