// Block and position of a slot, without a 64-bit division in the usual cases.
#pragma once

#include <cstdint>

#include "paddle_kv/cache_write/move_tokens.h"

namespace paddle_kv {

struct BlockDivider {
  std::int64_t block_size;
  int shift;    // block size is 1 << shift; -1 otherwise
  bool narrow;  // slots fit in 32 bits

  __device__ std::int64_t BlockOf(std::int64_t slot) const {
    if (shift >= 0) return slot >> shift;
    if (narrow) return static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(block_size);
    return slot / block_size;
  }

  __device__ std::int64_t OffsetOf(const RowPlace& place, std::int64_t slot) const {
    const std::int64_t block = BlockOf(slot);
    return block * place.block_stride + (slot - block * block_size) * place.token_stride;
  }
};

inline BlockDivider BlockDividerOf(std::int64_t block_size, std::int64_t slot_limit) {
  BlockDivider divider{block_size, -1, slot_limit <= (std::int64_t{1} << 32)};
  for (int shift = 0; shift < 31; ++shift) {
    if (block_size == std::int64_t{1} << shift) divider.shift = shift;
  }
  return divider;
}

}  // namespace paddle_kv
