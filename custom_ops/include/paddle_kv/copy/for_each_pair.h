// The loop of the copy family over (pair of blocks, cache, chunk of a block) on the cores of the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "paddle_kv/common/parallel_for.h"
#include "paddle_kv/copy/block_table.h"

namespace paddle_kv {

// Large blocks are cut, so that one pair of them keeps all cores busy.
constexpr std::int64_t kCpuChunkBytes = std::int64_t{1} << 20;

inline std::int64_t BytesPerPair(const CacheBlocks* caches, std::int64_t cache_count) {
  std::int64_t bytes = 0;
  for (std::int64_t c = 0; c < cache_count; ++c) bytes += caches[c].block_bytes;
  return bytes;
}

// Calls body(source, target, bytes) for the chunks of each pair in each cache, from several threads.
template <class Body>
void ForEachPair(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* source_ids,
                 const std::int64_t* target_ids, std::int64_t pair_count, const Body& body) {
  std::int64_t largest_block_bytes = 0;
  for (std::int64_t c = 0; c < cache_count; ++c) {
    largest_block_bytes = std::max(largest_block_bytes, caches[c].block_bytes);
  }
  const std::int64_t chunks = (largest_block_bytes + kCpuChunkBytes - 1) / kCpuChunkBytes;
  const std::int64_t items = cache_count * pair_count * chunks;
  ParallelFor(items, pair_count * BytesPerPair(caches, cache_count), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const CacheBlocks& cache = caches[item / chunks / pair_count];
      const std::int64_t pair = item / chunks % pair_count;
      const std::int64_t offset = item % chunks * kCpuChunkBytes;
      const std::int64_t bytes = std::min(kCpuChunkBytes, cache.block_bytes - offset);
      if (bytes <= 0) continue;
      body(cache.base + source_ids[pair] * cache.block_bytes + offset,
           cache.base + target_ids[pair] * cache.block_bytes + offset, bytes);
    }
  });
}

}  // namespace paddle_kv
