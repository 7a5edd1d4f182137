// A thread takes one word of a few tokens. Its place in the CTA is the place of the word: x in the row of a head, y the
// head, z the token; so nothing is divided. Each warp finds by itself, in one read of cu_seq_lens where there are few
// sequences, to which of them the first token of the CTA belongs; so no warp waits for another. Between the launch and
// the rows there are two more trips to memory, for that and for the block table: the blocks of all tokens of a thread
// are read side by side, and so are their words.
#include "paddle_kv/cache_write/gather_rows.h"

#include <algorithm>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/dependent_launch.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr unsigned kThreads = 256;  // of a CTA, or as near to it as whole warps and whole tokens come
  static constexpr unsigned kMostThreads = 1024;
  static constexpr unsigned kMostTokensAbreast = 64;  // places that a CTA has in z
  static constexpr unsigned kRounds = 2;              // tokens of a thread
};

constexpr std::uint32_t kWordBytes = 16;
constexpr unsigned kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Positions, blocks and tokens fit in 32 bits with a sign; what does not is like the nearest number that does.
__device__ inline std::int32_t Narrow(std::int32_t number) { return number; }
__device__ inline std::int32_t Narrow(std::int64_t number) {
  return static_cast<std::int32_t>(min(max(number, std::int64_t{INT32_MIN}), std::int64_t{INT32_MAX}));
}

// The sequence of a token: entry `above` of cu_seq_lens is the first one above the token, and the one before it
// `start`.
struct Place {
  std::uint32_t above;
  std::int32_t start;
  std::int32_t next;  // what entry `above` is; without one, above all tokens
};

// By a whole warp, for one token.
template <class Length>
__device__ Place PlaceOf(const Length* lengths, std::uint32_t sequences, std::int32_t token) {
  const std::uint32_t entries = sequences + 1;
  std::uint32_t low = 0;
  std::uint32_t high = entries;
  while (high - low > kLanes - 2) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (Narrow(lengths[middle]) > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  // One more on both sides: the entries before and behind the place are among those of the warp.
  const std::uint32_t first = low == 0 ? 0 : low - 1;
  const unsigned lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kLanes;
  const std::uint32_t entry = first + lane;
  const std::int32_t length = entry < min(high + 1, entries) ? Narrow(lengths[entry]) : INT32_MAX;
  const unsigned below = __popc(__ballot_sync(kAllLanes, length <= token));
  const std::int32_t start = __shfl_sync(kAllLanes, length, below == 0 ? 0 : below - 1);
  return {first + below, start, __shfl_sync(kAllLanes, length, below)};
}

template <class Block, class Length>
__global__ void __launch_bounds__(Tuning::kMostThreads) GatherRowsOfTokens(const __grid_constant__ RowGather gather) {
  constexpr unsigned kRounds = Tuning::kRounds;
  const std::uint32_t first = blockIdx.x * blockDim.z * kRounds;
  const auto* const lengths = static_cast<const Length*>(gather.cu_seq_lens);
  const auto* const table = static_cast<const Block*>(gather.block_table);
  const Place place = PlaceOf(lengths, gather.sequences, static_cast<std::int32_t>(first));

  // Without a block the first of the cache is read, and zeros are stored: no branch, for which other words would wait.
  std::uint32_t in_table[kRounds];
  std::uint32_t in_block[kRounds];
  bool found[kRounds];
#pragma unroll
  for (unsigned k = 0; k < kRounds; ++k) {
    const std::uint32_t token = first + threadIdx.z + k * blockDim.z;
    const auto number = static_cast<std::int32_t>(token);
    Place own = place;
    if (own.next <= number) {
      while (own.above <= gather.sequences && Narrow(lengths[own.above]) <= number) ++own.above;
      own.start = Narrow(lengths[own.above - 1]);
    }
    const std::uint32_t position = token - static_cast<std::uint32_t>(own.start);
    const std::uint32_t sequence = own.above - 1;  // of the first one: -1, which is above all
    const std::uint32_t entry = position >> gather.block_shift;
    found[k] = sequence < gather.sequences && position < gather.positions;
    in_block[k] = position - (entry << gather.block_shift);
    in_table[k] = found[k] ? sequence * gather.blocks_per_sequence + entry : 0;
  }
  std::uint32_t blocks[kRounds];
#pragma unroll
  for (unsigned k = 0; k < kRounds; ++k) blocks[k] = static_cast<std::uint32_t>(Narrow(table[in_table[k]]));
  const std::uint32_t byte = threadIdx.x * kWordBytes;
  const std::uint8_t* const cache = gather.cache + std::uint64_t{threadIdx.y} * gather.cache_head_stride + byte;
  uint4 held[kRounds];
#pragma unroll
  for (unsigned k = 0; k < kRounds; ++k) {
    found[k] = found[k] && blocks[k] < gather.block_count;  // nor is it negative
    const std::uint32_t block = found[k] ? blocks[k] : 0;
    held[k] = LoadNow(cache + std::uint64_t{block} * gather.cache_block_stride +
                      std::uint64_t{in_block[k]} * gather.cache_token_stride);
  }
  std::uint8_t* const rows = gather.rows + std::uint64_t{threadIdx.y} * gather.rows_head_stride + byte;
#pragma unroll
  for (unsigned k = 0; k < kRounds; ++k) {
    const std::uint32_t token = first + threadIdx.z + k * blockDim.z;
    StoreIf(token < gather.tokens, rows + std::uint64_t{token} * gather.rows_token_stride,
            found[k] ? held[k] : uint4{});
  }
}

bool IsNarrow(std::int64_t number) { return number >= 0 && number < std::int64_t{1} << 31; }

// Tokens for a CTA of whole warps; 0 if there is no such number.
unsigned TokensAbreast(unsigned words_of_token) {
  unsigned chosen = 0;
  for (unsigned tokens = 1; tokens <= Tuning::kMostTokensAbreast; ++tokens) {
    const unsigned threads = words_of_token * tokens;
    if (threads > Tuning::kMostThreads || (chosen > 0 && threads > Tuning::kThreads)) break;
    if (threads % kLanes == 0) chosen = tokens;
  }
  return chosen;
}

}  // namespace

