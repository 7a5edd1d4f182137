// The kernels that move tokens between rows and a block cache, with their launch.
//
// A CTA takes neighbouring positions of one sequence, counted from a multiple of how many it takes: so it meets the
// slots of a block aligned, however the sequences lie in the rows. It finds its sequence and the slots once.
// MoveByRow: a thread owns one word of a token and carries it over a few tokens. Where the row is cut into groups that
//   lie apart in the cache (packed keys), a warp takes a few tokens, so that both sides meet whole sectors.
// MoveByTile: elements of packed values are turned in shared memory, because neighbours in the cache are tokens.
#pragma once

#include <algorithm>

#include "paddle_kv/cache_write/block_divider.cuh"
#include "paddle_kv/cache_write/move_tokens.h"
#include "paddle_kv/cache_write/moved_words.cuh"
#include "paddle_kv/cache_write/token_span.cuh"
#include "paddle_kv/cache_write/transposing_tile.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/launch_bounds.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {

// Where groups lie apart.
template <bool kToCache>
struct Neighbours {
  static constexpr unsigned kTokens = kToCache ? 4 : 8;   // of a warp
  static constexpr unsigned kWords = kToCache ? 64 : 16;  // of each of them in one CTA
};

// Of one thread of MoveByRow.
template <unsigned kWordBytes>
constexpr unsigned kWordsInFlight = kWordBytes >= 16 ? 4 : 8;

// ---- by row ----

struct MoveShape {
  Blocks blocks;
  unsigned words_of_row;
  unsigned words_of_token;
  unsigned words_of_cta;  // that many of one token, the token's others go to neighbouring CTAs
  unsigned ctas_of_token;
  unsigned tokens_abreast;  // of one CTA
  unsigned neighbours;      // of these are taken by neighbouring threads
  unsigned words_of_group;  // and neighbouring words of a group by threads that are nearer still
  unsigned tokens_of_cta;
};

template <class Codec, bool kToCache>
__global__ void __launch_bounds__(MoveTuning::kThreads,
                                  kToCache ? 1 : ResidentCtas(Codec::kGatherCtas, MoveTuning::kThreads))
    MoveByRow(const __grid_constant__ TokenMove move, const __grid_constant__ MoveShape shape,
              const __grid_constant__ Dequantization how) {
  using Stored = typename Codec::Stored;
  using Plain = typename Codec::Plain;
  using Held = typename std::conditional<kToCache, Plain, Stored>::type;
  using Word = typename WordOf<sizeof(Held)>::Type;
  constexpr unsigned kInFlight = kWordsInFlight<sizeof(Held)>;
  __shared__ std::int64_t cache_offsets[MoveTuning::kMostTokensPerCta];
  __shared__ std::int64_t rows_offsets[MoveTuning::kMostTokensPerCta];
  __shared__ std::int64_t scale_offsets[Codec::kScalePerToken ? MoveTuning::kMostTokensPerCta : 1];
  const TokenSpan span = SpanOfTokens(move, shape.blocks.spans, blockIdx.x / shape.ctas_of_token);
  if (span.count == 0) return;  // all threads alike
  if (threadIdx.x < span.count) {
    const std::int64_t token = span.first + threadIdx.x;
    cache_offsets[threadIdx.x] = CacheOffsetOf(move, shape.blocks.of_cache, span, token);
    rows_offsets[threadIdx.x] = shape.blocks.of_rows.OffsetOf(move.rows, token);
    if constexpr (Codec::kScalePerToken) {
      scale_offsets[threadIdx.x] = OffsetOfScales(how, move.cache, max(cache_offsets[threadIdx.x], std::int64_t{0}),
                                                  SequenceOf(move.map, span.first_above));
    }
  }

  unsigned abreast = threadIdx.x / shape.words_of_cta;
  unsigned word = threadIdx.x % shape.words_of_cta;
  if (shape.neighbours > 1) {
    const unsigned of_group = threadIdx.x % shape.words_of_group;
    const unsigned neighbour = threadIdx.x / shape.words_of_group % shape.neighbours;
    const unsigned group = threadIdx.x / (shape.words_of_group * shape.neighbours);
    const unsigned groups = shape.words_of_cta / shape.words_of_group;
    word = group % groups * shape.words_of_group + of_group;
    abreast = group / groups * shape.neighbours + neighbour;
  }
  word += blockIdx.x % shape.ctas_of_token * shape.words_of_cta;
  const unsigned head = word / shape.words_of_row;
  const bool used = abreast < shape.tokens_abreast && word < shape.words_of_token;
  word -= head * shape.words_of_row;
  const float scale = kToCache || Codec::kScalePerToken || !used ? 1.0f : ScaleOfHead(how, head);
  std::uint8_t* const on_rows =
      move.rows.data + head * move.rows.head_stride + OffsetFromRow(move.rows, word * sizeof(Plain));
  std::uint8_t* const in_cache =
      move.cache.data + head * move.cache.head_stride + OffsetFromRow(move.cache, word * Codec::kStoredBytes);
  __syncthreads();
  if (!used) return;
  for (unsigned start = abreast; start < span.count; start += shape.tokens_abreast * kInFlight) {
    Word held[kInFlight];
#pragma unroll
    for (unsigned k = 0; k < kInFlight; ++k) {
      // Behind the end the last token once more, and without a slot the first of the cache (if it has any): a branch
      // here would make each load wait for the one before.
      const unsigned token = min(start + k * shape.tokens_abreast, span.count - 1);
      const std::int64_t offset = cache_offsets[token];
      const bool from_rows = kToCache || (offset < 0 && move.block_count == 0);
      held[k] =
          LoadStreaming<Word>(from_rows ? on_rows + rows_offsets[token] : in_cache + max(offset, std::int64_t{0}));
    }
#pragma unroll
    for (unsigned k = 0; k < kInFlight; ++k) {
      const unsigned token = start + k * shape.tokens_abreast;
      if (token >= span.count) continue;
      const std::int64_t offset = cache_offsets[token];
      if constexpr (kToCache) {
        if (offset >= 0) StoreStreaming(in_cache + offset, FromWord<Held>(held[k]));
      } else {
        float by = scale;
        if constexpr (Codec::kScalePerToken) by = how.pointer[scale_offsets[token] + head * how.stride_per_head];
        const Plain plain = Codec::Read(FromWord<Held>(held[k]), how, by);
        StoreStreaming(on_rows + rows_offsets[token], offset < 0 ? Plain{} : plain);
      }
    }
  }
}

