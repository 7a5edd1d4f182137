// copy_blocks, copy_single_block: blocks to other blocks of the same cache.
#include "paddle_kv/copy/copy_blocks.h"

#include "../common/guarded_kernel.h"
#include "block_pairs.h"

namespace paddle_kv {
namespace {

void CopyBetween(const std::vector<paddle::Tensor>& caches, int64_t key_count, const Ids& source_ids,
                 const Ids& target_ids, int64_t stream, const PairNames& names) {
  const std::vector<CacheBlocks> blocks = CheckCaches(caches, key_count);
  CheckPairs(blocks, source_ids, target_ids, PairRule::kCopy, names);
  const auto cache_count = static_cast<int64_t>(blocks.size());
  const auto pair_count = static_cast<int64_t>(source_ids.size());
  if (OnGpu(caches.front())) {
    const DeviceStream where = WhereOf(caches.front(), stream);
    LAUNCH_CUDA(where.device,
                CopyBlocksCuda(blocks.data(), cache_count, source_ids.data(), target_ids.data(), pair_count, where));
  } else {
    CopyBlocksCpu(blocks.data(), cache_count, source_ids.data(), target_ids.data(), pair_count);
  }
}

}  // namespace

// The pairs are in the tensor, or where it is absent in host memory: [pair_count, 2] int64 at an address. As lists,
// thousands of them would take longer to get here than to copy.
void CopyBlocks(const std::vector<paddle::Tensor>& caches, const paddle::optional<paddle::Tensor>& block_mapping,
                int64_t pairs_address, int64_t pair_count, int64_t key_count, int64_t stream) {
  if (!block_mapping) {
    Ids sources;
    Ids targets;
    ReadPairs(reinterpret_cast<const int64_t*>(pairs_address), pair_count, &sources, &targets);
    CopyBetween(caches, key_count, sources, targets, stream, {});
  } else {
    const std::vector<CacheBlocks> blocks = CheckCaches(caches, key_count);
    const DeviceStream where = WhereOf(*block_mapping, stream);
    const DevicePairs pairs = CheckDevicePairs(*block_mapping, blocks, caches.front(), PairRule::kCopy, where);
    LAUNCH_CUDA(where.device, CopyBlocksCuda(blocks.data(), static_cast<int64_t>(blocks.size()), pairs, where));
  }
}

// For programs: the pairs are in the tensor, or where it is absent in the two lists.
void CopyBlocksInPlace(std::vector<paddle::Tensor>& caches, const paddle::optional<paddle::Tensor>& block_mapping,
                       const std::vector<int64_t>& source_ids, const std::vector<int64_t>& target_ids,
                       int64_t key_count, int64_t stream) {
  if (!block_mapping) {
    CopyBetween(caches, key_count, source_ids, target_ids, stream, {});
  } else if (!OnGpu(*block_mapping)) {
    Ids sources;
    Ids targets;
    ReadPairs(*block_mapping, &sources, &targets);
    CopyBetween(caches, key_count, sources, targets, stream, {});
  } else {
    CopyBlocks(caches, block_mapping, 0, 0, key_count, stream);
  }
}

void CopySingleBlock(std::vector<paddle::Tensor>& caches, int64_t source_block_id, int64_t target_block_id,
                     int64_t key_count, int64_t stream) {
  CopyBetween(caches, key_count, {source_block_id}, {target_block_id}, stream, {"source_block_id", "target_block_id"});
}

}  // namespace paddle_kv

// Registered twice: an operator without outputs costs 30 us for 160 tensors, one with in-place outputs 160 us; but only
// the latter means anything in a traced program. The operators on few tensors are registered once, in place: each call
// of any operator copies the descriptions of all that are registered.
PD_BUILD_STATIC_OP(paddle_kv_copy_blocks)
    .Inputs({paddle::Vec("caches"), paddle::Optional("block_mapping")})
    .Outputs({})
    .Attrs({"pairs_address: int64_t", "pair_count: int64_t", "key_count: int64_t", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::CopyBlocks));

PD_BUILD_STATIC_OP(paddle_kv_copy_blocks_in_place)
    .Inputs({paddle::Vec("caches"), paddle::Optional("block_mapping")})
    .Outputs({paddle::Vec("caches_out")})
    .Attrs({"source_ids: std::vector<int64_t>", "target_ids: std::vector<int64_t>", "key_count: int64_t",
            "stream: int64_t"})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::CopyBlocksInPlace));

PD_BUILD_STATIC_OP(paddle_kv_copy_single_block)
    .Inputs({paddle::Vec("caches")})
    .Outputs({paddle::Vec("caches_out")})
    .Attrs({"source_block_id: int64_t", "target_block_id: int64_t", "key_count: int64_t", "stream: int64_t"})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::CopySingleBlock));
