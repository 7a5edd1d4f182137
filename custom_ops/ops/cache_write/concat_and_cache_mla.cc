// concat_and_cache_mla: latent and rope part of new tokens, side by side, into their slots of one cache.
#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/validate.h"
#include "new_tokens.h"

namespace paddle_kv {
namespace {

void Write(const StridedInput& kv_c, const StridedInput& k_pe, const paddle::Tensor& kv_cache,
           const StridedInput& slot_mapping, const GivenScale& given_scale, const std::string& kv_cache_dtype,
           int64_t stream) {
  CheckCache(kv_cache, "kv_cache");
  const auto shape = kv_cache.shape();
  if (shape.size() != 3) {
    ThrowValueError("kv_cache has shape " + ShapeText(shape) + "; [blocks, block size, rank + rope] is expected");
  }
  CheckOnCpuOrGpu(kv_cache, "kv_cache");
  CheckRank(kv_c, "kv_c", 2, "[tokens, rank]");
  CheckRank(k_pe, "k_pe", 2, "[tokens, rope]");
  if (kv_c.shape[1] + k_pe.shape[1] != shape[2]) {
    ThrowValueError("kv_c has rank " + std::to_string(kv_c.shape[1]) + ", k_pe has rope " +
                    std::to_string(k_pe.shape[1]) + ", kv_cache has rows of " + std::to_string(shape[2]) +
                    "; rank + rope must be the row of the cache");
  }
  if (kv_c.shape[0] != k_pe.shape[0]) {
    ThrowValueError("kv_c has " + std::to_string(kv_c.shape[0]) + " tokens, k_pe has " + std::to_string(k_pe.shape[0]) +
                    "; both must have the same number");
  }
  if (kv_c.dtype != k_pe.dtype) ThrowValueError("kv_c and k_pe differ in dtype; both must have the same");
  CheckBeside(kv_c, "kv_c", kv_cache, "kv_cache");
  CheckBeside(k_pe, "k_pe", kv_cache, "kv_cache");

  TokenWrite write{};
  write.part_count = 2;
  write.plain = PlainTypeOf(kv_c.dtype, "kv_c");
  write.stored = CacheTypeOf(kv_cache, "kv_cache", kv_cache_dtype);
  if (kv_cache_dtype == "auto" && write.stored != write.plain) {
    ThrowValueError("kv_c has dtype " + DtypeName(kv_c.dtype) + ", kv_cache has " + DtypeName(kv_cache.dtype()) +
                    "; with kv_cache_dtype \"auto\" both must have the same");
  }
  const auto item_bytes = static_cast<int64_t>(phi::SizeOf(kv_cache.dtype()));
  const HeadScale scale = CheckScale(given_scale, "scale", 1, write.stored, kv_cache);
  int64_t before = 0;
  int part = 0;
  for (const StridedInput* source : {&kv_c, &k_pe}) {
    const int64_t row_bytes = source->shape[1] * item_bytes;
    RowPlace place{};
    place.data = BytesOf(kv_cache) + before;
    place.block_size = shape[1];
    place.block_stride = shape[1] * shape[2] * item_bytes;
    place.token_stride = shape[2] * item_bytes;
    place.head_stride = 0;
    place.group_stride = place.group_bytes = row_bytes;
    write.parts[part++] = {{source->data, source->strides[0], 0, source->strides[1]}, place, 1, source->shape[1], scale};
    before += row_bytes;
  }
  CheckSlots(slot_mapping, CheckedProduct(shape[0], shape[1], "kv_cache"), kv_c.shape[0], "kv_c", false, kv_cache,
             &write);
  if (OnGpu(kv_cache)) {
    const DeviceStream where = WhereOf(kv_cache, stream);
    CheckSlotValues(write, kv_cache, where);
    LAUNCH_CUDA(where.device, WriteTokensCuda(write, where));
  } else {
    CheckSlotValues(write, kv_cache, {});
    WriteTokensCpu(write);
  }
}

}  // namespace

// Dygraph: what is only read comes as numbers, see strided_input.h.
void ConcatAndCacheMla(const paddle::Tensor& kv_cache, const std::vector<int64_t>& kv_c,
                       const std::vector<int64_t>& k_pe, const std::vector<int64_t>& slot_mapping,
                       const std::vector<int64_t>& scale, float scale_number, const std::string& kv_cache_dtype,
                       int64_t stream) {
  Write(StridedFromNumbers(kv_c), StridedFromNumbers(k_pe), kv_cache, StridedFromNumbers(slot_mapping),
        {StridedFromNumbers(scale), scale_number}, kv_cache_dtype, stream);
}

void ConcatAndCacheMlaInPlace(const paddle::Tensor& kv_c, const paddle::Tensor& k_pe, paddle::Tensor& kv_cache,
                              const paddle::Tensor& slot_mapping, const paddle::optional<paddle::Tensor>& scale,
                              float scale_number, const std::string& kv_cache_dtype, int64_t stream) {
  Write(StridedFromTensor(kv_c), StridedFromTensor(k_pe), kv_cache, StridedFromTensor(slot_mapping),
        {StridedFromTensor(scale), scale_number}, kv_cache_dtype, stream);
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_concat_and_cache_mla)
    .Inputs({"kv_cache"})
    .Outputs({})
    .Attrs({"kv_c: std::vector<int64_t>", "k_pe: std::vector<int64_t>", "slot_mapping: std::vector<int64_t>",
            "scale: std::vector<int64_t>", "scale_number: float", "kv_cache_dtype: std::string", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ConcatAndCacheMla));

PD_BUILD_STATIC_OP(paddle_kv_concat_and_cache_mla_in_place)
    .Inputs({"kv_c", "k_pe", "kv_cache", "slot_mapping", paddle::Optional("scale")})
    .Outputs({"kv_cache_out"})
    .Attrs({"scale_number: float", "kv_cache_dtype: std::string", "stream: int64_t"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ConcatAndCacheMlaInPlace));