// ---- by tile. Loads and stores are not streaming: here that costs a few percent ----

struct MoveTileShape {
  Blocks blocks;
  unsigned tiles_of_row;
  unsigned tiles_of_tokens;  // all tiles of the same tokens
  unsigned words_of_column;  // of a block, behind which the next column follows: 1, 2, 4, or 8 for all else
  bool aligned_columns;      // columns of the cache start at multiples of 16 bytes
  bool aligned_rows;         // rows consist of aligned 16-byte words
};

// Bytes of `Value` from elements that lie `stride` apart.
template <class Value, class Element>
__device__ Value LoadElements(const std::uint8_t* address, std::int64_t stride, unsigned count) {
  constexpr unsigned kElements = sizeof(Value) / sizeof(Element);
  Element elements[kElements];
#pragma unroll
  for (unsigned k = 0; k < kElements; ++k) {
    elements[k] = k < count ? Load<Element>(address + k * stride) : Element{};
  }
  Value value;
  memcpy(&value, elements, sizeof(value));
  return value;
}

template <int kElementBytes>
__global__ void __launch_bounds__(MoveTuning::kThreads, ResidentCtas(5, MoveTuning::kThreads))
    ScatterTiles(const __grid_constant__ TokenMove move, const __grid_constant__ MoveTileShape shape) {
  using Element = typename WordOf<kElementBytes>::Type;
  constexpr unsigned kTokens = kTileTokens<kElementBytes>;
  constexpr unsigned kLineBytes = kTileElements * kElementBytes;
  constexpr unsigned kWords = kLineBytes / 16;
  constexpr unsigned kElementsOfWord = 16 / kElementBytes;
  constexpr unsigned kTokensAbreast = MoveTuning::kThreads / kWords;
  __shared__ __align__(16) std::uint8_t memory[kTileBytes<kElementBytes>];
  __shared__ TileSlots<kElementBytes> slots;
  const TransposingTile<kElementBytes, kLineBytes, kTokensOfWord<kElementBytes>> tile{memory};

  const unsigned tile_index = blockIdx.x % shape.tiles_of_tokens;
  const unsigned head = tile_index / shape.tiles_of_row;
  const unsigned first_element = tile_index % shape.tiles_of_row * kTileElements;
  const unsigned elements = min(kTileElements, static_cast<unsigned>(move.head_size) - first_element);
  const TokenSpan span = SpanOfTokens(move, shape.blocks.spans, blockIdx.x / shape.tiles_of_tokens);
  if (span.count == 0) return;  // all threads alike
  const std::int64_t element_stride = move.rows.group_bytes == kElementBytes ? move.rows.group_stride : kElementBytes;
  const unsigned word = threadIdx.x % kWords;
  const unsigned abreast = threadIdx.x / kWords;
  const unsigned in_word = word * kElementsOfWord < elements ? elements - word * kElementsOfWord : 0;
  const std::uint8_t* const source =
      move.rows.data + head * move.rows.head_stride + (first_element + word * kElementsOfWord) * element_stride;
  uint4 held[kTokens / kTokensAbreast];
  if (in_word > 0) {
#pragma unroll
    for (unsigned k = 0; k < kTokens / kTokensAbreast; ++k) {
      const unsigned token = min(abreast + k * kTokensAbreast, span.count - 1);
      const std::uint8_t* const from = source + shape.blocks.of_rows.OffsetOf(move.rows, span.first + token);
      held[k] = shape.aligned_rows ? Load<uint4>(from) : LoadElements<uint4, Element>(from, element_stride, in_word);
    }
  }
  if (threadIdx.x < kTokens) {  // the block table is read while the rows are
    const std::int64_t offset =
        threadIdx.x < span.count ? CacheOffsetOf(move, shape.blocks.of_cache, span, span.first + threadIdx.x) : -1;
    slots.Set(threadIdx.x, offset, shape.aligned_columns);
  }
  if (in_word > 0) {
#pragma unroll
    for (unsigned k = 0; k < kTokens / kTokensAbreast; ++k) {
      *reinterpret_cast<uint4*>(tile.At(abreast + k * kTokensAbreast, word * 16)) = held[k];
    }
  }
  __syncthreads();
  StoreColumns(tile, slots, move.cache.data + head * move.cache.head_stride + first_element * move.cache.group_stride,
               move.cache.group_stride, elements);
}

