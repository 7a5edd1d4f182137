// Caches that are views: a tensor of the caller may lie in memory with any strides that keep its elements apart.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/paddle_api.h"

namespace paddle_kv {

// A tensor as memory. Strides in bytes; those of dimensions of size 1 are what they would be in a contiguous tensor.
struct StridedMemory {
  const std::uint8_t* data;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  int64_t item_bytes;
};

std::vector<int64_t> ContiguousStrides(const std::vector<int64_t>& shape, int64_t item_bytes);

StridedMemory MemoryOf(const paddle::Tensor& tensor);

// ValueError unless the tensor is contiguous.
void CheckContiguous(const paddle::Tensor& tensor, const std::string& name);

// ValueError unless the elements lie apart, block behind block (the first dimension), with the last `dense_dimensions`
// dimensions contiguous. The stride of a single block becomes its extent.
void CheckBlockStrides(StridedMemory* memory, const std::string& name, std::size_t dense_dimensions);

// Whether they share a byte. Memories that lie between each other, as keys and values of one tensor do, are told apart
// where their strides agree; where they do not, they count as overlapping.
bool Overlap(const StridedMemory& first, const StridedMemory& second);

// ValueError if two of the memories that are to be written overlap.
void CheckTensorsApart(const std::vector<StridedMemory>& memories, const std::string& names);

}  // namespace paddle_kv
