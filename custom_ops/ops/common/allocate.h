// Memory for the results of operators that return new tensors.
#pragma once

#include <vector>

#include "paddle_api.h"

namespace paddle_kv {

// An uninitialised tensor on the device of `like`, from Paddle's allocator: on a GPU it belongs to Paddle's current
// stream, and memory that was freed there may be given out again before the work that used it is done.
paddle::Tensor NewTensor(const std::vector<int64_t>& shape, paddle::DataType dtype, const paddle::Tensor& like);

}  // namespace paddle_kv