// The elements of a packed cache as they are.
template <int kBytes>
struct ElementsMoved {
  static constexpr int kGatherCtas = kBytes == 1 ? 6 : 8;
  using Element = typename WordOf<kBytes>::Type;
  static constexpr int kElementBytes = kBytes;
  static constexpr int kElementsOfWord = 16 / kBytes;
  static __device__ uint4 Read(const std::uint32_t (&pieces)[4], const Dequantization&, float) {
    return make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
  }
};

// As many codes as make 16 bytes of `Target`.
template <class Format, class Target>
struct ElementsDequantized {
  static constexpr int kGatherCtas = 6;
  using Element = typename Target::Bits;
  static constexpr int kElementBytes = 1;
  static constexpr int kElementsOfWord = PlainWord<Target>::kElements;
  static __device__ PlainWord<Target> Read(const std::uint32_t (&pieces)[kElementsOfWord / 4], const Dequantization&,
                                           float scale) {
    CodeWord<Target> codes;
#pragma unroll
    for (int i = 0; i < kElementsOfWord / 4; ++i) codes.fours[i] = pieces[i];
    return DequantizeWord<Format, Target>(codes, scale);
  }
};

template <class Codec>
__global__ void __launch_bounds__(MoveTuning::kThreads, ResidentCtas(Codec::kGatherCtas, MoveTuning::kThreads))
    GatherTiles(const __grid_constant__ TokenMove move, const __grid_constant__ MoveTileShape shape,
                const __grid_constant__ Dequantization how) {
  constexpr int kElementBytes = Codec::kElementBytes;
  constexpr unsigned kTokens = kTileTokens<kElementBytes>;
  constexpr unsigned kInWord = kTokensOfWord<kElementBytes>;
  constexpr unsigned kElementsOfWord = Codec::kElementsOfWord;
  using Stored = typename WordOf<kElementBytes>::Type;
  using Element = typename Codec::Element;
  using Tile = TransposingTile<kElementBytes, 128, kElementsOfWord>;
  __shared__ __align__(16) std::uint8_t memory[kTileBytes<kElementBytes>];
  __shared__ TileSlots<kElementBytes> slots;
  __shared__ std::int64_t rows_offsets[kTokens];
  const Tile tile{memory};

  const unsigned tile_index = blockIdx.x % shape.tiles_of_tokens;
  const unsigned head = tile_index / shape.tiles_of_row;
  const unsigned first_element = tile_index % shape.tiles_of_row * kTileElements;
  const unsigned elements = min(kTileElements, static_cast<unsigned>(move.head_size) - first_element);
  const TokenSpan span = SpanOfTokens(move, shape.blocks.spans, blockIdx.x / shape.tiles_of_tokens);
  if (span.count == 0) return;  // all threads alike
  if (threadIdx.x < kTokens) {
    const std::int64_t token = span.first + threadIdx.x;
    const bool exists = threadIdx.x < span.count;
    slots.Set(threadIdx.x, exists ? CacheOffsetOf(move, shape.blocks.of_cache, span, token) : -1,
              shape.aligned_columns);
    rows_offsets[threadIdx.x] = exists ? shape.blocks.of_rows.OffsetOf(move.rows, token) : 0;
  }
  __syncthreads();
  const std::uint8_t* const columns =
      move.cache.data + head * move.cache.head_stride + first_element * move.cache.group_stride;
  // Neighbouring threads take the words that lie side by side in a block.
  constexpr unsigned kElementsAbreast = MoveTuning::kThreads / 8;
  const unsigned column = threadIdx.x / shape.words_of_column;
  const unsigned first_line = column % kElementsAbreast;
  const unsigned chunk =  // of the tokens of an element
      column / kElementsAbreast * shape.words_of_column + threadIdx.x % shape.words_of_column;
  const std::int64_t joined = slots.joined[chunk];
  const std::int64_t* const offsets = slots.offsets + chunk * kInWord;
  constexpr unsigned kRounds = kTileElements / kElementsAbreast;
  const auto column_of = [&](unsigned k) {  // behind the end the last one again
    return columns + min(first_line + k * kElementsAbreast, elements - 1) * move.cache.group_stride;
  };
  const auto place_of = [&](unsigned k) {
    return reinterpret_cast<uint4*>(tile.At(first_line + k * kElementsAbreast, chunk * 16));
  };
  if (joined >= 0) {
    uint4 held[kRounds];
#pragma unroll
    for (unsigned k = 0; k < kRounds; ++k) held[k] = Load<uint4>(column_of(k) + joined);
#pragma unroll
    for (unsigned k = 0; k < kRounds; ++k) *place_of(k) = held[k];
  } else {
#pragma unroll 1
    for (unsigned k = 0; k < kRounds; ++k) {  // a word at a time: its elements are enough loads in flight
      Stored singly[kInWord];
#pragma unroll
      for (unsigned i = 0; i < kInWord; ++i) {
        singly[i] = offsets[i] < 0 ? Stored{} : Load<Stored>(column_of(k) + offsets[i]);
      }
      uint4 word;
      memcpy(&word, singly, sizeof(word));
      *place_of(k) = word;
    }
  }
  const float scale = ScaleOfHead(how, head);
  __syncthreads();

  std::uint8_t* const rows = move.rows.data + head * move.rows.head_stride + first_element * sizeof(Element);
  constexpr unsigned kReads = kTileElements / kElementsOfWord / 8 * (Tile::kColumns / 4);
  for (unsigned read = threadIdx.x / 32; read < kReads; read += MoveTuning::kThreads / 32) {
    const WarpRead place(read, Tile::kColumns);
    const unsigned element = place.group * kElementsOfWord;
    const unsigned first_token = place.column * Tile::kElements;
    if (element >= elements || first_token >= span.count) continue;
    std::uint32_t across[Tile::kElements][Tile::kPieces];
    tile.Across(place.group, place.column, across);
#pragma unroll
    for (unsigned t = 0; t < Tile::kElements; ++t) {
      if (first_token + t >= span.count) break;
      auto word = Codec::Read(across[t], how, scale);
      if (slots.offsets[first_token + t] < 0) word = {};
      std::uint8_t* const target = rows + rows_offsets[first_token + t] + element * sizeof(Element);
      if (shape.aligned_rows) {
        Store(target, word);
        continue;
      }
      Element values[kElementsOfWord];
      memcpy(values, &word, sizeof(word));
#pragma unroll
      for (unsigned k = 0; k < kElementsOfWord; ++k) {
        if (element + k < elements) Store(target + k * sizeof(Element), values[k]);
      }
    }
  }
}

