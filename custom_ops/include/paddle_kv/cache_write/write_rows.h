// Tokens whose rows lie in one piece on both sides, in aligned 16-byte words: the usual insert, which has a kernel of
// its own, because for few tokens the time is that of a launch and of one trip to memory.
#pragma once

#include "paddle_kv/cache_write/write_tokens.h"

namespace paddle_kv {

struct WholeRowPart {
  const std::uint8_t* source;
  std::uint8_t* cache;
  std::uint32_t source_token_stride;  // strides in bytes
  std::uint32_t source_head_stride;
  std::uint32_t cache_block_stride;
  std::uint32_t cache_token_stride;
  std::uint32_t cache_head_stride;
  std::uint32_t words;  // of the row of a head
};

struct WholeRows {
  WholeRowPart parts[kMostParts];
  const void* slots;
  std::uint64_t slot_limit;  // fits in 32 bits
  std::uint32_t slot_stride;
  std::uint32_t tokens;
  std::uint32_t heads;
  int block_shift;  // a block has 1 << shift slots; -1 where blocks follow each other without a gap
  bool slots_are_int64;
};

// Whether this write, of bytes as they are and with heads joined where they can be, is one of whole rows; then `rows`
// is filled in.
bool AsWholeRows(const TokenWrite& write, WholeRows* rows);

// `dependent`: launched dependently on the kernel before it, where the GPU can.
Status WriteWholeRows(const WholeRows& rows, bool dependent, const DeviceStream& where);

}  // namespace paddle_kv
