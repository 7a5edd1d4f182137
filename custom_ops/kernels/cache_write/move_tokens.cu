// Two kernels. Where rows are contiguous in the cache, neighbouring threads take neighbouring words of a row
// (MoveByRow). In a packed cache the words of one row lie apart, but the same word of the next token follows directly:
// there a tile goes through shared memory, so that threads walk along tokens on the side of the cache and along the row
// on the other (MoveByTile). Block ids are read on the device, once for each token and CTA.
#include "paddle_kv/cache_write/move_tokens.h"

#include <algorithm>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/quantize.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr int kThreads = 256;
  static constexpr int kWordsInFlight = 4;  // of one thread
  // MoveByRow: tokens of one CTA, as many as give each thread its words, within this limit.
  static constexpr int kMostTokensPerCta = 64;
  // MoveByTile: with 16-byte words a tile is 64 tokens x 512 bytes of one head.
  static constexpr int kTileTokens = 64;
  static constexpr int kTileRowBytes = 512;
  static constexpr int kTileMostWords = 128;
};

constexpr std::int64_t kLargestGrid = (std::int64_t{1} << 31) - 1;

// What becomes of a word on its way. Stored: the word in the cache, Plain: in the rows.
template <int kBytes>
struct Copied {
  using Stored = typename WordOf<kBytes>::Type;
  using Plain = Stored;
  static constexpr int kStoredBytes = kBytes;
  static __device__ Plain Read(const Stored& word, float) { return word; }
};

template <class Format, class Target>
struct Dequantized {
  using Stored = CodeWord<Target>;
  using Plain = PlainWord<Target>;
  static constexpr int kStoredBytes = PlainWord<Target>::kElements;
  static __device__ Plain Read(const Stored& codes, float scale) {
    return DequantizeWord<Format, Target>(codes, scale);
  }
};

template <class Format, class Target>
struct DequantizedSingly {
  using Stored = std::uint8_t;
  using Plain = typename Target::Bits;
  static constexpr int kStoredBytes = 1;
  static __device__ Plain Read(const Stored& code, float scale) {
    return Target::FromFloat(Format::Dequantize(code, scale));
  }
};

// The scale of each head, on the device.
struct HeadScales {
  const float* pointer = nullptr;
  std::int64_t stride_per_head = 0;
  float value = 1.0f;

  __device__ float Of(unsigned head) const { return pointer == nullptr ? value : pointer[head * stride_per_head]; }
};

// Where byte `offset` of a row lies from its start.
__device__ std::int64_t OffsetInRow(const RowPlace& place, std::uint32_t offset) {
  if (offset < place.group_bytes) return offset;
  const auto group_bytes = static_cast<std::uint32_t>(place.group_bytes);
  return offset / group_bytes * place.group_stride + offset % group_bytes;
}

// The first entry of cu_seq_lens above the token, found by the whole CTA: one round of independent loads for each
// kThreads sequences, where a search by each thread would wait for one load after the other.
__device__ std::int64_t FirstAbove(const TokenMap& map, std::int64_t token) {
  std::int64_t found = 0;
  if (map.block_table == nullptr) return found;
  for (std::int64_t start = 0; start <= map.sequences; start += Tuning::kThreads) {
    const std::int64_t entry = start + threadIdx.x;
    const int below = __syncthreads_count(entry <= map.sequences && !StartsAbove(map, entry, token));
    found += below;
    if (below < Tuning::kThreads) break;
  }
  return found;
}

// The slot of a token at or behind the one that `first_above` was found for.
__device__ std::int64_t SlotOfToken(const TokenMove& move, std::int64_t first_above, std::int64_t token) {
  if (move.map.block_table == nullptr) return token;
  while (first_above <= move.map.sequences && !StartsAbove(move.map, first_above, token)) ++first_above;
  return SlotInTable(move.map, first_above, token, move.cache.block_size, move.block_count);
}

