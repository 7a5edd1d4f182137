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

}  // namespace paddle_kv
