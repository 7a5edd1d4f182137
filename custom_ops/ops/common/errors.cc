#include "errors.h"

#include "paddle_api.h"
#ifdef PADDLE_KV_WITH_CUDA
#include "paddle_kv/common/missing_architecture.h"
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
  const std::string missing = MissingArchitecture(status, device);
  if (!missing.empty()) ThrowNotImplementedError(missing);
#endif
  (void)device;
  ThrowOsError(std::string("CUDA error ") + status.name + " (" + std::to_string(status.code) + ") in " + status.call +
               ": " + status.text);
}

}  // namespace paddle_kv
