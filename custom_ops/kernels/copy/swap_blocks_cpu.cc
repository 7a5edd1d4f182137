#include <algorithm>

#include "paddle_kv/copy/for_each_pair.h"
#include "paddle_kv/copy/swap_blocks.h"

namespace paddle_kv {

void SwapBlocksCpu(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* first_ids,
                   const std::int64_t* second_ids, std::int64_t pair_count) {
  ForEachPair(caches, cache_count, first_ids, second_ids, pair_count,
              [](std::uint8_t* first, std::uint8_t* second, std::int64_t bytes) {
                std::swap_ranges(first, first + bytes, second);
              });
}

}  // namespace paddle_kv
