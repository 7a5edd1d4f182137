// What a copy of blocks is told of one tensor.
#pragma once

#include <cstdint>

namespace paddle_kv {

// One tensor seen as rows of bytes: block i starts at base + i * stride.
struct BlockRows {
  const std::uint8_t* source;
  std::uint8_t* target;
  std::int64_t source_stride;
  std::int64_t target_stride;
  std::int64_t block_bytes;
};

enum class Direction { kDeviceToHost = 0, kHostToDevice = 1, kDeviceToDevice = 2, kCacheToCache = 3 };

}  // namespace paddle_kv