// ---- the host's side ----

inline Blocks BlocksOf(const TokenMove& move, std::int64_t span_tokens) {
  const std::int64_t positions = move.map.block_table == nullptr ? move.tokens : PositionsInTable(move);
  return {BlockDividerOf(move.cache.block_size, positions), BlockDividerOf(move.rows.block_size, move.tokens),
          BlockDividerOf(span_tokens, move.tokens)};
}

// Heads that lie side by side on both sides are one long row.
inline TokenMove WithJoinedHeads(TokenMove move, std::int64_t plain_bytes, bool one_scale) {
  const auto next_head = [&](const RowPlace& place, std::int64_t element_bytes) {
    const std::int64_t row_bytes = move.head_size * element_bytes;
    return place.group_bytes >= row_bytes ? row_bytes : row_bytes / place.group_bytes * place.group_stride;
  };
  if (!one_scale || move.rows.head_stride != next_head(move.rows, plain_bytes) ||
      move.cache.head_stride != next_head(move.cache, move.element_bytes)) {
    return move;
  }
  const auto join = [&](RowPlace* place, std::int64_t element_bytes) {
    if (place->group_bytes >= move.head_size * element_bytes) place->group_bytes *= move.heads;
  };
  join(&move.rows, plain_bytes);
  join(&move.cache, move.element_bytes);
  move.head_size *= move.heads;
  move.heads = 1;
  move.rows.head_stride = move.cache.head_stride = 0;
  return move;
}

