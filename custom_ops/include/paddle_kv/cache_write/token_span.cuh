// The tokens that a CTA moves between rows and a block cache (move_kernels.cuh).
#pragma once

#include "paddle_kv/cache_write/block_divider.cuh"
#include "paddle_kv/cache_write/move_tokens.h"

namespace paddle_kv {

struct MoveTuning {
  static constexpr int kThreads = 256;
  static constexpr unsigned kMostTokensPerCta = 128;  // of MoveByRow
};

struct TokenSpan {
  std::int64_t first;
  unsigned count;
  std::int64_t first_above;  // entry of cu_seq_lens above all of them
};

__device__ inline std::int64_t StartOf(const TokenMove& move, std::int64_t entry) {
  const std::int64_t start = IntegerAt(move.map.cu_seq_lens, move.map.cu_seq_lens_is_int64, entry);
  return start < 0 ? 0 : start < move.tokens ? start : move.tokens;
}

// Spans of at most `most` tokens, numbered so that no list of them is needed: those of a sequence that starts at token
// `start`, the q-th with the tokens before the first sequence as the zeroth, begin at number start / most + q. Some
// numbers stay empty. Called by the whole CTA.
__device__ inline TokenSpan SpanOfTokens(const TokenMove& move, const BlockDivider& spans, std::int64_t number) {
  const auto most = static_cast<unsigned>(spans.block_size);
  std::int64_t first_above = 0;
  std::int64_t begin = 0;
  std::int64_t end = move.tokens;
  if (move.map.block_table != nullptr) {
    const std::int64_t entries = move.map.sequences + 1;
    for (std::int64_t start = 0; start < entries; start += MoveTuning::kThreads) {
      const std::int64_t entry = start + threadIdx.x;
      const bool reached = entry < entries && spans.BlockOf(StartOf(move, entry)) + entry + 1 <= number;
      const int below = __syncthreads_count(reached);
      first_above += below;
      if (below < MoveTuning::kThreads) break;
    }
    if (first_above > 0) {
      begin = StartOf(move, first_above - 1);
      number -= spans.BlockOf(begin) + first_above;
    }
    if (first_above < entries) end = StartOf(move, first_above);
  }
  const std::int64_t first = begin + number * most;
  const std::int64_t left = end - first;
  return {first, left <= 0 ? 0 : left < most ? static_cast<unsigned>(left) : most, first_above};
}

inline std::int64_t SpanCount(const TokenMove& move, std::int64_t most) {
  return move.map.block_table == nullptr ? (move.tokens + most - 1) / most
                                         : move.tokens / most + move.map.sequences + 2;
}

PADDLE_KV_HOST_DEVICE std::int64_t PositionsInTable(const TokenMove& move) {
  return move.map.blocks_per_sequence * move.cache.block_size;
}

// How tokens are cut into the blocks of both sides, and into spans.
struct Blocks {
  BlockDivider of_cache;
  BlockDivider of_rows;
  BlockDivider spans;
};

// The byte offset of a token's slot in the cache, -1 without one.
__device__ inline std::int64_t CacheOffsetOf(const TokenMove& move, const BlockDivider& blocks, const TokenSpan& span,
                                             std::int64_t token) {
  if (move.map.block_table == nullptr) return blocks.OffsetOf(move.cache, token);
  const std::int64_t position = PositionOf(move.map, span.first_above, token);
  if (position < 0 || position >= PositionsInTable(move)) return -1;
  const std::int64_t entry = blocks.BlockOf(position);
  const std::int64_t block = BlockInTable(move.map, span.first_above, entry, move.block_count);
  const std::int64_t in_block = position - entry * blocks.block_size;
  return block < 0 ? -1 : block * move.cache.block_stride + in_block * move.cache.token_stride;
}

}  // namespace paddle_kv
