// Another GPU for the time of a call. cudaSetDevice gives the device that it names a context: to set back the device
// that a thread begins on, GPU 0, would take hundreds of megabytes there in each process that works on another GPU.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <map>
#include <mutex>

#include "paddle_kv/common/driver_entry.cuh"

namespace paddle_kv {

// The context that the runtime uses for the device. It is kept for the life of the process, as the runtime's own.
inline cudaError_t PrimaryContext(int device, CUcontext* context) {
  using Retain = CUresult (*)(CUcontext*, CUdevice);
  static const auto retain = reinterpret_cast<Retain>(DriverEntry("cuDevicePrimaryCtxRetain", 7000));
  // Never destroyed: other threads may still come when the process ends.
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, CUcontext>& contexts = *new std::map<int, CUcontext>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = contexts.find(device);
  if (found == contexts.end()) {
    if (retain == nullptr) return cudaErrorNotSupported;
    // The ordinals of the runtime are the devices of the driver, and its error codes are the driver's.
    const CUresult result = retain(context, device);
    if (result != CUDA_SUCCESS) return static_cast<cudaError_t>(result);
    contexts.emplace(device, *context);
    return cudaSuccess;
  }
  *context = found->second;
  return cudaSuccess;
}

inline cudaError_t PushDevice(int device) {
  using Push = CUresult (*)(CUcontext);
  static const auto push = reinterpret_cast<Push>(DriverEntry("cuCtxPushCurrent", 4000));
  CUcontext context = nullptr;
  const cudaError_t error = PrimaryContext(device, &context);
  if (error != cudaSuccess) return error;
  return push == nullptr ? cudaErrorNotSupported : static_cast<cudaError_t>(push(context));
}

// What was current before the last PushDevice is again.
inline void PopDevice() {
  using Pop = CUresult (*)(CUcontext*);
  static const auto pop = reinterpret_cast<Pop>(DriverEntry("cuCtxPopCurrent", 4000));
  CUcontext popped = nullptr;
  if (pop != nullptr) pop(&popped);
}

// Whether the device has a context. Makes none.
inline bool HasPrimaryContext(int device) {
  using GetState = CUresult (*)(CUdevice, unsigned*, int*);
  static const auto get_state = reinterpret_cast<GetState>(DriverEntry("cuDevicePrimaryCtxGetState", 7000));
  unsigned flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

// For questions that need some context, of whichever GPU: that of the thread, else one that is there already. Only if
// there is none, the question makes one. A thread that has none would make one on GPU 0, or, in some versions of CUDA,
// be told that the memory of a GPU is nobody's.
class AnyContext {
 public:
  AnyContext() {
    using GetCurrent = CUresult (*)(CUcontext*);
    static const auto get_current = reinterpret_cast<GetCurrent>(DriverEntry("cuCtxGetCurrent", 4000));
    CUcontext current = nullptr;
    if (get_current == nullptr || get_current(&current) != CUDA_SUCCESS || current != nullptr) return;
    int own = 0;
    int count = 0;
    if (cudaGetDevice(&own) != cudaSuccess || cudaGetDeviceCount(&count) != cudaSuccess) {
      cudaGetLastError();
      return;
    }
    int device = own;
    if (!HasPrimaryContext(own)) {
      for (device = 0; device < count && !HasPrimaryContext(device);) ++device;
    }
    is_pushed_ = device < count && PushDevice(device) == cudaSuccess;
  }
  ~AnyContext() {
    if (is_pushed_) PopDevice();
  }
  AnyContext(const AnyContext&) = delete;
  AnyContext& operator=(const AnyContext&) = delete;

 private:
  bool is_pushed_ = false;
};

}  // namespace paddle_kv