// All that the addresses of the words of a place have in common: its bits below the lowest one set are zero in each.
inline std::uint64_t AlignmentBits(const RowPlace& place, std::int64_t row_bytes) {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(place.data);
  for (const std::int64_t stride : {place.block_stride, place.token_stride, place.head_stride}) {
    bits |= static_cast<std::uint64_t>(stride);
  }
  if (place.group_bytes < row_bytes) bits |= static_cast<std::uint64_t>(place.group_stride | place.group_bytes);
  return bits | static_cast<std::uint64_t>(row_bytes);
}

// Elements of neighbouring tokens lie side by side.
inline bool IsPackedValue(const TokenMove& move) {
  return move.cache.group_bytes == move.element_bytes && move.head_size > 1 &&
         move.cache.token_stride == move.element_bytes && move.element_bytes <= 4;
}

template <class Codec, bool kToCache>
Status LaunchByRow(const TokenMove& move, const Dequantization& how, cudaStream_t stream) {
  using Tuning = MoveTuning;
  using Held = typename std::conditional<kToCache, typename Codec::Plain, typename Codec::Stored>::type;
  MoveShape shape{};
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  const std::int64_t words_of_row = row_bytes / Codec::kStoredBytes;
  const std::int64_t words_of_token = words_of_row * move.heads;
  const std::int64_t words_of_group = move.cache.group_bytes / Codec::kStoredBytes;
  const bool apart = move.cache.group_bytes < row_bytes && Neighbours<kToCache>::kWords % words_of_group == 0;
  const std::int64_t most_words = apart ? Neighbours<kToCache>::kWords : Tuning::kThreads;
  const std::int64_t ctas_of_token = (words_of_token + most_words - 1) / most_words;
  shape.words_of_row = static_cast<unsigned>(words_of_row);
  shape.words_of_token = static_cast<unsigned>(words_of_token);
  shape.words_of_cta = static_cast<unsigned>(apart ? most_words : (words_of_token + ctas_of_token - 1) / ctas_of_token);
  shape.ctas_of_token = static_cast<unsigned>(ctas_of_token);
  shape.neighbours = apart ? Neighbours<kToCache>::kTokens : 1;
  shape.words_of_group = static_cast<unsigned>(apart ? words_of_group : 1);
  shape.tokens_abreast = std::min(Tuning::kThreads / shape.words_of_cta, Tuning::kMostTokensPerCta);
  shape.tokens_of_cta = std::min(shape.tokens_abreast * kWordsInFlight<sizeof(Held)>, Tuning::kMostTokensPerCta);
  shape.blocks = BlocksOf(move, shape.tokens_of_cta);
  const std::int64_t ctas = SpanCount(move, shape.tokens_of_cta) * ctas_of_token;
  if (ctas > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "MoveByRow");
  MoveByRow<Codec, kToCache><<<static_cast<unsigned>(ctas), Tuning::kThreads, 0, stream>>>(move, shape, how);
  return LaunchStatus("MoveByRow");
}

