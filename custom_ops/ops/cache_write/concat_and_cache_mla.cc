// concat_and_cache_mla: latent and rope part of new tokens, side by side, into their slots of one cache.
#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/validate.h"
#include "cache_layout.h"
#include "new_tokens.h"

namespace paddle_kv {
namespace {

void Write(const StridedInput& kv_c, const StridedInput& k_pe, const paddle::Tensor& kv_cache,
           const StridedInput& slot_mapping, const paddle::optional<paddle::Tensor>& scale, float number,
           const std::string& kv_cache_dtype, int64_t stream) {
  CheckCache(kv_cache, "kv_cache");
  const auto shape = kv_cache.shape();
  if (shape.size() != 3) {
    ThrowValueError("kv_cache has shape " + ShapeText(shape) + "; [blocks, block size, rank + rope] is expected");
  }
  if (DeviceOf(kv_cache) == kPinned) {
    ThrowValueError("kv_cache is in pinned memory; a cache on the GPU (or, without one, on the CPU) is expected");
  }
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
  if (kv_c.dtype != k_pe.dtype) ThrowDtypesDiffer("kv_c", kv_c.dtype, "k_pe", k_pe.dtype);
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
  const HeadScale one_scale = ScaleOf(scale, number, "scale", 1, kv_cache);
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
    write.parts[part++] = {
        {source->data, source->strides[0], 0, source->strides[1]}, place, 1, source->shape[1], one_scale};
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

// In dygraph kv_c, k_pe and slot_mapping are absent, and their numbers given; see strided_input.h.
void ConcatAndCacheMla(paddle::Tensor& kv_cache, const paddle::optional<paddle::Tensor>& scale,
                       const paddle::optional<paddle::Tensor>& kv_c, const paddle::optional<paddle::Tensor>& k_pe,
                       const paddle::optional<paddle::Tensor>& slot_mapping, const std::vector<int64_t>& kv_c_numbers,
                       const std::vector<int64_t>& k_pe_numbers, const std::vector<int64_t>& slot_numbers, float number,
                       const std::string& kv_cache_dtype, int64_t stream) {
  Write(StridedFrom(kv_c, kv_c_numbers), StridedFrom(k_pe, k_pe_numbers), kv_cache,
        StridedFrom(slot_mapping, slot_numbers), scale, number, kv_cache_dtype, stream);
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_concat_and_cache_mla)
    .Inputs({"kv_cache", paddle::Optional("scale"), paddle::Optional("kv_c"), paddle::Optional("k_pe"),
             paddle::Optional("slot_mapping")})
    .Outputs({"kv_cache_out"})
    .Attrs({"kv_c_numbers: std::vector<int64_t>", "k_pe_numbers: std::vector<int64_t>",
            "slot_numbers: std::vector<int64_t>", "number: float", "kv_cache_dtype: std::string", "stream: int64_t"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ConcatAndCacheMla));
