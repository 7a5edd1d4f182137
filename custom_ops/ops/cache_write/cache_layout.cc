#include "cache_layout.h"

#include "../common/errors.h"
#include "../common/launch.h"
#include "../common/validate.h"

namespace paddle_kv {
namespace {

// Strides in bytes, of the dimensions of the tensor.
RowPlace PlaceOfStrides(std::uint8_t* data, const CacheShape& shape, Layout layout, const std::vector<int64_t>& strides,
                        int64_t x, int64_t element_bytes) {
  const int64_t row_bytes = shape.head_size * element_bytes;
  switch (layout) {
    case Layout::kHnd:
      return {data, shape.block_size, strides[0], strides[2], strides[1], row_bytes, row_bytes};
    case Layout::kNhd:
      return {data, shape.block_size, strides[0], strides[1], strides[2], row_bytes, row_bytes};
    case Layout::kLatent:
      return {data, shape.block_size, strides[0], strides[1], strides[1], row_bytes, row_bytes};
    case Layout::kPackedKey:
      return {data, shape.block_size, strides[0], strides[3], strides[1], strides[2], x * element_bytes};
    default:
      return {data, shape.block_size, strides[0], strides[3], strides[1], strides[2], element_bytes};
  }
}

}  // namespace

Layout LayoutNamed(const std::string& layout, const std::string& argument, bool packed_key) {
  if (layout == "HND") return Layout::kHnd;
  if (layout == "NHD") return Layout::kNhd;
  if (layout == "packed") return packed_key ? Layout::kPackedKey : Layout::kPackedValue;
  ThrowValueError(argument + " = \"" + layout + "\" must be \"HND\", \"NHD\" or \"packed\"");
}

Layout LayoutOfCache(std::size_t rank, const std::string& layout) {
  const Layout named = LayoutNamed(layout, "layout", rank == 5);
  return rank == 3 && layout != "packed" ? Layout::kLatent : named;
}

CacheShape ReadShape(const std::vector<int64_t>& shape, Layout layout, const std::string& name) {
  const std::size_t rank = layout == Layout::kPackedKey ? 5 : layout == Layout::kLatent ? 3 : 4;
  if (shape.size() != rank) {
    const std::string expected = layout == Layout::kHnd   ? "[blocks, heads, block size, head size]"
                                 : layout == Layout::kNhd ? "[blocks, block size, heads, head size]"
                                 : layout == Layout::kPackedKey
                                     ? "[blocks, heads, head size / x, block size, x], packed keys,"
                                     : "[blocks, heads, head size, block size], packed values,";
    ThrowValueError(name + " has shape " + ShapeText(shape) + "; " + expected + " is expected");
  }
  switch (layout) {
    case Layout::kHnd:
      return {shape[0], shape[1], shape[2], shape[3]};
    case Layout::kNhd:
      return {shape[0], shape[2], shape[1], shape[3]};
    case Layout::kPackedKey:
      return {shape[0], shape[1], shape[3],
              shape[2] < 0 || shape[4] < 0 ? -1 : shape[2] * shape[4]};  // -1: unknown in a program
    case Layout::kLatent:
      return {shape[0], 1, shape[1], shape[2]};
    default:
      return {shape[0], shape[1], shape[3], shape[2]};
  }
}

std::vector<int64_t> TensorShape(const CacheShape& shape, Layout layout, int64_t x) {
  switch (layout) {
    case Layout::kHnd:
      return {shape.blocks, shape.heads, shape.block_size, shape.head_size};
    case Layout::kNhd:
      return {shape.blocks, shape.block_size, shape.heads, shape.head_size};
    case Layout::kPackedKey:
      return {shape.blocks, shape.heads, shape.head_size / x, shape.block_size, x};
    case Layout::kLatent:
      return {shape.blocks, shape.block_size, shape.head_size};
    default:
      return {shape.blocks, shape.heads, shape.head_size, shape.block_size};
  }
}

std::vector<int64_t> RowsShape(int64_t tokens, const CacheShape& shape, Layout layout) {
  if (layout == Layout::kLatent) return {tokens, shape.head_size};
  return {tokens, shape.heads, shape.head_size};
}

RowPlace PlaceOf(std::uint8_t* data, const CacheShape& shape, Layout layout, int64_t x, int64_t element_bytes) {
  return PlaceOfStrides(data, shape, layout, ContiguousStrides(TensorShape(shape, layout, x), element_bytes), x,
                        element_bytes);
}

CacheTensor CheckCacheTensor(const paddle::Tensor& cache, const std::string& name, Layout layout) {
  if (!cache.initialized()) ThrowValueError(name + " holds no memory; a cache that was allocated is expected");
  if (DeviceOf(cache) == kPinned) {
    ThrowValueError(name + " is in pinned memory; a cache on the GPU (or, without one, on the CPU) is expected");
  }
  StridedMemory memory = MemoryOf(cache);
  CheckAligned(memory.data, memory.item_bytes, name);
  const CacheShape shape = ReadShape(memory.shape, layout, name);
  constexpr int64_t kMostTokenBytes = int64_t{1} << 30;
  const int64_t token_elements = CheckedProduct(shape.heads, shape.head_size, name);
  if (CheckedProduct(token_elements, memory.item_bytes, name) > kMostTokenBytes) {
    ThrowValueError(name + " has " + std::to_string(token_elements) + " elements a token; at most 1 GiB is supported");
  }
  CheckBlockStrides(&memory, name, 1);
  const RowPlace place =
      PlaceOfStrides(BytesOf(cache), shape, layout, memory.strides, memory.shape.back(), memory.item_bytes);
  return {shape, place, memory.item_bytes, std::move(memory)};
}

void CheckSameDevice(const paddle::Tensor& tensor, const std::string& name, const paddle::Tensor& cache,
                     const std::string& cache_name) {
  if (DeviceOf(tensor) != DeviceOf(cache)) {
    ThrowValueError(name + " and " + cache_name + " are on different devices; both must be on one");
  }
}

}  // namespace paddle_kv
