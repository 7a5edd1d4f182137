// In place of the library's own, which asks the driver.
#pragma once

#include "cuda_runtime.h"

namespace paddle_kv {

cudaError_t PushDevice(int device);
void PopDevice();

}  // namespace paddle_kv
