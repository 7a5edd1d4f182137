// Errors that Paddle turns into Python exceptions of the right type. Any other C++ exception that leaves an operator
// aborts the process.
#pragma once

#include <string>

#include "paddle_kv/common/status.h"

namespace paddle_kv {

[[noreturn]] void ThrowValueError(const std::string& message);
[[noreturn]] void ThrowIndexError(const std::string& message);
[[noreturn]] void ThrowNotImplementedError(const std::string& message);
[[noreturn]] void ThrowMemoryError(const std::string& message);
[[noreturn]] void ThrowOsError(const std::string& message);

// Raises CUDA's own words as "CUDA error NAME (CODE) in CALL: TEXT", which paddle_kv turns into CudaError; a missing
// architecture gets a sentence that says how to rebuild.
void RaiseIfFailed(const Status& status, int device);

}  // namespace paddle_kv
