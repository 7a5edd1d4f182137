#include "paddle_kv/copy/copy_blocks.h"

#include "paddle_kv/common/bulk_copy.h"
#include "paddle_kv/copy/for_each_pair.h"

namespace paddle_kv {

void CopyBlocksCpu(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* source_ids,
                   const std::int64_t* target_ids, std::int64_t pair_count) {
  const BulkCopy copy(pair_count * BytesPerPair(caches, cache_count));
  ForEachPair(
      caches, cache_count, source_ids, target_ids, pair_count,
      [&](const std::uint8_t* source, std::uint8_t* target, std::int64_t bytes) { copy(target, source, bytes); });
}

}  // namespace paddle_kv
