// Another GPU for the time of a call. cudaSetDevice gives the device that it names a context: to set back the device
// that a thread begins on, GPU 0, would take hundreds of megabytes there in each process that works on another GPU.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <mutex>
#include <vector>

#include "paddle_kv/common/driver_entry.cuh"

namespace paddle_kv {

// The context that the runtime uses for the device. It is kept for the life of the process, as the runtime's own.
inline cudaError_t PrimaryContext(int device, CUcontext* context) {
  using Retain = CUresult (*)(CUcontext*, CUdevice);
  static const auto retain = reinterpret_cast<Retain>(DriverEntry("cuDevicePrimaryCtxRetain", 7000));
  static std::mutex mutex;
  static std::vector<CUcontext> contexts;
  if (device < 0) return cudaErrorInvalidDevice;
  const std::lock_guard<std::mutex> lock(mutex);
  if (contexts.size() <= static_cast<std::size_t>(device)) contexts.resize(device + 1);
  if (contexts[device] == nullptr) {
    if (retain == nullptr) return cudaErrorNotSupported;
    // The ordinals of the runtime are the devices of the driver, and its error codes are the driver's.
    const CUresult result = retain(&contexts[device], device);
    if (result != CUDA_SUCCESS) return static_cast<cudaError_t>(result);
  }
  *context = contexts[device];
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
