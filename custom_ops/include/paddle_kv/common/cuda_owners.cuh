// Who destroys what was made: events, streams, memory of the device and of the host. None of them waits: whoever has
// work in flight synchronizes before. The device that it belongs to is current where an owner ends (on another one's,
// CUDA would make a context there).
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace paddle_kv {

template <class Handle, cudaError_t (*kDestroy)(Handle)>
class CudaOwner {
 public:
  CudaOwner() = default;
  explicit CudaOwner(Handle handle) : handle_(handle) {}
  CudaOwner(CudaOwner&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  CudaOwner& operator=(CudaOwner&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CudaOwner() { Reset(); }

  Handle get() const { return handle_; }
  explicit operator bool() const { return handle_ != nullptr; }
  // For the call that makes one.
  Handle* Receive() {
    Reset();
    return &handle_;
  }
  void Reset() {
    if (handle_ != nullptr) kDestroy(std::exchange(handle_, nullptr));
  }

 private:
  Handle handle_ = nullptr;
};

using CudaEvent = CudaOwner<cudaEvent_t, cudaEventDestroy>;
using CudaStream = CudaOwner<cudaStream_t, cudaStreamDestroy>;
using DeviceMemory = CudaOwner<void*, cudaFree>;
using PinnedMemory = CudaOwner<void*, cudaFreeHost>;

inline cudaError_t MakeEvent(CudaEvent* event) {
  return cudaEventCreateWithFlags(event->Receive(), cudaEventDisableTiming);
}

}  // namespace paddle_kv
