// What the kernels of the copy family share: a launch over (pair of blocks, cache, chunk of a block).
//
// 1. Work items are chunks of a block, one warp each, so that 2 MiB blocks spread over the GPU as well as 4 KiB ones.
//    Items are numbered pair by pair; inside a pair cache by cache.
// 2. Descriptors, and the ids where the host knows them, travel as kernel parameters: copied at the launch, they need
//    no device buffer, no synchronisation and no lifetime, and can be captured into a graph. 4 KiB of parameters serve
//    short lists; long ones take the 32,764 bytes that CUDA 12.1 and its drivers allow, because a launch of 4 KiB moves
//    too little, and 16 bits for each id where the caches have no more blocks: thousands of pairs then are one launch.
// 3. Persistent CTAs walk over the items.
#pragma once

#include <algorithm>
#include <cstdint>

#include "paddle_kv/common/copy_bytes.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/kernel_parameters.cuh"
#include "paddle_kv/copy/block_table.h"

namespace paddle_kv {

struct PairTuning {
  static constexpr std::int64_t kChunkBytes = 8 << 10;
  static constexpr int kThreads = 512;
  static constexpr int kCtasPerMultiprocessor = 2;
  static constexpr int kParameterBytes = kLargestParameterBytes;
  static constexpr int kFewCaches = 64;
  static constexpr int kFewPairs = 280;
  static constexpr int kManyCaches = kParameterBytes > kSmallParameterBytes ? 256 : 128;
  static constexpr int kManyPairs = kParameterBytes > kSmallParameterBytes ? 3190 : 60;
  static constexpr int kManyNarrowPairs = 2 * kManyPairs;
};

template <int kCapacity>
struct CacheTable {
  static constexpr int kCaches = kCapacity;
  CacheBlocks caches[kCapacity];
  std::uint32_t first_chunk[kCapacity];  // of the cache among the chunks of one pair
  std::uint32_t chunks_per_pair;
  int cache_count;

  // The cache that a chunk of a pair belongs to.
  __device__ int Find(std::uint32_t chunk) const {
    int low = 0;
    int high = cache_count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_chunk[middle] <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

struct IdPair {
  std::int64_t source;
  std::int64_t target;
};

template <class Id, int kCapacity>
struct HostPairs {
  static constexpr int kPairs = kCapacity;
  Id sources[kCapacity];
  Id targets[kCapacity];
  std::int64_t count;

  __device__ IdPair Get(std::int64_t i) const { return {sources[i], targets[i]}; }
};

struct PairsOnDevice {
  DevicePairs pairs;
  std::int64_t count;

  __device__ IdPair Get(std::int64_t i) const {
    if (pairs.is_int64) {
      const auto* ids = static_cast<const std::int64_t*>(pairs.ids);
      return {ids[2 * i], ids[2 * i + 1]};
    }
    const auto* ids = static_cast<const std::int32_t*>(pairs.ids);
    return {ids[2 * i], ids[2 * i + 1]};
  }
};

using FewPairs = HostPairs<std::uint32_t, PairTuning::kFewPairs>;
using ManyPairs = HostPairs<std::uint32_t, PairTuning::kManyPairs>;
using ManyNarrowPairs = HostPairs<std::uint16_t, PairTuning::kManyNarrowPairs>;
static_assert(sizeof(CacheTable<PairTuning::kFewCaches>) + sizeof(FewPairs) <= kSmallParameterBytes);
static_assert(sizeof(CacheTable<PairTuning::kManyCaches>) + sizeof(ManyPairs) <= PairTuning::kParameterBytes);
static_assert(sizeof(CacheTable<PairTuning::kManyCaches>) + sizeof(ManyNarrowPairs) <= PairTuning::kParameterBytes);

// Action::Run(source, target, bytes, lane): what one warp does with two chunks.
template <class Action, class Table, class Pairs>
__global__ void __launch_bounds__(PairTuning::kThreads)
    RunOnPairs(const __grid_constant__ Table table, const __grid_constant__ Pairs pairs) {
  const int lane = threadIdx.x % kWarpLanes;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / kWarpLanes);
  const std::int64_t items = pairs.count * table.chunks_per_pair;
  std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kWarpLanes) + threadIdx.x / kWarpLanes;
  for (; item < items; item += warps) {
    const std::int64_t pair = item / table.chunks_per_pair;
    const auto chunk = static_cast<std::uint32_t>(item - pair * table.chunks_per_pair);
    const int index = table.Find(chunk);
    const CacheBlocks cache = table.caches[index];
    const IdPair ids = pairs.Get(pair);
    // Only ids in device memory can be out of range: there is nobody left to raise an error.
    if (ids.source < 0 || ids.target < 0 || ids.source >= cache.block_count || ids.target >= cache.block_count)
      continue;
    const std::int64_t offset = (chunk - table.first_chunk[index]) * PairTuning::kChunkBytes;
    const std::int64_t left = cache.block_bytes - offset;
    Action::Run(cache.base + ids.source * cache.block_bytes + offset,
                cache.base + ids.target * cache.block_bytes + offset,
                left < PairTuning::kChunkBytes ? left : PairTuning::kChunkBytes, lane);
  }
}

template <class Action, class Table, class Pairs>
Status LaunchOnPairs(const Table& table, const Pairs& pairs, const DeviceStream& where) {
  const std::int64_t items = pairs.count * table.chunks_per_pair;
  if (items == 0) return {};
  int multiprocessors = 0;
  PADDLE_KV_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, where.device));
  const std::int64_t warps_per_cta = PairTuning::kThreads / kWarpLanes;
  const std::int64_t largest_grid = std::int64_t{multiprocessors} * PairTuning::kCtasPerMultiprocessor;
  // Few items go one to a CTA, so that they spread over the multiprocessors.
  const int grid = static_cast<int>(std::min(largest_grid, items));
  const int threads = static_cast<int>(std::min(warps_per_cta, (items + grid - 1) / grid) * kWarpLanes);
  RunOnPairs<Action><<<grid, threads, 0, StreamOf(where)>>>(table, pairs);
  return LaunchStatus("RunOnPairs");
}

