// What a launcher returns. It carries CUDA's own words without needing a CUDA header to be read.
#pragma once

namespace paddle_kv {

struct Status {
  int code = 0;           // a cudaError_t value; 0 is success, negative values are the library's own
  const char* name = "";  // "cudaErrorInvalidValue"
  const char* text = "";  // "invalid argument"
  const char* call = "";  // the call that failed, for the message

  bool ok() const { return code == 0; }
};

inline Status CancelledStatus() { return {-1, "cancelled", "cancelled", ""}; }
inline Status OutOfHostMemory() { return {-2, "out of host memory", "no host memory is left for a transfer", ""}; }

}  // namespace paddle_kv
