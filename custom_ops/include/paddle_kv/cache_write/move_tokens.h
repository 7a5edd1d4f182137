// Moves tokens between two places that hold one row for each token and head: contiguous rows, and a block cache of any
// layout. gather_cache, scatter_cache and convert_layout are this move, with different places.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/element_type.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

// Where the row of a token and a head lies; all strides in bytes. The row of slot s, head h is cut into groups: byte b
// of it lies at data + s / block_size * block_stride + s % block_size * token_stride + h * head_stride + b /
// group_bytes * group_stride + b % group_bytes. A contiguous row is one group.
struct RowPlace {
  std::uint8_t* data;
  std::int64_t block_size;
  std::int64_t block_stride;
  std::int64_t token_stride;
  std::int64_t head_stride;
  std::int64_t group_stride;
  std::int64_t group_bytes;
};

// In which slot of the cache each token lives: token n belongs to the last sequence that starts at or before n, and
// entry p / block size of its row in the block table names the block of position p. Without a table, slot n. The first
// token of a sequence is at position 0, or where `starts` says.
struct TokenMap {
  const void* block_table = nullptr;  // [sequences, blocks_per_sequence] int32 or int64
  const void* cu_seq_lens = nullptr;  // [sequences + 1] int32 or int64
  const void* starts = nullptr;       // [sequences] int32 or int64
  bool block_table_is_int64 = false;
  bool cu_seq_lens_is_int64 = false;
  bool starts_is_int64 = false;
  std::int64_t sequences = 0;
  std::int64_t blocks_per_sequence = 0;
};

PADDLE_KV_HOST_DEVICE std::int64_t IntegerAt(const void* integers, bool is_int64, std::int64_t i) {
  return is_int64 ? static_cast<const std::int64_t*>(integers)[i] : static_cast<const std::int32_t*>(integers)[i];
}

PADDLE_KV_HOST_DEVICE bool StartsAbove(const TokenMap& map, std::int64_t entry, std::int64_t token) {
  return IntegerAt(map.cu_seq_lens, map.cu_seq_lens_is_int64, entry) > token;
}

// The position of a token in its sequence, given the first entry of cu_seq_lens above it. -1 for a token of no
// sequence, and for those of a sequence that starts where none can.
PADDLE_KV_HOST_DEVICE std::int64_t PositionOf(const TokenMap& map, std::int64_t first_above, std::int64_t token) {
  constexpr std::int64_t kMostStart = std::int64_t{1} << 62;
  if (first_above == 0 || first_above > map.sequences) return -1;
  const std::int64_t in_sequence = token - IntegerAt(map.cu_seq_lens, map.cu_seq_lens_is_int64, first_above - 1);
  if (map.starts == nullptr) return in_sequence;
  const std::int64_t start = IntegerAt(map.starts, map.starts_is_int64, first_above - 1);
  return start < 0 || start > kMostStart || in_sequence < 0 || in_sequence > kMostStart ? -1 : start + in_sequence;
}

// The sequence of such a token; 0 for a token of no sequence.
PADDLE_KV_HOST_DEVICE std::int64_t SequenceOf(const TokenMap& map, std::int64_t first_above) {
  return first_above == 0 || first_above > map.sequences ? 0 : first_above - 1;
}

// The block of an entry of that sequence in the table. -1 if it is not in the table or not in the cache.
PADDLE_KV_HOST_DEVICE std::int64_t BlockInTable(const TokenMap& map, std::int64_t first_above, std::int64_t entry,
                                                std::int64_t block_count) {
  if (entry >= map.blocks_per_sequence) return -1;
  const std::int64_t block =
      IntegerAt(map.block_table, map.block_table_is_int64, (first_above - 1) * map.blocks_per_sequence + entry);
  return block < 0 || block >= block_count ? -1 : block;
}

PADDLE_KV_HOST_DEVICE std::int64_t OffsetOfSlot(const RowPlace& place, std::int64_t slot) {
  return slot / place.block_size * place.block_stride + slot % place.block_size * place.token_stride;
}

struct TokenMove {
  RowPlace rows;   // slot n holds token n
  RowPlace cache;  // slots by the map
  TokenMap map;
  std::int64_t block_count;  // of the cache
  std::int64_t tokens;
  std::int64_t heads;
  std::int64_t head_size;      // elements
  std::int64_t element_bytes;  // of the cache
};

// How codes become plain elements. Slot t of block b has in head h, for sequence s, the scale
// pointer[b * stride_per_block + h * stride_per_head + t * stride_per_token + s * stride_per_sequence], or `value`
// without a pointer.
struct Dequantization {
  ElementType format;
  ElementType plain;
  const float* pointer = nullptr;  // on the device, for the CUDA launcher
  std::int64_t stride_per_head = 0;
  float value = 1.0f;
  std::int64_t stride_per_block = 0;
  std::int64_t stride_per_token = 0;
  std::int64_t stride_per_sequence = 0;

  // Whether the tokens of a head may have different scales.
  PADDLE_KV_HOST_DEVICE bool DiffersByToken() const { return stride_per_token != 0 || stride_per_sequence != 0; }
};

// Where in the scales those of the row begin that lies at this offset in the cache and belongs to that sequence.
PADDLE_KV_HOST_DEVICE std::int64_t OffsetOfScales(const Dequantization& how, const RowPlace& cache, std::int64_t offset,
                                                  std::int64_t sequence) {
  const std::int64_t of_sequence = sequence * how.stride_per_sequence;
  if (how.stride_per_token == 0) return of_sequence;
  const std::int64_t block = offset / cache.block_stride;
  const std::int64_t token = (offset - block * cache.block_stride) / cache.token_stride;
  return of_sequence + block * how.stride_per_block + token * how.stride_per_token;
}

// cache -> rows, bytes as they are. Tokens without a slot become zeros.
void GatherTokensCpu(const TokenMove& move);
Status GatherTokensCuda(const TokenMove& move, const DeviceStream& where);

// cache -> rows, one byte in the cache becomes one element of `plain`. Tokens without a slot become zeros.
void DequantizeTokensCpu(const TokenMove& move, const Dequantization& how);
Status DequantizeTokensCuda(const TokenMove& move, const Dequantization& how, const DeviceStream& where);

// rows -> cache, bytes as they are. Tokens without a slot are skipped.
void ScatterTokensCpu(const TokenMove& move);
Status ScatterTokensCuda(const TokenMove& move, const DeviceStream& where);

}  // namespace paddle_kv
