// reshape_and_cache: keys and values of new tokens into their slots of the caches.
#include "../common/guarded_kernel.h"
#include "new_tokens.h"

namespace paddle_kv {
namespace {

void Write(const KeyValueWrite& given, const paddle::Tensor& key_cache, const paddle::Tensor& value_cache,
           const GivenScale& k_scale, const GivenScale& v_scale, int64_t stream) {
  TokenWrite write = CheckKeyValueWrite(given, key_cache, value_cache);
  write.parts[0].scale = CheckScale(k_scale, "k_scale", write.parts[0].heads, write.stored, key_cache);
  write.parts[1].scale = CheckScale(v_scale, "v_scale", write.parts[1].heads, write.stored, key_cache);
  if (OnGpu(key_cache)) {
    const DeviceStream where = WhereOf(key_cache, stream);
    CheckSlotValues(write, key_cache, where);
    LAUNCH_CUDA(where.device, WriteTokensCuda(write, where));
  } else {
    CheckSlotValues(write, key_cache, {});
    WriteTokensCpu(write);
  }
}

}  // namespace

// Dygraph: what is only read comes as numbers, see strided_input.h.
void ReshapeAndCache(const paddle::Tensor& key_cache, const paddle::Tensor& value_cache,
                     const std::vector<int64_t>& key, const std::vector<int64_t>& value,
                     const std::vector<int64_t>& slot_mapping, const std::vector<int64_t>& k_scale,
                     const std::vector<int64_t>& v_scale, float k_scale_number, float v_scale_number,
                     const std::string& layout, const std::string& kv_cache_dtype, bool padded, int64_t stream) {
  Write({StridedFromNumbers(key), StridedFromNumbers(value), StridedFromNumbers(slot_mapping), layout, kv_cache_dtype,
         padded},
        key_cache, value_cache, {StridedFromNumbers(k_scale), k_scale_number},
        {StridedFromNumbers(v_scale), v_scale_number}, stream);
}

void ReshapeAndCacheInPlace(const paddle::Tensor& key, const paddle::Tensor& value, paddle::Tensor& key_cache,
                            paddle::Tensor& value_cache, const paddle::Tensor& slot_mapping,
                            const paddle::optional<paddle::Tensor>& k_scale,
                            const paddle::optional<paddle::Tensor>& v_scale, float k_scale_number,
                            float v_scale_number, const std::string& layout, const std::string& kv_cache_dtype,
                            bool padded, int64_t stream) {
  Write({StridedFromTensor(key), StridedFromTensor(value), StridedFromTensor(slot_mapping), layout, kv_cache_dtype,
         padded},
        key_cache, value_cache, {StridedFromTensor(k_scale), k_scale_number},
        {StridedFromTensor(v_scale), v_scale_number}, stream);
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_reshape_and_cache)
    .Inputs({"key_cache", "value_cache"})
    .Outputs({})
    .Attrs({"key: std::vector<int64_t>", "value: std::vector<int64_t>", "slot_mapping: std::vector<int64_t>",
            "k_scale: std::vector<int64_t>", "v_scale: std::vector<int64_t>", "k_scale_number: float",
            "v_scale_number: float", "layout: std::string", "kv_cache_dtype: std::string", "padded: bool",
            "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ReshapeAndCache));

PD_BUILD_STATIC_OP(paddle_kv_reshape_and_cache_in_place)
    .Inputs({"key", "value", "key_cache", "value_cache", "slot_mapping", paddle::Optional("k_scale"),
             paddle::Optional("v_scale")})
    .Outputs({"key_cache_out", "value_cache_out"})
    .Attrs({"k_scale_number: float", "v_scale_number: float", "layout: std::string", "kv_cache_dtype: std::string",
            "padded: bool", "stream: int64_t"})
    .SetInplaceMap({{"key_cache", "key_cache_out"}, {"value_cache", "value_cache_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ReshapeAndCacheInPlace));
