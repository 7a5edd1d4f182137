#include "allocate.h"

#include "paddle/phi/api/include/api.h"

namespace paddle_kv {

paddle::Tensor NewTensor(const std::vector<int64_t>& shape, paddle::DataType dtype, const paddle::Tensor& like) {
  return paddle::experimental::empty(shape, dtype, like.place());
}

}  // namespace paddle_kv
