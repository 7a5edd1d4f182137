// Where the glue goes from "which device" to "which launcher".
#pragma once

#include "device_of.h"
#include "errors.h"
#include "paddle_api.h"
#include "paddle_kv/common/device_stream.h"

namespace paddle_kv {

// What a traced program carries instead of a handle: Paddle's current stream at the time it runs.
constexpr int64_t kPaddleCurrentStream = -1;

// paddle::Tensor::stream(), which Paddle's headers declare only beside a full CUDA toolkit. Weak, because nothing but
// traced programs needs it.
extern "C" void* PaddleCurrentStream(const paddle::Tensor*) __asm__("_ZNK6paddle6Tensor6streamEv")
    __attribute__((weak));

// The stream handle comes from Python; Tensor::stream() would be Paddle's current stream, whatever the caller wanted.
inline DeviceStream WhereOf(const paddle::Tensor& tensor, int64_t stream) {
  const int device = DeviceOf(tensor);
  if (stream != kPaddleCurrentStream) return {device, stream};
  if (PaddleCurrentStream == nullptr)
    ThrowNotImplementedError("this Paddle does not tell an operator its current stream");
  return {device, reinterpret_cast<int64_t>(PaddleCurrentStream(&tensor))};
}

inline std::uint8_t* BytesOf(const paddle::Tensor& tensor) {
  return static_cast<std::uint8_t*>(const_cast<void*>(tensor.data()));
}

}  // namespace paddle_kv

// LAUNCH_CUDA(device, call): calls a CUDA launcher and raises what it reports; in a build without CUDA it raises
// NotImplementedError, and the launcher is not referenced at all.
#ifdef PADDLE_KV_WITH_CUDA
#define LAUNCH_CUDA(device, call) ::paddle_kv::RaiseIfFailed((call), (device))
#else
#define LAUNCH_CUDA(device, call)                                                                                     \
  (static_cast<void>(sizeof((call), 0)),                                                                              \
   ::paddle_kv::ThrowNotImplementedError(                                                                             \
       "a GPU tensor was given, but these operators were built without CUDA; rebuild with nvcc (python setup_ops.py " \
       "build)"))
#endif
