// Writes new tokens into block caches: reshape_and_cache (keys and values, a cache each) and concat_and_cache_mla
// (latent and rope, side by side in one cache) are this write, with different places.
#pragma once

#include <cstdint>

#include "paddle_kv/cache_write/move_tokens.h"
#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/element_type.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

// Where the tokens come from; strides in bytes. Element e of token t, head h lies at
// data + t * token_stride + h * head_stride + e * element_stride.
struct SourceRows {
  const std::uint8_t* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
  std::int64_t element_stride;
};

// Head h has the scale pointer[h * stride_per_head], or `value` without a pointer.
struct HeadScale {
  const float* pointer = nullptr;  // in the memory of the caches
  std::int64_t stride_per_head = 0;
  float value = 1.0f;

  PADDLE_KV_HOST_DEVICE float Of(std::int64_t head) const {
    return pointer == nullptr ? value : pointer[head * stride_per_head];
  }
};

// One tensor of new tokens and the cache that it goes to.
struct TokenPart {
  SourceRows source;
  RowPlace cache;
  std::int64_t heads;
  std::int64_t head_size;  // elements
  HeadScale scale;
};

// The slot of each token. Negative slots, and those beyond the caches, are skipped.
struct TokenSlots {
  const void* slots;  // int32 or int64, in the memory of the caches
  std::int64_t stride;
  std::int64_t limit;  // slots of the caches
  bool is_int64;

  // -1 for a token that is skipped.
  PADDLE_KV_HOST_DEVICE std::int64_t Of(std::int64_t token) const {
    const std::int64_t slot = IntegerAt(slots, is_int64, token * stride);
    return slot < 0 || slot >= limit ? -1 : slot;
  }
};

// The memory with the slots of so many tokens, at least one. A mapping that runs backwards begins at its end.
struct SlotMemory {
  const std::uint8_t* lowest;
  std::int64_t bytes;
  std::int64_t first;  // byte at which the slot of the first token begins
};

inline SlotMemory MemoryOfSlots(const TokenSlots& slots, std::int64_t tokens) {
  const std::int64_t item_bytes = slots.is_int64 ? sizeof(std::int64_t) : sizeof(std::int32_t);
  const std::int64_t last = (tokens - 1) * slots.stride * item_bytes;
  const std::int64_t first = last < 0 ? -last : 0;
  return {static_cast<const std::uint8_t*>(slots.slots) - first, (last < 0 ? -last : last) + item_bytes, first};
}

constexpr int kMostParts = 2;

struct TokenWrite {
  TokenPart parts[kMostParts];
  int part_count;
  TokenSlots slots;
  std::int64_t tokens;
  ElementType plain;   // of the sources
  ElementType stored;  // of the caches; where it is `plain`, bytes are copied as they are
};

// Slots of one call are distinct.
void WriteTokensCpu(const TokenWrite& write);
// `dependent`: may be launched dependently on the kernel before it in the stream (common/dependent_launch.cuh).
Status WriteTokensCuda(const TokenWrite& write, bool dependent, const DeviceStream& where);

}  // namespace paddle_kv
