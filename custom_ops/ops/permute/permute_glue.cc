#include "permute_glue.h"

#include <algorithm>
#include <limits>

#include "../common/element_type.h"
#include "../common/host_range.h"
#include "../memcpy/pointer_ranges.h"
#include "paddle_kv/common/cuda_device.h"

namespace paddle_kv {
namespace {

int64_t ElementBytes(const paddle::Tensor& tensor) { return static_cast<int64_t>(phi::SizeOf(tensor.dtype())); }

int64_t BytesIn(const paddle::Tensor& tensor, const std::string& name) {
  int64_t bytes = ElementBytes(tensor);
  for (const int64_t size : tensor.shape()) bytes = CheckedProduct(bytes, size, name);
  return bytes;
}

void CheckHasMemory(const paddle::Tensor& tensor, const std::string& name) {
  // A tensor without elements never has memory.
  if (!tensor.initialized() && tensor.numel() != 0)
    ThrowValueError(name + " holds no memory; an allocated tensor is expected");
}

void CheckDtype(const paddle::Tensor& tensor, const std::string& name, const paddle::Tensor& like,
                const std::string& like_name) {
  if (tensor.dtype() != like.dtype()) ThrowDtypesDiffer(name, tensor.dtype(), like_name, like.dtype());
}

void CheckShape(const paddle::Tensor& tensor, const std::string& name, const std::vector<int64_t>& expected,
                const std::string& meaning) {
  if (tensor.shape() != expected) {
    ThrowValueError(name + " has shape " + ShapeText(tensor.shape()) + "; " + ShapeText(expected) + " (" + meaning +
                    ") is expected");
  }
}

bool Overlap(const std::uint8_t* a, int64_t a_bytes, const std::uint8_t* b, int64_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

int64_t BlockCount(std::size_t chunk_count, int64_t num_layers, int64_t num_outer) {
  if (num_layers < 1) ThrowValueError("num_layers = " + std::to_string(num_layers) + " must be at least 1");
  if (num_outer < 1) ThrowValueError("num_outer = " + std::to_string(num_outer) + " must be at least 1");
  const int64_t per_block = CheckedProduct(num_layers, num_outer, "num_layers * num_outer");
  const auto count = static_cast<int64_t>(chunk_count);
  if (count % per_block != 0) {
    ThrowValueError("chunks has " + std::to_string(count) +
                    " entries; a multiple of num_layers * num_outer = " + std::to_string(per_block) + " is expected");
  }
  return count / per_block;
}

// Strides of rows in [.., tokens, heads, width] or [.., heads, tokens, width].
void SetRowStrides(ChunkSide* side, const PermuteShape& shape, bool heads_first) {
  side->head_stride = heads_first ? shape.tokens * shape.row_bytes : shape.row_bytes;
  side->token_stride = heads_first ? shape.row_bytes : shape.heads * shape.row_bytes;
}

// [blocks, heads, layers, outer, tokens, width]
DenseSide UniversalSide(const paddle::Tensor& universal, const PermuteShape& shape) {
  DenseSide side;
  side.base = BytesOf(universal);
  side.token_stride = shape.row_bytes;
  side.chunk_stride = shape.tokens * side.token_stride;
  side.head_stride = shape.chunks * side.chunk_stride;
  side.block_stride = shape.heads * side.head_stride;
  return side;
}

void Launch(const PermuteShape& shape, const ChunkSide& chunks, const DenseSide& dense, PermuteDirection direction,
            const Placement& place) {
  if (place.on_gpu) {
    LAUNCH_CUDA(place.where.device,
                PermuteChunksCuda(shape, chunks, dense, direction, place.touches_host, place.where));
  } else {
    PermuteChunksCpu(shape, chunks, dense, direction);
  }
}

}  // namespace

std::string TensorList::NameOf(std::size_t i) const {
  return tensors.size() == 1 ? name : name + "[" + std::to_string(i) + "]";
}

Placement PlaceTensors(const std::vector<TensorList>& lists, int64_t stream) {
  const paddle::Tensor* on_gpu = nullptr;
  for (const TensorList& list : lists) {
    for (const paddle::Tensor& tensor : list.tensors) {
      if (on_gpu == nullptr && OnGpu(tensor)) on_gpu = &tensor;
    }
  }
  if (on_gpu == nullptr) return {};
  Placement place{true, false, WhereOf(*on_gpu, stream)};
  for (const TensorList& list : lists) {
    for (std::size_t i = 0; i < list.tensors.size(); ++i) {
      const paddle::Tensor& tensor = list.tensors[i];
      if (OnGpu(tensor)) {
        if (DeviceOf(tensor) != place.where.device) {
          ThrowValueError(list.NameOf(i) + " is on another GPU than the other tensors; all must be on one");
        }
        continue;
      }
      place.touches_host = true;
      CheckReachable(tensor, list.NameOf(i), place.where.device);
    }
  }
  return place;
}

int64_t CheckAlike(const TensorList& list) {
  const paddle::Tensor& first = list.tensors.front();
  const std::vector<int64_t> shape = first.shape();
  for (std::size_t i = 0; i < list.tensors.size(); ++i) {
    const paddle::Tensor& tensor = list.tensors[i];
    CheckHasMemory(tensor, list.NameOf(i));
    if (i == 0) continue;
    if (tensor.dtype() != first.dtype()) CheckDtype(tensor, list.NameOf(i), first, list.NameOf(0));
    if (tensor.shape() != shape) CheckShape(tensor, list.NameOf(i), shape, "as " + list.NameOf(0));
  }
  return BytesIn(first, list.name);
}

void PermuteGivenChunks(const PermuteShape& shape, ChunkSide chunk_side, const DenseSide& dense_side,
                        const GivenChunks& chunks, const paddle::Tensor& dense, const std::string& dense_name,
                        PermuteDirection direction, int64_t stream) {
  const int64_t chunk_bytes = shape.heads * shape.tokens * shape.row_bytes;
  const int64_t dense_bytes = BytesIn(dense, dense_name);
  CheckHasMemory(dense, dense_name);
  Ids bases = chunks.addresses;
  Placement place;
  if (chunks.tensors != nullptr) {
    bases.reserve(chunks.tensors->size());
    const std::vector<paddle::Tensor> dense_list{dense};
    place = PlaceTensors({{*chunks.tensors, "chunks"}, {dense_list, dense_name}}, stream);
    for (const paddle::Tensor& chunk : *chunks.tensors) bases.push_back(reinterpret_cast<int64_t>(chunk.data()));
  } else if (chunks.device >= 0) {
    place.on_gpu = true;
    place.where = {static_cast<int>(chunks.device), stream};
    PointerRanges ranges(place.where.device);
    for (std::size_t i = 0; i < bases.size(); ++i) {
      place.touches_host |= ranges.CheckReachable(bases[i], chunk_bytes, "chunks", i) == MemoryKind::kHost;
    }
    const auto dense_address = reinterpret_cast<int64_t>(dense.data());
    place.touches_host |= ranges.CheckReachable(dense_address, dense_bytes, dense_name.c_str(), 0) == MemoryKind::kHost;
  } else {
    const Access access = direction == PermuteDirection::kFromDense ? Access::kWrite : Access::kRead;
    MappedMemory memory;
    for (std::size_t i = 0; i < bases.size(); ++i) {
      if (chunk_bytes == 0) break;
      if (bases[i] > 0 && chunk_bytes <= std::numeric_limits<int64_t>::max() - bases[i]) {
        CheckMapped(bases[i], chunk_bytes, "chunks", i, access, &memory);
        continue;
      }
      ThrowValueError("chunks[" + std::to_string(i) + "] = " + std::to_string(bases[i]) + "; the address of a chunk, " +
                      std::to_string(chunk_bytes) + " bytes, is expected");
    }
  }
  if (chunk_bytes == 0 || dense_bytes == 0) return;

  std::vector<std::pair<const std::uint8_t*, int64_t>> written;
  for (std::size_t i = 0; i < bases.size(); ++i) {
    const auto* chunk = reinterpret_cast<const std::uint8_t*>(bases[i]);
    if (Overlap(chunk, chunk_bytes, dense_side.base, dense_bytes)) {
      ThrowValueError("chunks[" + std::to_string(i) + "] and " + dense_name + " share memory; they must not overlap");
    }
    if (direction == PermuteDirection::kFromDense) written.emplace_back(chunk, chunk_bytes);
  }
  CheckApart(std::move(written), "chunks");

  chunk_side.bases = bases.data();
  chunk_side.base_count = static_cast<int64_t>(bases.size());
  chunk_side.bases_per_block = shape.chunks;
  Launch(shape, chunk_side, dense_side, direction, place);
}

void PermuteUniversal(const GivenChunks& chunks, const paddle::Tensor& universal, const std::string& universal_name,
                      int64_t num_layers, int64_t num_outer, bool heads_first, PermuteDirection direction,
                      int64_t stream) {
  const std::size_t count = chunks.tensors != nullptr ? chunks.tensors->size() : chunks.addresses.size();
  const int64_t block_count = BlockCount(count, num_layers, num_outer);
  const std::vector<int64_t> size = universal.shape();
  if (size.size() != 6) {
    ThrowValueError(universal_name + " has shape " + ShapeText(size) +
                    "; [blocks, heads, layers, outer, tokens, head size] is expected");
  }
  CheckShape(universal, universal_name, {block_count, size[1], num_layers, num_outer, size[4], size[5]},
             "blocks, heads, layers, outer, tokens, head size");
  PermuteShape shape;
  shape.blocks = block_count;
  shape.chunks = num_layers * num_outer;
  shape.heads = size[1];
  shape.tokens = size[4];
  shape.row_bytes = size[5] * ElementBytes(universal);
  if (chunks.tensors != nullptr && count > 0) {
    const TensorList list{*chunks.tensors, "chunks"};
    CheckAlike(list);
    CheckDtype(universal, universal_name, chunks.tensors->front(), "chunks[0]");
    if (heads_first) {
      CheckShape(chunks.tensors->front(), "chunks[0]", {shape.heads, shape.tokens, size[5]},
                 "heads, tokens, head size of " + universal_name);
    } else {
      CheckShape(chunks.tensors->front(), "chunks[0]", {shape.tokens, shape.heads, size[5]},
                 "tokens, heads, head size of " + universal_name);
    }
  }
  ChunkSide side;
  SetRowStrides(&side, shape, heads_first);
  PermuteGivenChunks(shape, side, UniversalSide(universal, shape), chunks, universal, universal_name, direction,
                     stream);
}

void PermuteOperational(const GivenChunks& chunks, const paddle::Tensor& operational,
                        const std::string& operational_name, int64_t num_layers, int64_t num_outer,
                        PermuteDirection direction, int64_t stream) {
  const std::size_t count = chunks.tensors != nullptr ? chunks.tensors->size() : chunks.addresses.size();
  const int64_t block_count = BlockCount(count, num_layers, num_outer);
  const std::vector<int64_t> size = operational.shape();
  if (size.size() != 4) {
    ThrowValueError(operational_name + " has shape " + ShapeText(size) +
                    "; [blocks, layers, outer, inner] is expected");
  }
  int64_t inner = size[3];
  if (chunks.tensors != nullptr && count > 0) {
    const TensorList list{*chunks.tensors, "chunks"};
    inner = CheckAlike(list) / ElementBytes(chunks.tensors->front());
    CheckDtype(operational, operational_name, chunks.tensors->front(), "chunks[0]");
  }
  CheckShape(operational, operational_name, {block_count, num_layers, num_outer, inner},
             "blocks, layers, outer, elements of one chunk");
  PermuteShape shape;
  shape.blocks = block_count;
  shape.chunks = num_layers * num_outer;
  shape.heads = 1;
  shape.tokens = 1;
  shape.row_bytes = inner * ElementBytes(operational);
  DenseSide side;
  side.base = BytesOf(operational);
  side.chunk_stride = shape.row_bytes;
  side.block_stride = shape.chunks * shape.row_bytes;
  PermuteGivenChunks(shape, {}, side, chunks, operational, operational_name, direction, stream);
}

namespace {

struct CacheList {
  const std::vector<paddle::Tensor>& caches;
  std::size_t key_count;