template <class Codec, bool kToCache>
__global__ void __launch_bounds__(Tuning::kThreads)
    MoveByRow(const __grid_constant__ TokenMove move, unsigned words, int tokens_per_cta, HeadScales scales) {
  using Stored = typename Codec::Stored;
  using Plain = typename Codec::Plain;
  __shared__ std::int64_t cache_offsets[Tuning::kMostTokensPerCta];
  __shared__ std::int64_t rows_offsets[Tuning::kMostTokensPerCta];
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * tokens_per_cta;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * tokens_per_cta; first < move.tokens;
       first += stride) {
    const std::int64_t left = move.tokens - first;
    const unsigned tokens = left < tokens_per_cta ? static_cast<unsigned>(left) : tokens_per_cta;
    const std::int64_t first_above = FirstAbove(move.map, first);
    __syncthreads();  // the offsets of the round before are no longer read
    if (threadIdx.x < tokens) {
      const std::int64_t token = first + threadIdx.x;
      const std::int64_t slot = SlotOfToken(move, first_above, token);
      cache_offsets[threadIdx.x] = slot < 0 ? -1 : OffsetOfSlot(move.cache, slot);
      rows_offsets[threadIdx.x] = OffsetOfSlot(move.rows, token);
    }
    __syncthreads();
    const unsigned words_of_token = static_cast<unsigned>(move.heads) * words;
    const unsigned all = tokens * words_of_token;
    for (unsigned start = threadIdx.x; start < all; start += Tuning::kThreads * Tuning::kWordsInFlight) {
      Plain held[Tuning::kWordsInFlight];
      std::uint8_t* targets[Tuning::kWordsInFlight];
#pragma unroll
      for (int k = 0; k < Tuning::kWordsInFlight; ++k) {
        const unsigned item = start + k * Tuning::kThreads;
        targets[k] = nullptr;
        if (item >= all) continue;
        const unsigned token = item / words_of_token;
        const unsigned in_token = item - token * words_of_token;
        const unsigned head = in_token / words;
        const unsigned word = in_token - head * words;
        const std::int64_t cache_offset = cache_offsets[token];
        std::uint8_t* const on_rows = move.rows.data + rows_offsets[token] + head * move.rows.head_stride +
                                      OffsetInRow(move.rows, word * sizeof(Plain));
        std::uint8_t* const in_cache = move.cache.data + cache_offset + head * move.cache.head_stride +
                                       OffsetInRow(move.cache, word * Codec::kStoredBytes);
        if (kToCache) {
          if (cache_offset < 0) continue;
          held[k] = LoadStreaming<Plain>(on_rows);
          targets[k] = in_cache;
        } else {
          targets[k] = on_rows;
          held[k] = cache_offset < 0 ? Plain{} : Codec::Read(LoadStreaming<Stored>(in_cache), scales.Of(head));
        }
      }
#pragma unroll
      for (int k = 0; k < Tuning::kWordsInFlight; ++k) {
        if (targets[k] != nullptr) StoreStreaming(targets[k], held[k]);
      }
    }
  }
}

template <class Plain>
constexpr int kMostTileWords =
    Tuning::kTileRowBytes / sizeof(Plain) < Tuning::kTileMostWords ? Tuning::kTileRowBytes / sizeof(Plain)
                                                                   : Tuning::kTileMostWords;

