// reshape_and_cache: keys and values of new tokens into their slots of the caches.
#include "../common/guarded_kernel.h"
#include "new_tokens.h"

namespace paddle_kv {
namespace {

struct Scales {
  const paddle::optional<paddle::Tensor>& k_scale;
  const paddle::optional<paddle::Tensor>& v_scale;
  float k_number;
  float v_number;
};

void Write(const KeyValueWrite& given, const paddle::Tensor& key_cache, const paddle::Tensor& value_cache,
           const Scales& scales, bool dependent, int64_t stream) {
  TokenWrite write = CheckKeyValueWrite(given, key_cache, value_cache);
  write.parts[0].scale = ScaleOf(scales.k_scale, scales.k_number, "k_scale", write.parts[0].heads, key_cache);
  write.parts[1].scale = ScaleOf(scales.v_scale, scales.v_number, "v_scale", write.parts[1].heads, key_cache);
  if (OnGpu(key_cache)) {
    const DeviceStream where = WhereOf(key_cache, stream);
    CheckSlotValues(write, key_cache, where);
    LAUNCH_CUDA(where.device, WriteTokensCuda(write, dependent, where));
  } else {
    CheckSlotValues(write, key_cache, {});
    WriteTokensCpu(write);
  }
}

}  // namespace

// In dygraph key, value and slot_mapping are absent, and their numbers given; see strided_input.h.
void ReshapeAndCache(paddle::Tensor& key_cache, paddle::Tensor& value_cache,
                     const paddle::optional<paddle::Tensor>& k_scale, const paddle::optional<paddle::Tensor>& v_scale,
                     const paddle::optional<paddle::Tensor>& key, const paddle::optional<paddle::Tensor>& value,
                     const paddle::optional<paddle::Tensor>& slot_mapping, const std::vector<int64_t>& key_numbers,
                     const std::vector<int64_t>& value_numbers, const std::vector<int64_t>& slot_numbers,
                     float k_number, float v_number, const std::string& layout, const std::string& kv_cache_dtype,
                     bool padded, bool dependent_launch, int64_t stream) {
  Write({StridedFrom(key, key_numbers), StridedFrom(value, value_numbers), StridedFrom(slot_mapping, slot_numbers),
         layout, kv_cache_dtype, padded},
        key_cache, value_cache, {k_scale, v_scale, k_number, v_number}, dependent_launch, stream);
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_reshape_and_cache)
    .Inputs({"key_cache", "value_cache", paddle::Optional("k_scale"), paddle::Optional("v_scale"),
             paddle::Optional("key"), paddle::Optional("value"), paddle::Optional("slot_mapping")})
    .Outputs({"key_cache_out", "value_cache_out"})
    .Attrs({"key_numbers: std::vector<int64_t>", "value_numbers: std::vector<int64_t>",
            "slot_numbers: std::vector<int64_t>", "k_number: float", "v_number: float", "layout: std::string",
            "kv_cache_dtype: std::string", "padded: bool", "dependent_launch: bool", "stream: int64_t"})
    .SetInplaceMap({{"key_cache", "key_cache_out"}, {"value_cache", "value_cache_out"}})
    .SetKernelFn(GUARDED_KERNEL_OF_VIEWS(paddle_kv::ReshapeAndCache));
