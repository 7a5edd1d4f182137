// cache_from_universal: [blocks, heads, layers, outer, tokens, head size] to blocks of the layer caches.
#include "../common/guarded_kernel.h"
#include "permute_glue.h"

namespace paddle_kv {

// Caches: all keys, then all values (or none). The ids are in the tensor, or where it is absent in the list.
void CacheFromUniversal(const paddle::Tensor& universal, const std::vector<paddle::Tensor>& caches,
                        const paddle::optional<paddle::Tensor>& id_tensor, const std::vector<int64_t>& block_ids,
                        int64_t key_count, bool heads_first, int64_t stream) {
  PermuteCaches(caches, key_count, id_tensor, block_ids, universal, "universal", heads_first,
                PermuteDirection::kFromDense, stream);
}

void CacheFromUniversalInPlace(const paddle::Tensor& universal, std::vector<paddle::Tensor>& caches,
                               const paddle::optional<paddle::Tensor>& id_tensor, const std::vector<int64_t>& block_ids,
                               int64_t key_count, bool heads_first, int64_t stream) {
  CacheFromUniversal(universal, caches, id_tensor, block_ids, key_count, heads_first, stream);
}

}  // namespace paddle_kv

#define CACHE_FROM_UNIVERSAL_INPUTS {"universal", paddle::Vec("caches"), paddle::Optional("id_tensor")}
#define CACHE_FROM_UNIVERSAL_ATTRS \
  {"block_ids: std::vector<int64_t>", "key_count: int64_t", "heads_first: bool", "stream: int64_t"}

// Registered twice: one that updates a list in place costs 1 us a tensor more, but only that one means anything in a
// traced program.
PD_BUILD_STATIC_OP(paddle_kv_cache_from_universal)
    .Inputs(CACHE_FROM_UNIVERSAL_INPUTS)
    .Outputs({})
    .Attrs(CACHE_FROM_UNIVERSAL_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::CacheFromUniversal));

PD_BUILD_STATIC_OP(paddle_kv_cache_from_universal_in_place)
    .Inputs(CACHE_FROM_UNIVERSAL_INPUTS)
    .Outputs({paddle::Vec("caches_out")})
    .Attrs(CACHE_FROM_UNIVERSAL_ATTRS)
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::CacheFromUniversalInPlace));
