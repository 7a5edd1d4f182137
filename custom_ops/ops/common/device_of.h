// Where a tensor lies. Nothing else in the glue asks Paddle for it.
#pragma once

#include "paddle_api.h"

namespace paddle_kv {

constexpr int kCpu = -1;     // memory of the CPU
constexpr int kPinned = -2;  // page-locked memory of Paddle's

// The GPU's number, or one of the two above. A device of a plugin counts as the GPU of its number if its type is one of
// `cuda_like`, `metax_gpu`, `iluvatar_gpu` and those that PADDLE_KV_CUDA_DEVICES names (as in paddle_kv/devices.py);
// any other, and any that is no GPU, raises NotImplementedError: its memory must not be taken for host memory.
int DeviceOf(const paddle::Tensor& tensor);

inline bool OnGpu(const paddle::Tensor& tensor) { return DeviceOf(tensor) >= 0; }

}  // namespace paddle_kv
