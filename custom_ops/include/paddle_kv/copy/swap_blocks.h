// Exchanges pairs of blocks of the same cache, many caches in one call.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/copy/block_table.h"

namespace paddle_kv {

// Blocks first_ids[i] and second_ids[i] of each cache change places. Each id occurs once; ids lie inside every cache
// (the caller has checked). Zero pairs is success.
void SwapBlocksCpu(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* first_ids,
                   const std::int64_t* second_ids, std::int64_t pair_count);

// Enqueues; ids and descriptors are copied into the launches, so all arguments may be freed on return.
Status SwapBlocksCuda(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* first_ids,
                      const std::int64_t* second_ids, std::int64_t pair_count, const DeviceStream& where);

// The same with pairs in device memory, which are read when the exchange runs. A pair with a negative id or one beyond
// a cache is skipped.
Status SwapBlocksCuda(const CacheBlocks* caches, std::int64_t cache_count, const DevicePairs& pairs,
                      const DeviceStream& where);

}  // namespace paddle_kv
