// Copies blocks to other blocks of the same cache, many caches (K, V, scales of all layers) in one call.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/copy/block_table.h"

namespace paddle_kv {

// Block source_ids[i] of each cache is copied to its block target_ids[i]. Targets are distinct and no target is a
// source; ids lie inside every cache (the caller has checked). Zero pairs is success.
void CopyBlocksCpu(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* source_ids,
                   const std::int64_t* target_ids, std::int64_t pair_count);

// Enqueues; ids and descriptors are copied into the launches, so all arguments may be freed on return.
Status CopyBlocksCuda(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* source_ids,
                      const std::int64_t* target_ids, std::int64_t pair_count, const DeviceStream& where);

// The same with pairs in device memory, which are read when the copy runs. A pair with a negative id or one beyond a
// cache is skipped.
Status CopyBlocksCuda(const CacheBlocks* caches, std::int64_t cache_count, const DevicePairs& pairs,
                      const DeviceStream& where);

}  // namespace paddle_kv
