// swap_blocks: pairs of blocks of the same cache change places.
#include "paddle_kv/copy/swap_blocks.h"

#include "../common/guarded_kernel.h"
#include "block_pairs.h"

namespace paddle_kv {
namespace {

void Exchange(const std::vector<paddle::Tensor>& caches, int64_t key_count, const Ids& first_ids, const Ids& second_ids,
              int64_t stream) {
  const std::vector<CacheBlocks> blocks = CheckCaches(caches, key_count);
  CheckPairs(blocks, first_ids, second_ids, PairRule::kSwap, {});
  const auto cache_count = static_cast<int64_t>(blocks.size());
  const auto pair_count = static_cast<int64_t>(first_ids.size());
  if (OnGpu(caches.front())) {
    const DeviceStream where = WhereOf(caches.front(), stream);
    LAUNCH_CUDA(where.device,
                SwapBlocksCuda(blocks.data(), cache_count, first_ids.data(), second_ids.data(), pair_count, where));
  } else {
    SwapBlocksCpu(blocks.data(), cache_count, first_ids.data(), second_ids.data(), pair_count);
  }
}

}  // namespace

// The pairs are in the tensor, or where it is absent in the two lists.
void SwapBlocks(std::vector<paddle::Tensor>& caches, const paddle::optional<paddle::Tensor>& block_mapping,
                const std::vector<int64_t>& first_ids, const std::vector<int64_t>& second_ids, int64_t key_count,
                int64_t stream) {
  if (!block_mapping) {
    Exchange(caches, key_count, first_ids, second_ids, stream);
  } else if (!OnGpu(*block_mapping)) {
    Ids first;
    Ids second;
    ReadPairs(*block_mapping, &first, &second);
    Exchange(caches, key_count, first, second, stream);
  } else {
    const std::vector<CacheBlocks> blocks = CheckCaches(caches, key_count);
    const DeviceStream where = WhereOf(*block_mapping, stream);
    const DevicePairs pairs = CheckDevicePairs(*block_mapping, blocks, caches.front(), PairRule::kSwap, where);
    LAUNCH_CUDA(where.device, SwapBlocksCuda(blocks.data(), static_cast<int64_t>(blocks.size()), pairs, where));
  }
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_swap_blocks)
    .Inputs({paddle::Vec("caches"), paddle::Optional("block_mapping")})
    .Outputs({paddle::Vec("caches_out")})
    .Attrs({"first_ids: std::vector<int64_t>", "second_ids: std::vector<int64_t>", "key_count: int64_t",
            "stream: int64_t"})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::SwapBlocks));
