// reshape_and_cache_dynamic: as reshape_and_cache, with a scale computed for each token and head.
#include "paddle_kv/cache_write/reshape_and_cache_dynamic.h"

#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/validate.h"
#include "cache_layout.h"
#include "new_tokens.h"
#include "scale_argument.h"

namespace paddle_kv {
namespace {

struct ScaleCache {
  ScalePlace place;
  StridedMemory memory;
};

ScaleCache CheckScaleCache(const paddle::Tensor& scale_cache, const std::string& name, const std::string& scale_layout,
                           const TokenPart& part, int64_t slot_limit, const paddle::Tensor& cache) {
  const int64_t block_size = part.cache.block_size;
  const int64_t blocks = block_size == 0 ? 0 : slot_limit / block_size;
  const std::vector<int64_t> expected = ScaleShape({blocks, part.heads, block_size, 1}, scale_layout);
  if (!scale_cache.initialized() || scale_cache.shape() != expected) {
    ThrowValueError(name + " has shape " + ShapeText(scale_cache.shape()) + "; " +
                    (scale_layout == "HND" ? "[blocks, heads, block size]" : "[blocks, block size, heads]") + " = " +
                    ShapeText(expected) + " is expected");
  }
  if (scale_cache.dtype() != paddle::DataType::FLOAT32) {
    ThrowValueError(name + " has dtype " + DtypeName(scale_cache.dtype()) + "; float32 is expected");
  }
  CheckSameDevice(scale_cache, name, cache, "the caches");
  ScaleCache found{{}, MemoryOf(scale_cache)};
  CheckBlockStrides(&found.memory, name, 0);
  found.place = ScalePlaceOf(found.memory, scale_layout, name);
  return found;
}

void Write(const KeyValueWrite& given, const paddle::Tensor& key_cache, const paddle::Tensor& value_cache,
           const paddle::Tensor& k_scale_cache, const paddle::Tensor& v_scale_cache, const std::string& scale_layout,
           int64_t stream) {
  if (given.kv_cache_dtype != "fp8_e4m3" && given.kv_cache_dtype != "fp8_e5m2" && given.kv_cache_dtype != "int8") {
    ThrowValueError("kv_cache_dtype = \"" + given.kv_cache_dtype +
                    "\" must be \"fp8_e4m3\", \"fp8_e5m2\" or \"int8\" where scales are computed");
  }
  DynamicTokenWrite write{CheckKeyValueWrite(given, key_cache, value_cache), {}};
  const TokenWrite& tokens = write.tokens;
  const ScaleCache key_scales =
      CheckScaleCache(k_scale_cache, "k_scale_cache", scale_layout, tokens.parts[0], tokens.slots.limit, key_cache);
  const ScaleCache value_scales =
      CheckScaleCache(v_scale_cache, "v_scale_cache", scale_layout, tokens.parts[1], tokens.slots.limit, key_cache);
  write.scales[0] = key_scales.place;
  write.scales[1] = value_scales.place;
  CheckTensorsApart({MemoryOf(key_cache), MemoryOf(value_cache), key_scales.memory, value_scales.memory},
                    "key_cache, value_cache, k_scale_cache and v_scale_cache");
  if (OnGpu(key_cache)) {
    const DeviceStream where = WhereOf(key_cache, stream);
    CheckSlotValues(tokens, key_cache, where);
    LAUNCH_CUDA(where.device, ReshapeAndCacheDynamicCuda(write, where));
  } else {
    CheckSlotValues(tokens, key_cache, {});
    ReshapeAndCacheDynamicCpu(write);
  }
}

}  // namespace

// In dygraph key, value and slot_mapping are absent, and their numbers given; see strided_input.h.
void ReshapeAndCacheDynamic(paddle::Tensor& key_cache, paddle::Tensor& value_cache, paddle::Tensor& k_scale_cache,
                            paddle::Tensor& v_scale_cache, const paddle::optional<paddle::Tensor>& key,
                            const paddle::optional<paddle::Tensor>& value,
                            const paddle::optional<paddle::Tensor>& slot_mapping,
                            const std::vector<int64_t>& key_numbers, const std::vector<int64_t>& value_numbers,
                            const std::vector<int64_t>& slot_numbers, const std::string& layout,
                            const std::string& kv_cache_dtype, const std::string& scale_layout, int64_t stream) {
  Write({StridedFrom(key, key_numbers), StridedFrom(value, value_numbers), StridedFrom(slot_mapping, slot_numbers),
         layout, kv_cache_dtype, false},
        key_cache, value_cache, k_scale_cache, v_scale_cache, scale_layout, stream);
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_reshape_and_cache_dynamic)
    .Inputs({"key_cache", "value_cache", "k_scale_cache", "v_scale_cache", paddle::Optional("key"),
             paddle::Optional("value"), paddle::Optional("slot_mapping")})
    .Outputs({"key_cache_out", "value_cache_out", "k_scale_cache_out", "v_scale_cache_out"})
    .Attrs({"key_numbers: std::vector<int64_t>", "value_numbers: std::vector<int64_t>",
            "slot_numbers: std::vector<int64_t>", "layout: std::string", "kv_cache_dtype: std::string",
            "scale_layout: std::string", "stream: int64_t"})
    .SetInplaceMap({{"key_cache", "key_cache_out"},
                    {"value_cache", "value_cache_out"},
                    {"k_scale_cache", "k_scale_cache_out"},
                    {"v_scale_cache", "v_scale_cache_out"}})
    .SetKernelFn(GUARDED_KERNEL_OF_VIEWS(paddle_kv::ReshapeAndCacheDynamic));
