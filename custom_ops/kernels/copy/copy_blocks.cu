// Copies blocks inside caches on the device; pair_launch.cuh has the shape of the launch. The source is read with plain
// loads and not through the read-only path: the same memory is written by the kernels before and behind.
#include "paddle_kv/copy/copy_blocks.h"

#include "paddle_kv/copy/pair_launch.cuh"

namespace paddle_kv {
namespace {

struct Copy {
  static __device__ void Run(const std::uint8_t* source, std::uint8_t* target, std::int64_t bytes, int lane) {
    CopyBytesWithWarp(source, target, bytes, lane);
  }
};

}  // namespace

Status CopyBlocksCuda(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* source_ids,
                      const std::int64_t* target_ids, std::int64_t pair_count, const DeviceStream& where) {
  return RunOnHostPairs<Copy>(caches, cache_count, source_ids, target_ids, pair_count, where);
}

Status CopyBlocksCuda(const CacheBlocks* caches, std::int64_t cache_count, const DevicePairs& pairs,
                      const DeviceStream& where) {
  return RunOnDevicePairs<Copy>(caches, cache_count, pairs, where);
}

}  // namespace paddle_kv