  std::string NameOf(std::size_t i) const {
    const bool is_key = i < key_count;
    return (is_key ? "key_caches[" : "value_caches[") + std::to_string(is_key ? i : i - key_count) + "]";
  }
};

// Checks the caches and returns what one block of them gives to the universal tensor; `limit` becomes the number of
// blocks that every cache has.
PermuteShape CheckCaches(const CacheList& list, bool heads_first, int64_t* width, int64_t* limit) {
  const paddle::Tensor& first = list.caches.front();
  const std::vector<int64_t> size = first.shape();
  if (size.size() != 3 && size.size() != 4) {
    ThrowValueError(list.NameOf(0) + " has shape " + ShapeText(size) + "; " +
                    (heads_first ? "[blocks, heads, tokens, head size]" : "[blocks, tokens, heads, head size]") +
                    " or [blocks, tokens, size] is expected");
  }
  *limit = size[0];
  for (std::size_t i = 0; i < list.caches.size(); ++i) {
    const paddle::Tensor& cache = list.caches[i];
    CheckHasMemory(cache, list.NameOf(i));
    CheckDtype(cache, list.NameOf(i), first, list.NameOf(0));
    std::vector<int64_t> expected = size;
    if (!cache.shape().empty()) expected[0] = cache.shape()[0];
    CheckShape(cache, list.NameOf(i), expected, "the block shape of " + list.NameOf(0));
    *limit = std::min(*limit, cache.shape()[0]);
  }
  const bool has_heads = size.size() == 4;
  PermuteShape shape;
  shape.chunks = static_cast<int64_t>(list.caches.size());
  shape.heads = has_heads ? size[heads_first ? 1 : 2] : 1;
  shape.tokens = has_heads ? size[heads_first ? 2 : 1] : size[1];
  *width = size.back();
  shape.row_bytes = *width * ElementBytes(first);
  return shape;
}

template <class Integer>
void AppendIds(const void* from, int64_t count, Ids* ids) {
  const auto* values = static_cast<const Integer*>(from);
  ids->assign(values, values + count);
}

void CheckCacheIds(const Ids& ids, int64_t limit, PermuteDirection direction) {
  CheckIds(ids, "block_ids", limit);
  if (direction == PermuteDirection::kFromDense) CheckDistinct(ids, "block_ids");
}

// Ids that only the GPU knows; read back under PADDLE_KV_CHECK=1.
DeviceIds CheckDeviceIds(const paddle::Tensor& tensor, int64_t limit, PermuteDirection direction,
                         const Placement& place) {
  const DeviceIds ids{tensor.data(), tensor.dtype() == phi::DataType::INT64, limit};
  const int64_t count = tensor.shape()[0];
  if (!CheckRequested() || count == 0) return ids;
  bool capturing = false;
  LAUNCH_CUDA(place.where.device, StreamIsCapturing(place.where, &capturing));
  if (capturing) return ids;  // nothing may wait for a stream that is being captured
  std::vector<std::uint8_t> read(count * (ids.is_int64 ? sizeof(int64_t) : sizeof(std::int32_t)));
  LAUNCH_CUDA(place.where.device, CopyToHost(read.data(), ids.ids, static_cast<int64_t>(read.size()), place.where));
  Ids values;
  ids.is_int64 ? AppendIds<int64_t>(read.data(), count, &values) : AppendIds<std::int32_t>(read.data(), count, &values);
  values.erase(std::remove_if(values.begin(), values.end(), [](int64_t id) { return id < 0; }), values.end());
  CheckCacheIds(values, limit, direction);
  return ids;
}

}  // namespace

void PermuteCaches(const std::vector<paddle::Tensor>& caches, int64_t key_count,
                   const paddle::optional<paddle::Tensor>& id_tensor, const Ids& id_list,
                   const paddle::Tensor& universal, const std::string& universal_name, bool heads_first,
                   PermuteDirection direction, int64_t stream) {
  const CacheList list{caches, static_cast<std::size_t>(key_count)};
  const auto cache_count = static_cast<int64_t>(caches.size());
  if (cache_count != key_count && cache_count != 2 * key_count) {
    ThrowValueError("key_caches has " + std::to_string(key_count) + " tensors, value_caches " +
                    std::to_string(cache_count - key_count) + "; both must have one for each layer");
  }
  const int64_t num_outer = cache_count / key_count;
  int64_t limit = 0;
  int64_t width = 0;
  PermuteShape shape = CheckCaches(list, heads_first, &width, &limit);
  const int64_t block_bytes = shape.heads * shape.tokens * shape.row_bytes;

  if (id_tensor) {
    if (id_tensor->shape().size() != 1)
      ThrowValueError("block_ids has shape " + ShapeText(id_tensor->shape()) + "; 1-D ids are expected");
    if (id_tensor->dtype() != phi::DataType::INT32 && id_tensor->dtype() != phi::DataType::INT64) {
      ThrowValueError("block_ids must have dtype int32 or int64");
    }
  }
  shape.blocks = id_tensor ? id_tensor->shape()[0] : static_cast<int64_t>(id_list.size());
  CheckHasMemory(universal, universal_name);
  CheckDtype(universal, universal_name, caches.front(), "key_caches[0]");
  CheckShape(universal, universal_name, {shape.blocks, shape.heads, key_count, num_outer, shape.tokens, width},
             "ids, heads, layers, outer, tokens, head size");

  const std::vector<paddle::Tensor> universal_list{universal};
  const Placement place =
      PlaceTensors({{caches, "key_caches + value_caches"}, {universal_list, universal_name}}, stream);
  std::vector<std::pair<const std::uint8_t*, int64_t>> ranges;
  const int64_t universal_bytes = BytesIn(universal, universal_name);
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const int64_t bytes = CheckedProduct(caches[i].shape()[0], block_bytes, list.NameOf(i));
    if (Overlap(BytesOf(caches[i]), bytes, BytesOf(universal), universal_bytes)) {
      ThrowValueError(list.NameOf(i) + " and " + universal_name + " share memory; they must not overlap");
    }
    if (direction == PermuteDirection::kFromDense) ranges.emplace_back(BytesOf(caches[i]), bytes);
  }
  CheckApart(std::move(ranges), "key_caches and value_caches");