// Calls body(table) with the caches in tables of at most Table::kCaches.
template <class Table, class Body>
Status ForEachTable(const CacheBlocks* caches, std::int64_t cache_count, const Body& body) {
  constexpr std::uint32_t kMostChunks = 1u << 31;
  Table table;
  for (std::int64_t next = 0; next < cache_count;) {
    table.cache_count = 0;
    table.chunks_per_pair = 0;
    while (next < cache_count && table.cache_count < Table::kCaches) {
      const std::int64_t chunks = (caches[next].block_bytes + PairTuning::kChunkBytes - 1) / PairTuning::kChunkBytes;
      if (table.cache_count > 0 && chunks > kMostChunks - table.chunks_per_pair) break;
      table.caches[table.cache_count] = caches[next++];
      table.first_chunk[table.cache_count++] = table.chunks_per_pair;
      table.chunks_per_pair += static_cast<std::uint32_t>(chunks);
    }
    PADDLE_KV_RETURN_IF_ERROR(body(table));
  }
  return {};
}

template <class Action, class Table, class Pairs>
Status RunWithHostPairs(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* source_ids,
                        const std::int64_t* target_ids, std::int64_t pair_count, const DeviceStream& where) {
  Pairs pairs;
  return ForEachTable<Table>(caches, cache_count, [&](const Table& table) -> Status {
    for (std::int64_t first = 0; first < pair_count; first += pairs.count) {
      pairs.count = std::min<std::int64_t>(Pairs::kPairs, pair_count - first);
      std::copy_n(source_ids + first, pairs.count, pairs.sources);
      std::copy_n(target_ids + first, pairs.count, pairs.targets);
      PADDLE_KV_RETURN_IF_ERROR(LaunchOnPairs<Action>(table, pairs, where));
    }
    return {};
  });
}

template <class Action>
Status RunOnHostPairs(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* source_ids,
                      const std::int64_t* target_ids, std::int64_t pair_count, const DeviceStream& where) {
  if (cache_count == 0 || pair_count == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  using Tuning = PairTuning;
  const bool few_pairs = pair_count <= Tuning::kFewPairs || Tuning::kManyPairs < Tuning::kFewPairs;
  if ((cache_count <= Tuning::kFewCaches && few_pairs) || !HasLargeParameters()) {
    return RunWithHostPairs<Action, CacheTable<Tuning::kFewCaches>, FewPairs>(caches, cache_count, source_ids,
                                                                              target_ids, pair_count, where);
  }
  bool narrow = true;
  for (std::int64_t c = 0; c < cache_count; ++c) narrow = narrow && caches[c].block_count <= 1 << 16;
  const auto run = narrow ? RunWithHostPairs<Action, CacheTable<Tuning::kManyCaches>, ManyNarrowPairs>
                          : RunWithHostPairs<Action, CacheTable<Tuning::kManyCaches>, ManyPairs>;
  return run(caches, cache_count, source_ids, target_ids, pair_count, where);
}

template <class Action>
Status RunOnDevicePairs(const CacheBlocks* caches, std::int64_t cache_count, const DevicePairs& pairs,
                        const DeviceStream& where) {
  if (cache_count == 0 || pairs.count == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  const PairsOnDevice ids{pairs, pairs.count};
  const auto launch = [&](const auto& table) { return LaunchOnPairs<Action>(table, ids, where); };
  if (cache_count <= PairTuning::kFewCaches || !HasLargeParameters()) {
    return ForEachTable<CacheTable<PairTuning::kFewCaches>>(caches, cache_count, launch);
  }
  return ForEachTable<CacheTable<PairTuning::kManyCaches>>(caches, cache_count, launch);
}

}  // namespace paddle_kv
