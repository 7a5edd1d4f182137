// universal_from_cache: blocks of the layer caches to [blocks, heads, layers, outer, tokens, head size].
#include "../common/guarded_kernel.h"
#include "permute_glue.h"

namespace paddle_kv {

// Caches: all keys, then all values (or none). The ids are in the tensor, or where it is absent in the list.
void UniversalFromCache(const std::vector<paddle::Tensor>& caches, const paddle::optional<paddle::Tensor>& id_tensor,
                        const paddle::Tensor& universal, const std::vector<int64_t>& block_ids, int64_t key_count,
                        bool heads_first, int64_t stream) {
  PermuteCaches(caches, key_count, id_tensor, block_ids, universal, "out", heads_first, PermuteDirection::kToDense,
                stream);
}

void UniversalFromCacheInPlace(const std::vector<paddle::Tensor>& caches,
                               const paddle::optional<paddle::Tensor>& id_tensor, paddle::Tensor& universal,
                               const std::vector<int64_t>& block_ids, int64_t key_count, bool heads_first,
                               int64_t stream) {
  UniversalFromCache(caches, id_tensor, universal, block_ids, key_count, heads_first, stream);
}

}  // namespace paddle_kv

#define UNIVERSAL_FROM_CACHE_INPUTS {paddle::Vec("caches"), paddle::Optional("id_tensor"), "universal"}
#define UNIVERSAL_FROM_CACHE_ATTRS \
  {"block_ids: std::vector<int64_t>", "key_count: int64_t", "heads_first: bool", "stream: int64_t"}

// Registered twice: only the operator with an output means anything in a traced program.
PD_BUILD_STATIC_OP(paddle_kv_universal_from_cache)
    .Inputs(UNIVERSAL_FROM_CACHE_INPUTS)
    .Outputs({})
    .Attrs(UNIVERSAL_FROM_CACHE_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::UniversalFromCache));

PD_BUILD_STATIC_OP(paddle_kv_universal_from_cache_in_place)
    .Inputs(UNIVERSAL_FROM_CACHE_INPUTS)
    .Outputs({"universal_out"})
    .Attrs(UNIVERSAL_FROM_CACHE_ATTRS)
    .SetInplaceMap({{"universal", "universal_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::UniversalFromCacheInPlace));
