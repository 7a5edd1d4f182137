// new_tensor: uninitialised memory as a part of a traced program, for results that other operators write in place.
#include <sstream>
#include <string>

#include "allocate.h"
#include "guarded_kernel.h"

namespace paddle_kv {
namespace {

// Sizes with spaces between them: shape inference cannot take a list.
std::vector<int64_t> ShapeOf(const std::string& text) {
  std::istringstream sizes(text);
  std::vector<int64_t> shape;
  for (int64_t size = 0; sizes >> size;) shape.push_back(size);
  return shape;
}

}  // namespace

namespace traced {

// Two tensors of different number never become one when Paddle merges operators that are alike.
std::vector<paddle::Tensor> NewTensor(const paddle::Tensor& like, const std::string& shape, int64_t /*number*/) {
  return {::paddle_kv::NewTensor(ShapeOf(shape), like.dtype(), like)};
}

}  // namespace traced

std::vector<std::vector<int64_t>> NewTensorShape(const std::vector<int64_t>&, const std::string& shape) {
  return {ShapeOf(shape)};
}

std::vector<paddle::DataType> NewTensorDtype(const paddle::DataType& like) { return {like}; }

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_new_tensor)
    .Inputs({"like"})
    .Outputs({"tensor"})
    .Attrs({"shape: std::string", "number: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::traced::NewTensor))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_kv::NewTensorShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_kv::NewTensorDtype));
