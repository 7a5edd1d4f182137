// The layouts of block caches: what the dimensions of a tensor mean, and where its rows lie.
#pragma once

#include <string>
#include <vector>

#include "../common/paddle_api.h"
#include "cache_strides.h"
#include "paddle_kv/cache_write/move_tokens.h"

namespace paddle_kv {

// kHnd [blocks, heads, block size, head size], kNhd [blocks, block size, heads, head size]; packed keys
// [blocks, heads, head size / x, block size, x], packed values [blocks, heads, head size, block size]; kLatent
// [blocks, block size, width], which is one head of that size.
enum class Layout { kHnd, kNhd, kPackedKey, kPackedValue, kLatent };

struct CacheShape {
  int64_t blocks;
  int64_t heads;
  int64_t block_size;
  int64_t head_size;
};

// "HND", "NHD" or "packed", the latter for keys or values by `packed_key`; ValueError naming the argument otherwise.
Layout LayoutNamed(const std::string& layout, const std::string& argument, bool packed_key);

// The layout of a cache with so many dimensions: a latent one has no heads that HND and NHD could put anywhere.
Layout LayoutOfCache(std::size_t rank, const std::string& layout);

// Reads a shape. ValueError naming the tensor if the rank is not that of the layout.
CacheShape ReadShape(const std::vector<int64_t>& shape, Layout layout, const std::string& name);

// The shape of a tensor; `x` counts for packed keys only, and divides the head size.
std::vector<int64_t> TensorShape(const CacheShape& shape, Layout layout, int64_t x);

// The shape of contiguous tokens: without heads where the cache has none.
std::vector<int64_t> RowsShape(int64_t tokens, const CacheShape& shape, Layout layout);

// Where the rows of a contiguous tensor lie.
RowPlace PlaceOf(std::uint8_t* data, const CacheShape& shape, Layout layout, int64_t x, int64_t element_bytes);

// A cache tensor of the caller, checked: initialised, on a CPU or GPU, aligned, with the rank of the layout, with
// strides that CheckBlockStrides lets pass, and with rows small enough for the kernels.
struct CacheTensor {
  CacheShape shape;
  RowPlace place;
  int64_t element_bytes;
  StridedMemory memory;
};
CacheTensor CheckCacheTensor(const paddle::Tensor& cache, const std::string& name, Layout layout);

// ValueError unless both are on one device.
void CheckSameDevice(const paddle::Tensor& tensor, const std::string& name, const paddle::Tensor& cache,
                     const std::string& cache_name);

}  // namespace paddle_kv