// `plain_bytes`: of an element of the rows. Calls launch(CTAs, shape).
template <class LaunchKernel>
Status LaunchByTile(const TokenMove& move, std::int64_t plain_bytes, const LaunchKernel& launch) {
  MoveTileShape shape{};
  shape.blocks = BlocksOf(move, 128 / move.element_bytes);
  const std::int64_t tiles_of_row = (move.head_size + kTileElements - 1) / kTileElements;
  shape.tiles_of_row = static_cast<unsigned>(tiles_of_row);
  shape.tiles_of_tokens = static_cast<unsigned>(tiles_of_row * move.heads);
  const std::int64_t words = move.cache.group_stride / 16;
  shape.words_of_column = words == 1 || words == 2 || words == 4 ? static_cast<unsigned>(words) : 8;
  const std::uint64_t columns = reinterpret_cast<std::uintptr_t>(move.cache.data) |
                                static_cast<std::uint64_t>(move.cache.head_stride | move.cache.group_stride);
  shape.aligned_columns = columns % 16 == 0;
  shape.aligned_rows = AlignmentBits(move.rows, move.head_size * plain_bytes) % 16 == 0;
  const std::int64_t ctas = SpanCount(move, 128 / move.element_bytes) * tiles_of_row * move.heads;
  if (ctas > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "MoveByTile");
  launch(static_cast<unsigned>(ctas), shape);
  return LaunchStatus("MoveByTile");
}

// Dequantises element by element, in whatever formats.
Status GatherDequantizedSingly(const TokenMove& move, const Dequantization& how, const DeviceStream& where);

// One-byte elements of a cache as elements of `Target`, for each of the quantised formats.
template <class Target>
Status GatherDequantized(const TokenMove& given, const Dequantization& how, const DeviceStream& where) {
  constexpr int kElements = PlainWord<Target>::kElements;
  constexpr int kPlainBytes = sizeof(typename Target::Bits);
  const bool one_scale = how.pointer == nullptr || how.stride_per_head == 0;
  const TokenMove move = WithJoinedHeads(given, kPlainBytes, one_scale);
  const cudaStream_t stream = StreamOf(where);
  const bool by_token = how.DiffersByToken();
  if (IsPackedValue(move) && !by_token) {
    return DispatchQuantized(how.format, [&](auto format) {
      return LaunchByTile(move, kPlainBytes, [&](unsigned ctas, const MoveTileShape& shape) {
        GatherTiles<ElementsDequantized<decltype(format), Target>>
            <<<ctas, MoveTuning::kThreads, 0, stream>>>(move, shape, how);
      });
    });
  }
  const bool whole_words = AlignmentBits(move.cache, move.head_size) % kElements == 0 &&
                           AlignmentBits(move.rows, move.head_size * kPlainBytes) % 16 == 0;
  if (!whole_words) return GatherDequantizedSingly(move, how, where);
  return DispatchQuantized(how.format, [&](auto format) {
    using Codec = Dequantized<decltype(format), Target>;
    return by_token ? LaunchByRow<ByToken<Codec>, false>(move, how, stream)
                    : LaunchByRow<Codec, false>(move, how, stream);
  });
}

extern template Status GatherDequantized<Float32>(const TokenMove&, const Dequantization&, const DeviceStream&);
extern template Status GatherDequantized<Float16>(const TokenMove&, const Dequantization&, const DeviceStream&);
extern template Status GatherDequantized<BFloat16>(const TokenMove&, const Dequantization&, const DeviceStream&);

}  // namespace paddle_kv
