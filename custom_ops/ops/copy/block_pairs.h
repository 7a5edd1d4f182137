// What the operators of the copy family share: their checks, and the way to the launchers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/launch.h"
#include "../common/validate.h"
#include "paddle_kv/copy/block_table.h"

namespace paddle_kv {

// Who may name a block more than once.
enum class PairRule {
  kCopy,  // targets are distinct and no block is both source and target; a source may occur more than once
  kSwap,  // each block occurs once
};

// Argument names as the caller wrote them, for messages.
struct PairNames {
  std::string sources = "sources of block_mapping";
  std::string targets = "targets of block_mapping";
};

// The first `key_count` tensors are key_caches, the others value_caches.
std::vector<CacheBlocks> CheckCaches(const std::vector<paddle::Tensor>& caches, int64_t key_count);

// IndexError or ValueError unless the pairs are legal in all caches.
void CheckPairs(const std::vector<CacheBlocks>& caches, const Ids& source_ids, const Ids& target_ids, PairRule rule,
                const PairNames& names);

// Pairs (source, target) in host memory.
void ReadPairs(const int64_t* pairs, int64_t count, Ids* source_ids, Ids* target_ids);

// The pairs of a tensor in host memory.
void ReadPairs(const paddle::Tensor& block_mapping, Ids* source_ids, Ids* target_ids);

// Checks a tensor of pairs on the GPU; under PADDLE_KV_CHECK=1 its content too.
DevicePairs CheckDevicePairs(const paddle::Tensor& block_mapping, const std::vector<CacheBlocks>& caches,
                             const paddle::Tensor& cache, PairRule rule, const DeviceStream& where);

}  // namespace paddle_kv