// A tile is `kTileTokens` tokens x `words_per_tile` words of one head; `tiles_per_row` of them make a row.
template <class Codec, bool kToCache>
__global__ void __launch_bounds__(Tuning::kThreads)
    MoveByTile(const __grid_constant__ TokenMove move, unsigned words, unsigned words_per_tile, unsigned tiles_per_row,
               std::int64_t tiles, HeadScales scales) {
  using Stored = typename Codec::Stored;
  using Plain = typename Codec::Plain;
  constexpr int kTokens = Tuning::kTileTokens;
  // One word (or, of small words, 4 bytes) more than a row: threads that walk along tokens meet different banks.
  constexpr int kPadding = sizeof(Plain) < 4 ? 4 / sizeof(Plain) : 1;
  constexpr int kMostWords = kMostTileWords<Plain>;
  __shared__ __align__(16) unsigned char memory[kTokens * (kMostWords + kPadding) * sizeof(Plain)];
  __shared__ std::int64_t cache_offsets[kTokens];
  __shared__ std::int64_t rows_offsets[kTokens];
  Plain* const tile_words = reinterpret_cast<Plain*>(memory);
  const unsigned pitch = kMostWords + kPadding;

  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t head_tile = tile / tiles_per_row;
    const unsigned first_word = static_cast<unsigned>(tile % tiles_per_row) * words_per_tile;
    const unsigned head = static_cast<unsigned>(head_tile % move.heads);
    const std::int64_t first = head_tile / move.heads * kTokens;
    const std::int64_t left = move.tokens - first;
    const unsigned tokens = left < kTokens ? static_cast<unsigned>(left) : kTokens;
    const unsigned width = words - first_word < words_per_tile ? words - first_word : words_per_tile;
    const std::int64_t first_above = FirstAbove(move.map, first);
    __syncthreads();  // the tile before is no longer read
    if (threadIdx.x < tokens) {
      const std::int64_t slot = SlotOfToken(move, first_above, first + threadIdx.x);
      cache_offsets[threadIdx.x] = slot < 0 ? -1 : OffsetOfSlot(move.cache, slot) + head * move.cache.head_stride;
      rows_offsets[threadIdx.x] = OffsetOfSlot(move.rows, first + threadIdx.x) + head * move.rows.head_stride;
    }
    __syncthreads();

    const float scale = kToCache ? 1.0f : scales.Of(head);
    const unsigned token = threadIdx.x % kTokens;  // along tokens
    constexpr unsigned kWordsApart = Tuning::kThreads / kTokens;
    if (kToCache) {
#pragma unroll 4
      for (unsigned i = threadIdx.x; i < tokens * width; i += Tuning::kThreads) {
        const unsigned row = i / width;
        const unsigned word = i - row * width;
        if (cache_offsets[row] < 0) continue;
        tile_words[row * pitch + word] = LoadStreaming<Plain>(
            move.rows.data + rows_offsets[row] + OffsetInRow(move.rows, (first_word + word) * sizeof(Plain)));
      }
      __syncthreads();
      if (token < tokens && cache_offsets[token] >= 0) {
        for (unsigned word = threadIdx.x / kTokens; word < width; word += kWordsApart) {
          StoreStreaming(move.cache.data + cache_offsets[token] +
                             OffsetInRow(move.cache, (first_word + word) * Codec::kStoredBytes),
                         tile_words[token * pitch + word]);
        }
      }
    } else {
      if (token < tokens) {
        const std::int64_t cache_offset = cache_offsets[token];
#pragma unroll 8
        for (unsigned word = threadIdx.x / kTokens; word < width; word += kWordsApart) {
          tile_words[token * pitch + word] =
              cache_offset < 0
                  ? Plain{}
                  : Codec::Read(
                        LoadStreaming<Stored>(move.cache.data + cache_offset +
                                              OffsetInRow(move.cache, (first_word + word) * Codec::kStoredBytes)),
                        scale);
        }
      }
      __syncthreads();
      for (unsigned i = threadIdx.x; i < tokens * width; i += Tuning::kThreads) {
        const unsigned row = i / width;
        const unsigned word = i - row * width;
        StoreStreaming(move.rows.data + rows_offsets[row] + OffsetInRow(move.rows, (first_word + word) * sizeof(Plain)),
                       tile_words[row * pitch + word]);
      }
    }
  }
}

