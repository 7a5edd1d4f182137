// In place of the library's own, which asks the driver.
#pragma once

#include <cstdint>

#include "cuda_runtime.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

Status WaitUntilReached(const std::uint32_t* counter, std::uint32_t value, cudaStream_t stream);

}  // namespace paddle_kv
