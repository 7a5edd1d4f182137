// Tokens of sequences, out of a cache whose rows lie in one piece in aligned 16-byte words: the usual gather, which has
// a kernel of its own.
#pragma once

#include "paddle_kv/cache_write/move_tokens.h"

namespace paddle_kv {

struct RowGather {
  const std::uint8_t* cache;
  std::uint8_t* rows;
  const void* block_table;
  const void* cu_seq_lens;
  std::uint32_t block_count;
  std::uint32_t positions;  // of a row of the block table
  std::uint32_t blocks_per_sequence;
  std::uint32_t sequences;
  std::uint32_t tokens;
  std::uint32_t cache_block_stride;  // strides in bytes
  std::uint32_t cache_token_stride;
  std::uint32_t cache_head_stride;
  std::uint32_t rows_token_stride;
  std::uint32_t rows_head_stride;
  std::uint32_t words;  // of the row of a head
  std::uint32_t heads;
  std::uint32_t tokens_abreast;  // of a CTA, whose threads are whole warps
  int block_shift;               // a block has 1 << shift slots
  bool block_table_is_int64;
  bool cu_seq_lens_is_int64;
};

// Whether this move, with heads joined where they can be, is a gather of whole rows; then `gather` is filled in.
bool AsRowGather(const TokenMove& move, RowGather* gather);

Status GatherRows(const RowGather& gather, const DeviceStream& where);

}  // namespace paddle_kv
