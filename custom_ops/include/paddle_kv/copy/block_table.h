// How the copy family names caches and pairs of blocks.
#pragma once

#include <cstdint>

namespace paddle_kv {

// A contiguous cache: block i starts at base + i * block_bytes.
struct CacheBlocks {
  std::uint8_t* base;
  std::int64_t block_bytes;
  std::int64_t block_count;
};

// Pairs in device memory: [count, 2] integers of 4 or 8 bytes, densely packed.
struct DevicePairs {
  const void* ids;
  std::int64_t count;
  bool is_int64;
};

// Block ids travel to the device as 32-bit numbers.
constexpr std::int64_t kLargestBlockCount = std::int64_t{1} << 32;

}  // namespace paddle_kv