template <class Codec, bool kToCache>
Status Launch(const TokenMove& move, const HeadScales& scales, cudaStream_t stream) {
  const std::int64_t words = move.head_size * move.element_bytes / Codec::kStoredBytes;
  if (move.cache.group_bytes >= move.head_size * move.element_bytes) {
    const std::int64_t words_of_token = words * move.heads;
    const std::int64_t fitting = Tuning::kThreads * Tuning::kWordsInFlight / words_of_token;
    const int tokens_per_cta =
        static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>(fitting, Tuning::kMostTokensPerCta)));
    const std::int64_t ctas = (move.tokens + tokens_per_cta - 1) / tokens_per_cta;
    MoveByRow<Codec, kToCache><<<static_cast<unsigned>(std::min(ctas, kLargestGrid)), Tuning::kThreads, 0, stream>>>(
        move, static_cast<unsigned>(words), tokens_per_cta, scales);
    return LaunchStatus("MoveByRow");
  }
  const std::int64_t words_per_tile = std::min<std::int64_t>(words, kMostTileWords<typename Codec::Plain>);
  const std::int64_t tiles_per_row = (words + words_per_tile - 1) / words_per_tile;
  const std::int64_t tiles = (move.tokens + Tuning::kTileTokens - 1) / Tuning::kTileTokens * move.heads * tiles_per_row;
  MoveByTile<Codec, kToCache><<<static_cast<unsigned>(std::min(tiles, kLargestGrid)), Tuning::kThreads, 0, stream>>>(
      move, static_cast<unsigned>(words), static_cast<unsigned>(words_per_tile), static_cast<unsigned>(tiles_per_row),
      tiles, scales);
  return LaunchStatus("MoveByTile");
}

// All that the addresses of the words of a place have in common: its bits below the lowest one set are zero in each.
std::uint64_t AlignmentBits(const RowPlace& place, std::int64_t row_bytes) {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(place.data);
  for (const std::int64_t stride : {place.block_stride, place.token_stride, place.head_stride}) {
    bits |= static_cast<std::uint64_t>(stride);
  }
  if (place.group_bytes < row_bytes) bits |= static_cast<std::uint64_t>(place.group_stride | place.group_bytes);
  return bits | static_cast<std::uint64_t>(row_bytes);
}

template <bool kToCache>
Status LaunchCopy(const TokenMove& move, cudaStream_t stream) {
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  const std::uint64_t bits = AlignmentBits(move.rows, row_bytes) | AlignmentBits(move.cache, row_bytes);
  if (bits % 16 == 0) return Launch<Copied<16>, kToCache>(move, {}, stream);
  if (bits % 8 == 0) return Launch<Copied<8>, kToCache>(move, {}, stream);
  if (bits % 4 == 0) return Launch<Copied<4>, kToCache>(move, {}, stream);
  if (bits % 2 == 0) return Launch<Copied<2>, kToCache>(move, {}, stream);
  return Launch<Copied<1>, kToCache>(move, {}, stream);
}

}  // namespace

Status GatherTokensCuda(const TokenMove& move, const DeviceStream& where) {
  if (move.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  return LaunchCopy<false>(move, StreamOf(where));
}

Status ScatterTokensCuda(const TokenMove& move, const DeviceStream& where) {
  if (move.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  return LaunchCopy<true>(move, StreamOf(where));
}

Status DequantizeTokensCuda(const TokenMove& move, const Dequantization& how, const DeviceStream& where) {
  if (move.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  const HeadScales scales{how.pointer, how.stride_per_head, how.value};
  return DispatchQuantized(how.format, [&](auto format) {
    return DispatchPlain(how.plain, [&](auto target) {
      using Format = decltype(format);
      using Target = decltype(target);
      constexpr int kElements = PlainWord<Target>::kElements;
      const bool whole_words =
          AlignmentBits(move.cache, move.head_size) % kElements == 0 &&
          AlignmentBits(move.rows, move.head_size * static_cast<std::int64_t>(sizeof(typename Target::Bits))) % 16 == 0;
      return whole_words ? Launch<Dequantized<Format, Target>, false>(move, scales, StreamOf(where))
                         : Launch<DequantizedSingly<Format, Target>, false>(move, scales, StreamOf(where));
    });
  });
}

}  // namespace paddle_kv
