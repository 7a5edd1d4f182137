// A tensor that an operator only reads, with its strides. Paddle copies a non-contiguous input before the operator sees
// it, with a kernel of its own on a stream of its own choice; so in dygraph such inputs come as numbers and not as
// tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/device_of.h"

namespace paddle_kv {

struct StridedInput {
  const std::uint8_t* data = nullptr;
  paddle::DataType dtype = paddle::DataType::UNDEFINED;
  int device = kCpu;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in bytes

  int64_t Rank() const { return static_cast<int64_t>(shape.size()); }
  int64_t ItemBytes() const { return static_cast<int64_t>(phi::SizeOf(dtype)); }
};

// From a tensor of a traced program, which is contiguous; where that is absent, from what _arguments.strided() in
// Python makes: [address, dtype, device, shape..., strides in elements...].
StridedInput StridedFrom(const paddle::optional<paddle::Tensor>& tensor, const std::vector<int64_t>& numbers);

// ValueError unless the input is where `cache` is, at a multiple of the bytes of an element.
void CheckBeside(const StridedInput& input, const std::string& name, const paddle::Tensor& cache,
                 const std::string& cache_name);

// ValueError unless the input has the rank; `expected` describes the shape.
void CheckRank(const StridedInput& input, const std::string& name, int64_t rank, const std::string& expected);

}  // namespace paddle_kv
