// concat_and_cache_mla: latent and rope part of new tokens, side by side, into their slots of one cache.
#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/validate.h"
#include "cache_layout.h"
#include "mixed_latent.h"
#include "new_tokens.h"

namespace paddle_kv {
namespace {

// [blocks, block size, width], or with the one head as a dimension, wherever that stands.
CacheTensor CheckLatentCache(const paddle::Tensor& kv_cache) {
  const auto shape = kv_cache.shape();
  const bool has_head = shape.size() == 4 && (shape[1] == 1 || shape[2] == 1);
  if (shape.size() != 3 && !has_head) {
    ThrowValueError("kv_cache has shape " + ShapeText(shape) + "; [blocks, block size, rank + rope] is expected");
  }
  return CheckCacheTensor(kv_cache, "kv_cache",
                          !has_head       ? Layout::kLatent
                          : shape[1] == 1 ? Layout::kHnd
                                          : Layout::kNhd);
}

// The latent and the rope part as the two parts of one write.
TokenWrite PartsOf(const StridedInput& kv_c, const StridedInput& k_pe, const CacheTensor& cache) {
  TokenWrite write{};
  write.part_count = 2;
  int64_t before = 0;
  int part = 0;
  for (const StridedInput* source : {&kv_c, &k_pe}) {
    const int64_t row_bytes = source->shape[1] * cache.element_bytes;
    RowPlace place = cache.place;
    place.data += before;
    place.head_stride = 0;
    place.group_stride = place.group_bytes = row_bytes;
    write.parts[part++] = {{source->data, source->strides[0], 0, source->strides[1]}, place, 1, source->shape[1], {}};
    before += row_bytes;
  }
  return write;
}

void WriteMixed(const StridedInput& kv_c, const StridedInput& k_pe, const paddle::Tensor& kv_cache,
                const CacheTensor& cache, const StridedInput& slot_mapping, const DeviceStream& where) {
  const MixedLatent to = CheckMixedLatent(cache, kv_cache, "kv_cache");
  if (kv_c.shape[1] != MixedLatent::kRank || k_pe.shape[1] != MixedLatent::kRope) {
    ThrowValueError("kv_c has rank " + std::to_string(kv_c.shape[1]) + ", k_pe has rope " +
                    std::to_string(k_pe.shape[1]) + "; " + std::to_string(MixedLatent::kRank) + " and " +
                    std::to_string(MixedLatent::kRope) + " are expected with kv_cache_dtype \"" + MixedLatent::kName +
                    "\"");
  }
  if (kv_c.dtype != paddle::DataType::BFLOAT16) {
    ThrowValueError("kv_c has dtype " + DtypeName(kv_c.dtype) + "; bfloat16 is expected with kv_cache_dtype \"" +
                    MixedLatent::kName + "\"");
  }
  DynamicTokenWrite write{PartsOf(kv_c, k_pe, cache), {to.scales, {}}};
  TokenWrite& tokens = write.tokens;
  tokens.plain = ElementType::kBFloat16;
  tokens.stored = ElementType::kFp8E4m3;
  TokenPart& latent = tokens.parts[0];
  latent.cache = to.codes;
  latent.heads = MixedLatent::kGroups;
  latent.head_size = MixedLatent::kGroupSize;
  latent.source.head_stride = MixedLatent::kGroupSize * latent.source.element_stride;
  tokens.parts[1].cache = to.rope;
  CheckSlots(slot_mapping, CheckedProduct(cache.shape.blocks, cache.shape.block_size, "kv_cache"), kv_c.shape[0],
             "kv_c", false, kv_cache, &tokens);
  CheckSlotValues(tokens, kv_cache, where);
  if (OnGpu(kv_cache)) {
    LAUNCH_CUDA(where.device, ReshapeAndCacheDynamicCuda(write, where));
  } else {
    ReshapeAndCacheDynamicCpu(write);
  }
}

void Write(const StridedInput& kv_c, const StridedInput& k_pe, const paddle::Tensor& kv_cache,
           const StridedInput& slot_mapping, const paddle::optional<paddle::Tensor>& scale, float number,
           const std::string& kv_cache_dtype, bool dependent_launch, int64_t stream) {
  const CacheTensor cache = CheckLatentCache(kv_cache);
  const CacheShape& shape = cache.shape;
  CheckRank(kv_c, "kv_c", 2, "[tokens, rank]");
  CheckRank(k_pe, "k_pe", 2, "[tokens, rope]");
  if (kv_c.shape[0] != k_pe.shape[0]) {
    ThrowValueError("kv_c has " + std::to_string(kv_c.shape[0]) + " tokens, k_pe has " + std::to_string(k_pe.shape[0]) +
                    "; both must have the same number");
  }
  if (kv_c.dtype != k_pe.dtype) ThrowDtypesDiffer("kv_c", kv_c.dtype, "k_pe", k_pe.dtype);
  CheckBeside(kv_c, "kv_c", kv_cache, "kv_cache");
  CheckBeside(k_pe, "k_pe", kv_cache, "kv_cache");
  const DeviceStream where = OnGpu(kv_cache) ? WhereOf(kv_cache, stream) : DeviceStream{};
  if (kv_cache_dtype == MixedLatent::kName) {
    if (scale) ThrowValueError("scale is given, but fp8_ds_mla computes a scale for each group");
    WriteMixed(kv_c, k_pe, kv_cache, cache, slot_mapping, where);
    return;
  }
  if (kv_c.shape[1] + k_pe.shape[1] != shape.head_size) {
    ThrowValueError("kv_c has rank " + std::to_string(kv_c.shape[1]) + ", k_pe has rope " +
                    std::to_string(k_pe.shape[1]) + ", kv_cache has rows of " + std::to_string(shape.head_size) +
                    "; rank + rope must be the row of the cache");
  }
  TokenWrite write = PartsOf(kv_c, k_pe, cache);
  write.plain = PlainTypeOf(kv_c.dtype, "kv_c");
  write.stored = CacheTypeOf(kv_cache, "kv_cache", kv_cache_dtype);
  if (kv_cache_dtype == "auto" && write.stored != write.plain) {
    ThrowValueError("kv_c has dtype " + DtypeName(kv_c.dtype) + ", kv_cache has " + DtypeName(kv_cache.dtype()) +
                    "; with kv_cache_dtype \"auto\" both must have the same");
  }
  write.parts[0].scale = write.parts[1].scale = ScaleOf(scale, number, "scale", 1, kv_cache);
  CheckSlots(slot_mapping, CheckedProduct(shape.blocks, shape.block_size, "kv_cache"), kv_c.shape[0], "kv_c", false,
             kv_cache, &write);
  CheckSlotValues(write, kv_cache, where);
  if (OnGpu(kv_cache)) {
    LAUNCH_CUDA(where.device, WriteTokensCuda(write, dependent_launch, where));
  } else {
    WriteTokensCpu(write);
  }
}

}  // namespace

// In dygraph kv_c, k_pe and slot_mapping are absent, and their numbers given; see strided_input.h.
void ConcatAndCacheMla(paddle::Tensor& kv_cache, const paddle::optional<paddle::Tensor>& scale,
                       const paddle::optional<paddle::Tensor>& kv_c, const paddle::optional<paddle::Tensor>& k_pe,
                       const paddle::optional<paddle::Tensor>& slot_mapping, const std::vector<int64_t>& kv_c_numbers,
                       const std::vector<int64_t>& k_pe_numbers, const std::vector<int64_t>& slot_numbers, float number,
                       const std::string& kv_cache_dtype, bool dependent_launch, int64_t stream) {
  Write(StridedFrom(kv_c, kv_c_numbers), StridedFrom(k_pe, k_pe_numbers), kv_cache,
        StridedFrom(slot_mapping, slot_numbers), scale, number, kv_cache_dtype, dependent_launch, stream);
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_concat_and_cache_mla)
    .Inputs({"kv_cache", paddle::Optional("scale"), paddle::Optional("kv_c"), paddle::Optional("k_pe"),
             paddle::Optional("slot_mapping")})
    .Outputs({"kv_cache_out"})
    .Attrs({"kv_c_numbers: std::vector<int64_t>", "k_pe_numbers: std::vector<int64_t>",
            "slot_numbers: std::vector<int64_t>", "number: float", "kv_cache_dtype: std::string",
            "dependent_launch: bool", "stream: int64_t"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .SetKernelFn(GUARDED_KERNEL_OF_VIEWS(paddle_kv::ConcatAndCacheMla));
