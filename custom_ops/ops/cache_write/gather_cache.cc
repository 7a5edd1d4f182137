// gather_cache: the tokens of many sequences, from their blocks into contiguous rows; gather_cache_into: into those of
// the caller.
#include "../common/allocate.h"
#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/launch.h"
#include "../common/validate.h"
#include "cache_layout.h"
#include "mixed_latent.h"
#include "paddle_kv/cache_write/move_tokens.h"
#include "scale_argument.h"
#include "token_map.h"

namespace paddle_kv {
namespace {

struct Given {
  const paddle::Tensor& cache;
  const paddle::Tensor& block_table;
  const paddle::Tensor& cu_seq_lens;
  const paddle::optional<paddle::Tensor>& scale;
  const paddle::optional<paddle::Tensor>& starts;
  const std::string& layout;
  const std::string& kv_cache_dtype;
  float scale_value;
  const std::string& scale_layout;
  int64_t stream;
};

// out_dtype "": that of the cache.
paddle::DataType OutDtype(paddle::DataType cache, const std::string& out_dtype) {
  return out_dtype.empty() ? cache : PlainDtypeNamed(out_dtype, "out_dtype");
}

CacheShape RowsOf(CacheShape cache, const std::string& kv_cache_dtype) {
  if (kv_cache_dtype == MixedLatent::kName) cache.head_size = MixedLatent::kWidth;
  return cache;
}

// The scale of the caller: a number, one value, one for each head, what reshape_and_cache_dynamic keeps, or one for
// each sequence and head.
void ReadScale(const Given& given, const CacheShape& shape, Dequantization* how) {
  how->value = given.scale_value;
  const std::vector<int64_t> by_token = ScaleShape(shape, given.scale_layout);
  const std::vector<int64_t> by_sequence = {given.block_table.shape()[0], shape.heads};
  how->pointer = CheckScale(given.scale, "scale", shape.heads, given.cache, "cache", {by_token, by_sequence});
  if (given.scale && given.scale->shape() == by_token) {
    const ScalePlace place = ScalePlaceOf(MemoryOf(*given.scale), given.scale_layout, "scale");
    how->stride_per_block = place.stride_per_block;
    how->stride_per_head = place.stride_per_head;
    how->stride_per_token = place.stride_per_token;
  } else if (given.scale && given.scale->shape() == by_sequence) {
    const StridedMemory scales = MemoryOf(*given.scale);
    how->stride_per_sequence = by_sequence[0] == 1 ? 0 : scales.strides[0] / scales.item_bytes;
    how->stride_per_head = scales.strides[1] / scales.item_bytes;
  } else if (given.scale && given.scale->numel() > 1) {
    how->stride_per_head = 1;
  }
}

void Move(const TokenMove& move, const Dequantization* how, bool on_gpu, const DeviceStream& where) {
  if (!on_gpu) {
    how != nullptr ? DequantizeTokensCpu(move, *how) : GatherTokensCpu(move);
  } else if (how != nullptr) {
    LAUNCH_CUDA(where.device, DequantizeTokensCuda(move, *how, where));
  } else {
    LAUNCH_CUDA(where.device, GatherTokensCuda(move, where));
  }
}

// The codes of a mixed cache with their scales, then the rope as it is.
void MoveMixed(TokenMove move, const MixedLatent& from, bool on_gpu, const DeviceStream& where) {
  constexpr int64_t kGroupBytes = MixedLatent::kGroupSize * MixedLatent::kElementBytes;
  constexpr int64_t kRopeBytes = MixedLatent::kRope * MixedLatent::kElementBytes;
  Dequantization how;
  how.format = ElementType::kFp8E4m3;
  how.plain = ElementType::kBFloat16;
  how.pointer = from.scales.data;
  how.stride_per_block = from.scales.stride_per_block;
  how.stride_per_head = from.scales.stride_per_head;
  how.stride_per_token = from.scales.stride_per_token;
  move.cache = from.codes;
  move.heads = MixedLatent::kGroups;
  move.head_size = MixedLatent::kGroupSize;
  move.element_bytes = 1;
  move.rows.head_stride = move.rows.group_stride = move.rows.group_bytes = kGroupBytes;
  Move(move, &how, on_gpu, where);
  move.cache = from.rope;
  move.heads = 1;
  move.head_size = MixedLatent::kRope;
  move.element_bytes = MixedLatent::kElementBytes;
  move.rows.data += MixedLatent::kRank * MixedLatent::kElementBytes;
  move.rows.head_stride = 0;
  move.rows.group_stride = move.rows.group_bytes = kRopeBytes;
  Move(move, nullptr, on_gpu, where);
}

// Calls rows(shape, layout), which makes or checks the tensor that is written, when all else has been checked.
template <class Rows>
paddle::Tensor Gather(const Given& given, int64_t total_tokens, paddle::DataType dtype, const Rows& rows_of) {
  const paddle::Tensor& cache = given.cache;
  const Layout layout = LayoutOfCache(cache.shape().size(), given.layout);
  const CacheTensor from = CheckCacheTensor(cache, "cache", layout);
  const CacheShape& shape = from.shape;
  const bool on_gpu = OnGpu(cache);
  const DeviceStream where = on_gpu ? WhereOf(cache, given.stream) : DeviceStream{};
  const TokenMap map = CheckTokenMap(given.block_table, given.cu_seq_lens, given.starts, cache, shape, total_tokens,
                                     BlockUse::kRead, where);
  const bool mixed = given.kv_cache_dtype == MixedLatent::kName;
  const bool dequantizes = !mixed && given.kv_cache_dtype != "auto";
  Dequantization how;
  MixedLatent parts;
  if (mixed) {
    parts = CheckMixedLatent(from, cache, "cache");
    if (given.scale) ThrowValueError("scale was given with fp8_ds_mla, whose scales are in the cache");
    if (dtype != paddle::DataType::BFLOAT16) {
      ThrowValueError("out_dtype is " + DtypeName(dtype) + "; bfloat16 is expected with fp8_ds_mla");
    }
  } else if (dequantizes) {
    how.format = CacheTypeOf(cache, "cache", given.kv_cache_dtype);
    how.plain = PlainTypeOf(dtype, "out_dtype");
    ReadScale(given, shape, &how);
  } else if (dtype != cache.dtype()) {
    ThrowValueError("out_dtype = \"" + DtypeName(dtype) + "\" differs from the dtype of cache, " +
                    DtypeName(cache.dtype()) + "; kv_cache_dtype \"auto\" gathers the elements as they are");
  }

  const auto item_bytes = static_cast<int64_t>(phi::SizeOf(dtype));
  const CacheShape of_rows = RowsOf(shape, given.kv_cache_dtype);
  CheckedProduct(total_tokens, of_rows.heads * of_rows.head_size * item_bytes, "total_tokens x bytes of one token");
  paddle::Tensor rows = rows_of(RowsShape(total_tokens, of_rows, layout), from.memory);
  const RowPlace to =
      PlaceOf(BytesOf(rows), {total_tokens, of_rows.heads, 1, of_rows.head_size}, Layout::kNhd, 1, item_bytes);
  const TokenMove move{
      to, from.place, map, shape.blocks, total_tokens, shape.heads, shape.head_size, from.element_bytes};
  if (mixed) {
    MoveMixed(move, parts, on_gpu, where);
  } else {
    Move(move, dequantizes ? &how : nullptr, on_gpu, where);
  }
  return rows;
}

}  // namespace

std::vector<paddle::Tensor> GatherCache(const paddle::Tensor& cache, const paddle::Tensor& block_table,
                                        const paddle::Tensor& cu_seq_lens,
                                        const paddle::optional<paddle::Tensor>& scale,
                                        const paddle::optional<paddle::Tensor>& starts, int64_t total_tokens,
                                        const std::string& layout, const std::string& kv_cache_dtype,
                                        const std::string& out_dtype, float scale_value,
                                        const std::string& scale_layout, int64_t stream) {
  const paddle::DataType dtype = OutDtype(cache.dtype(), out_dtype);
  const Given given{cache,  block_table,    cu_seq_lens, scale,        starts,
                    layout, kv_cache_dtype, scale_value, scale_layout, stream};
  return {Gather(given, total_tokens, dtype, [&](const std::vector<int64_t>& shape, const StridedMemory&) {
    return NewTensor(shape, dtype, cache);
  })};
}

void GatherCacheInto(paddle::Tensor& out, const paddle::Tensor& cache, const paddle::Tensor& block_table,
                     const paddle::Tensor& cu_seq_lens, const paddle::optional<paddle::Tensor>& scale,
                     const paddle::optional<paddle::Tensor>& starts, const std::string& layout,
                     const std::string& kv_cache_dtype, float scale_value, const std::string& scale_layout,
                     int64_t stream) {
  const int64_t tokens = out.shape().empty() ? 0 : out.shape()[0];
  const Given given{cache,  block_table,    cu_seq_lens, scale,        starts,
                    layout, kv_cache_dtype, scale_value, scale_layout, stream};
  Gather(given, tokens, out.dtype(), [&](const std::vector<int64_t>& shape, const StridedMemory& cache_memory) {
    if (out.shape() != shape) {
      ThrowValueError("out has shape " + ShapeText(out.shape()) + "; " + ShapeText(shape) + " is expected");
    }
    CheckContiguous(out, "out");
    CheckSameDevice(out, "out", cache, "cache");
    const StridedMemory memory = MemoryOf(out);
    CheckAligned(memory.data, memory.item_bytes, "out");
    const auto apart = [&](const StridedMemory& read, const std::string& name) {
      if (Overlap(memory, read)) ThrowValueError("out and " + name + " overlap; out must be memory of its own");
    };
    apart(cache_memory, "cache");
    apart(MemoryOf(block_table), "block_table");
    apart(MemoryOf(cu_seq_lens), "cu_seq_lens");
    if (scale) apart(MemoryOf(*scale), "scale");
    if (starts) apart(MemoryOf(*starts), "starts");
    return out;
  });
}

std::vector<std::vector<int64_t>> GatherCacheShape(const std::vector<int64_t>& cache, const std::vector<int64_t>&,
                                                   const std::vector<int64_t>&,
                                                   const paddle::optional<std::vector<int64_t>>&,
                                                   const paddle::optional<std::vector<int64_t>>&, int64_t total_tokens,
                                                   const std::string& layout, const std::string& kv_cache_dtype) {
  const Layout cache_layout = LayoutOfCache(cache.size(), layout);
  return {RowsShape(total_tokens, RowsOf(ReadShape(cache, cache_layout, "cache"), kv_cache_dtype), cache_layout)};
}

std::vector<paddle::DataType> GatherCacheDtype(const paddle::DataType& cache, const paddle::DataType&,
                                               const paddle::DataType&, const paddle::optional<paddle::DataType>&,
                                               const paddle::optional<paddle::DataType>&, int64_t, const std::string&,
                                               const std::string&, const std::string& out_dtype) {
  return {OutDtype(cache, out_dtype)};
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_gather_cache)
    .Inputs({"cache", "block_table", "cu_seq_lens", paddle::Optional("scale"), paddle::Optional("starts")})
    .Outputs({"tokens"})
    .Attrs({"total_tokens: int64_t", "layout: std::string", "kv_cache_dtype: std::string", "out_dtype: std::string",
            "scale_value: float", "scale_layout: std::string", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL_OF_VIEWS(paddle_kv::GatherCache))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_kv::GatherCacheShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_kv::GatherCacheDtype));

PD_BUILD_STATIC_OP(paddle_kv_gather_cache_into)
    .Inputs({"out", "cache", "block_table", "cu_seq_lens", paddle::Optional("scale"), paddle::Optional("starts")})
    .Outputs({"rows"})
    .Attrs({"layout: std::string", "kv_cache_dtype: std::string", "scale_value: float", "scale_layout: std::string",
            "stream: int64_t"})
    .SetInplaceMap({{"out", "rows"}})
    .SetKernelFn(GUARDED_KERNEL_OF_VIEWS(paddle_kv::GatherCacheInto));