  ChunkSide side;
  Ids ids = id_list;
  if (id_tensor && OnGpu(*id_tensor)) {
    if (!place.on_gpu || DeviceOf(*id_tensor) != place.where.device) {
      ThrowValueError(
          "block_ids is on another device than the caches; ids are expected on the host or on the caches' device");
    }
    side.device_ids = CheckDeviceIds(*id_tensor, limit, direction, place);
  } else {
    if (id_tensor) {
      id_tensor->dtype() == phi::DataType::INT64 ? AppendIds<int64_t>(id_tensor->data(), shape.blocks, &ids)
                                                 : AppendIds<std::int32_t>(id_tensor->data(), shape.blocks, &ids);
    }
    CheckCacheIds(ids, limit, direction);
    side.ids = ids.data();
  }
  if (universal_bytes == 0) return;

  // The universal layout has keys and values of a layer side by side, the list has all keys first.
  Ids bases;
  for (int64_t layer = 0; layer < key_count; ++layer) {
    for (int64_t outer = 0; outer < num_outer; ++outer) {
      bases.push_back(reinterpret_cast<int64_t>(caches[outer * key_count + layer].data()));
    }
  }
  side.bases = bases.data();
  side.base_count = cache_count;
  side.block_stride = block_bytes;
  SetRowStrides(&side, shape, heads_first);
  Launch(shape, side, UniversalSide(universal, shape), direction, place);
}

}  // namespace paddle_kv