bool AsRowGather(const TokenMove& move, RowGather* gather) {
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  const std::int64_t words = row_bytes / kWordBytes;
  const TokenMap& map = move.map;
  if (map.block_table == nullptr || map.starts != nullptr || map.sequences == 0 || move.block_count == 0 ||
      move.rows.block_size != 1 || move.rows.group_bytes < row_bytes || move.cache.group_bytes < row_bytes ||
      words == 0 || words * move.heads > Tuning::kMostThreads) {
    return false;
  }
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(move.rows.data) |
                       reinterpret_cast<std::uintptr_t>(move.cache.data) | static_cast<std::uint64_t>(row_bytes);
  for (const std::int64_t stride : {move.rows.block_stride, move.rows.head_stride, move.cache.block_stride,
                                    move.cache.token_stride, move.cache.head_stride}) {
    if (!IsNarrow(stride)) return false;
    bits |= static_cast<std::uint64_t>(stride);
  }
  int shift = 0;
  while (std::int64_t{1} << shift < move.cache.block_size) ++shift;
  gather->tokens_abreast = TokensAbreast(static_cast<unsigned>(words * move.heads));
  if (bits % kWordBytes != 0 || std::int64_t{1} << shift != move.cache.block_size || gather->tokens_abreast == 0 ||
      !IsNarrow(move.tokens) || !IsNarrow(move.block_count) || !IsNarrow(map.sequences + 1) ||
      !IsNarrow(map.blocks_per_sequence) || !IsNarrow(map.blocks_per_sequence * map.sequences) ||
      !IsNarrow(map.blocks_per_sequence * move.cache.block_size)) {
    return false;
  }
  gather->cache = move.cache.data;
  gather->rows = move.rows.data;
  gather->block_table = map.block_table;
  gather->cu_seq_lens = map.cu_seq_lens;
  gather->block_count = static_cast<std::uint32_t>(move.block_count);
  gather->positions = static_cast<std::uint32_t>(map.blocks_per_sequence * move.cache.block_size);
  gather->blocks_per_sequence = static_cast<std::uint32_t>(map.blocks_per_sequence);
  gather->sequences = static_cast<std::uint32_t>(map.sequences);
  gather->tokens = static_cast<std::uint32_t>(move.tokens);
  gather->cache_block_stride = static_cast<std::uint32_t>(move.cache.block_stride);
  gather->cache_token_stride = static_cast<std::uint32_t>(move.cache.token_stride);
  gather->cache_head_stride = static_cast<std::uint32_t>(move.cache.head_stride);
  gather->rows_token_stride = static_cast<std::uint32_t>(move.rows.block_stride);
  gather->rows_head_stride = static_cast<std::uint32_t>(move.rows.head_stride);
  gather->words = static_cast<std::uint32_t>(words);
  gather->heads = static_cast<std::uint32_t>(move.heads);
  gather->block_shift = shift;
  gather->block_table_is_int64 = map.block_table_is_int64;
  gather->cu_seq_lens_is_int64 = map.cu_seq_lens_is_int64;
  return true;
}

Status GatherRows(const RowGather& gather, const DeviceStream& where) {
  const unsigned tokens_of_cta = gather.tokens_abreast * Tuning::kRounds;
  const unsigned ctas = (gather.tokens + tokens_of_cta - 1) / tokens_of_cta;
  const dim3 block(gather.words, gather.heads, gather.tokens_abreast);
  const auto kernel = gather.block_table_is_int64
                          ? (gather.cu_seq_lens_is_int64 ? GatherRowsOfTokens<std::int64_t, std::int64_t>
                                                         : GatherRowsOfTokens<std::int64_t, std::int32_t>)
                          : (gather.cu_seq_lens_is_int64 ? GatherRowsOfTokens<std::int32_t, std::int64_t>
                                                         : GatherRowsOfTokens<std::int32_t, std::int32_t>);
  return LaunchKernel<RowGather>(kernel, dim3(ctas), block, false, StreamOf(where), "GatherRowsOfTokens", gather);
}

}  // namespace paddle_kv
