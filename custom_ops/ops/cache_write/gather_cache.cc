// gather_cache: the tokens of many sequences, from their blocks into contiguous rows.
#include "../common/allocate.h"
#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/launch.h"
#include "../common/validate.h"
#include "cache_layout.h"
#include "paddle_kv/cache_write/move_tokens.h"
#include "scale_argument.h"
#include "token_map.h"

namespace paddle_kv {
namespace {

// out_dtype "": that of the cache.
paddle::DataType OutDtype(paddle::DataType cache, const std::string& out_dtype) {
  return out_dtype.empty() ? cache : PlainDtypeNamed(out_dtype, "out_dtype");
}

// The scale of the caller: a number, one value, one for each head, or what reshape_and_cache_dynamic keeps.
void ReadScale(const paddle::optional<paddle::Tensor>& scale, float number, const CacheShape& shape,
               const paddle::Tensor& cache, Dequantization* how) {
  how->value = number;
  const std::vector<int64_t> by_token{shape.blocks, shape.heads, shape.block_size};
  how->pointer = CheckScale(scale, "scale", shape.heads, cache, "cache", by_token);
  if (scale && scale->shape() == by_token) {
    how->stride_per_block = shape.heads * shape.block_size;
    how->stride_per_head = shape.block_size;
    how->stride_per_token = 1;
  } else if (scale && scale->numel() > 1) {
    how->stride_per_head = 1;
  }
}

}  // namespace

std::vector<paddle::Tensor> GatherCache(const paddle::Tensor& cache, const paddle::Tensor& block_table,
                                        const paddle::Tensor& cu_seq_lens,
                                        const paddle::optional<paddle::Tensor>& scale, int64_t total_tokens,
                                        const std::string& layout, const std::string& out_dtype,
                                        const std::string& kv_cache_dtype, float scale_value, int64_t stream) {
  const Layout cache_layout = LayoutOfCache(cache.shape().size(), layout);
  const CacheTensor from = CheckCacheTensor(cache, "cache", cache_layout);
  const CacheShape& shape = from.shape;
  const DeviceStream where = OnGpu(cache) ? WhereOf(cache, stream) : DeviceStream{};
  const TokenMap map = CheckTokenMap(block_table, cu_seq_lens, cache, shape, total_tokens, BlockUse::kRead, where);
  const bool dequantizes = kv_cache_dtype != "auto";
  Dequantization how;
  if (dequantizes) {
    how.format = CacheTypeOf(cache, "cache", kv_cache_dtype);
    how.plain = PlainTypeNamed(out_dtype, "out_dtype");
    ReadScale(scale, scale_value, shape, cache, &how);
  } else if (OutDtype(cache.dtype(), out_dtype) != cache.dtype()) {
    ThrowValueError("out_dtype = \"" + out_dtype + "\" differs from the dtype of cache, " + DtypeName(cache.dtype()) +
                    "; kv_cache_dtype \"auto\" gathers the elements as they are");
  }

  const paddle::DataType dtype = OutDtype(cache.dtype(), out_dtype);
  CheckedProduct(total_tokens, shape.heads * shape.head_size * static_cast<int64_t>(phi::SizeOf(dtype)),
                 "total_tokens x bytes of one token");
  paddle::Tensor rows = NewTensor(RowsShape(total_tokens, shape, cache_layout), dtype, cache);
  const CacheShape rows_shape{total_tokens, shape.heads, 1, shape.head_size};
  const RowPlace to = PlaceOf(BytesOf(rows), rows_shape, Layout::kNhd, 1, static_cast<int64_t>(phi::SizeOf(dtype)));
  const TokenMove move{
      to, from.place, map, shape.blocks, total_tokens, shape.heads, shape.head_size, from.element_bytes};
  if (!OnGpu(cache)) {
    dequantizes ? DequantizeTokensCpu(move, how) : GatherTokensCpu(move);
  } else if (dequantizes) {
    LAUNCH_CUDA(where.device, DequantizeTokensCuda(move, how, where));
  } else {
    LAUNCH_CUDA(where.device, GatherTokensCuda(move, where));
  }
  return {rows};
}

std::vector<std::vector<int64_t>> GatherCacheShape(const std::vector<int64_t>& cache, const std::vector<int64_t>&,
                                                   const std::vector<int64_t>&,
                                                   const paddle::optional<std::vector<int64_t>>&, int64_t total_tokens,
                                                   const std::string& layout) {
  const Layout cache_layout = LayoutOfCache(cache.size(), layout);
  return {RowsShape(total_tokens, ReadShape(cache, cache_layout, "cache"), cache_layout)};
}

std::vector<paddle::DataType> GatherCacheDtype(const paddle::DataType& cache, const paddle::DataType&,
                                               const paddle::DataType&, const paddle::optional<paddle::DataType>&,
                                               int64_t, const std::string&, const std::string& out_dtype) {
  return {OutDtype(cache, out_dtype)};
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_gather_cache)
    .Inputs({"cache", "block_table", "cu_seq_lens", paddle::Optional("scale")})
    .Outputs({"tokens"})
    .Attrs({"total_tokens: int64_t", "layout: std::string", "out_dtype: std::string", "kv_cache_dtype: std::string",
            "scale_value: float", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::GatherCache))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_kv::GatherCacheShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_kv::GatherCacheDtype));
