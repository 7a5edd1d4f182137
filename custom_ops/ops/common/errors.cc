#include "errors.h"

#include "paddle_api.h"
#ifdef PADDLE_KV_WITH_CUDA
#include "paddle_kv/common/cuda_device.h"
#endif

namespace paddle_kv {

namespace {

// Text of the caller may hold a zero byte, at which the message would end.
std::string Whole(std::string message) {
  for (std::size_t at = message.find('\0'); at != std::string::npos; at = message.find('\0', at)) {
    message.replace(at, 1, "\\0");
  }
  return message;
}

}  // namespace

void ThrowValueError(const std::string& message) {
  PADDLE_THROW(::common::errors::InvalidArgument("%s", Whole(message)));
}
void ThrowIndexError(const std::string& message) { PADDLE_THROW(::common::errors::OutOfRange("%s", message)); }
void ThrowNotImplementedError(const std::string& message) {
  PADDLE_THROW(::common::errors::Unimplemented("%s", message));
}
void ThrowMemoryError(const std::string& message) { PADDLE_THROW(::common::errors::ResourceExhausted("%s", message)); }
void ThrowOsError(const std::string& message) { PADDLE_THROW(::common::errors::External("%s", message)); }

void RaiseIfFailed(const Status& status, int device) {
  if (status.ok()) return;
#ifdef PADDLE_KV_WITH_CUDA
  const std::string name = status.name;
  int architecture = 0;
  if ((name == "cudaErrorNoKernelImageForDevice" || name == "cudaErrorUnsupportedPtxVersion") &&
      ComputeCapability(device, &architecture).ok()) {
    const std::string found = std::to_string(architecture);
    ThrowNotImplementedError("GPU " + std::to_string(device) + " has architecture " + found +
                             ", the operators were built for " PADDLE_KV_BUILT_CUDA_ARCHS
                             "; rebuild with PADDLE_KV_CUDA_ARCHS=\"" +
                             found + "\"");
  }
#endif
  (void)device;
  ThrowOsError(std::string("CUDA error ") + status.name + " (" + std::to_string(status.code) + ") in " + status.call +
               ": " + status.text);
}

}  // namespace paddle_kv
