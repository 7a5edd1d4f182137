// The kernels that write new tokens into block caches, with their launch.
//
// By row: a thread owns one word of a token (part, head, position) and carries it over a few tokens, so the arithmetic
//   of finding it is done once; the words of these tokens are in flight together, and the slots are read while they
//   are. Where the row is cut into groups that lie apart in the cache (packed keys), a warp takes a few tokens, so that
//   it writes whole sectors if their slots are consecutive. A group shorter than a word (packed values) is written
//   element by element: right for the few tokens of a decoding step, whose slots are scattered.
// By tile: many tokens of packed values are turned in shared memory, because neighbours in the cache are tokens.
// One launch serves all parts. Tokens are never in grid.y.
#pragma once

#include <algorithm>

#include "paddle_kv/cache_write/block_divider.cuh"
#include "paddle_kv/cache_write/transposing_tile.cuh"
#include "paddle_kv/cache_write/write_tokens.h"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/launch_bounds.cuh"
#include "paddle_kv/common/quantize.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {

struct WriteTuning {
  static constexpr int kThreads = 256;
  static constexpr int kManyRounds = 4;    // words in flight of one thread of WriteRows, where there are many
  static constexpr int kPackedRounds = 2;  // beside tiles
  static constexpr unsigned kMostTokensAbreast = 32;
  static constexpr int kTileWordsInFlight = 4;
  static constexpr int kCtasPerMultiprocessor = 4;      // fewer than twice that, and a thread takes one word
  static constexpr unsigned kNeighbours = 4;            // tokens of a warp where groups lie apart
  static constexpr unsigned kWordsOfNeighbours = 64;    // of each of them in one CTA
  static constexpr std::int64_t kFewTokens = 32;        // up to which packed values are written by row
  static constexpr unsigned kFewestTileElements = 16;   // a tile is narrow
  static constexpr int kTileCtasPerMultiprocessor = 2;  // as long as there are fewer than that
  static constexpr std::int64_t kSomeTokens = 2048;     // from which on rows are better kept behind the tiles
  static constexpr std::int64_t kManyTokens = 8192;     // from which on packed values may not fit into the L2 cache
};

// ---- what becomes of a word on its way. Plain: the word in the source, Stored: in the cache. kPackedCtas: so many
// CTAs of WritePacked on a multiprocessor may take all registers. kTileCtas: so many tiles of kSomeTokens and more ----

template <int kBytes>
struct Copied {
  static constexpr int kPackedCtas = 6;
  static constexpr int kTileCtas = 4;
  using Plain = typename WordOf<kBytes>::Type;
  using Stored = Plain;
  static constexpr int kStoredBytes = kBytes;
  __device__ Copied(const TokenWrite&, float) {}
  __device__ Stored operator()(const Plain& word) const { return word; }
};

template <class Source, class Format>
struct Quantized {
  static constexpr int kPackedCtas = 5;
  static constexpr int kTileCtas = WriteTuning::kTileCtasPerMultiprocessor;  // narrower ones cost more than they give
  using Plain = PlainWord<Source>;
  using Stored = CodeWord<Source>;
  static constexpr int kStoredBytes = PlainWord<Source>::kElements;
  ScaleDivider divider;
  __device__ Quantized(const TokenWrite&, float scale) : divider(scale) {}
  __device__ Stored operator()(const Plain& word) const { return QuantizeWord<Source, Format>(word, divider); }
};

template <int kBytes>
struct QuantizedSingly {
  static constexpr int kPackedCtas = 6;
  static constexpr int kTileCtas = WriteTuning::kTileCtasPerMultiprocessor;
  using Plain = typename WordOf<kBytes>::Type;
  using Stored = std::uint8_t;
  static constexpr int kStoredBytes = 1;
  ElementType plain;
  ElementType format;
  float scale;
  __device__ QuantizedSingly(const TokenWrite& write, float value)
      : plain(write.plain), format(write.stored), scale(value) {}
  __device__ Stored operator()(Plain bits) const { return QuantizeOne(bits, plain, format, scale); }
};

// ---- by row ----

struct RowShape {
  std::int64_t source_word_stride[kMostParts];
  unsigned words_of_row[kMostParts];
  bool whole_words[kMostParts];  // words lie in one piece in the cache, and aligned
  unsigned words_of_first_part;
  unsigned words_of_token;
  unsigned words_of_cta;  // that many of one token, the token's others go to neighbouring CTAs
  unsigned ctas_of_token;
  unsigned tokens_abreast;  // of one CTA
  unsigned neighbours;      // of these are taken by neighbouring threads
  unsigned words_of_group;  // and neighbouring words of a group by threads that are nearer still
};

// Byte offset in the cache of byte `byte` of a row.
__device__ inline std::int64_t OffsetInRow(const RowPlace& place, unsigned byte) {
  if (byte < place.group_bytes) return byte;
  const auto group_bytes = static_cast<unsigned>(place.group_bytes);
  return byte / group_bytes * place.group_stride + byte % group_bytes;
}

// Stores the elements of a word one by one. It is the word from byte `byte` of a row on, and begins at `word_offset`.
template <int kElementBytes, class Value>
__device__ void StoreElements(std::uint8_t* row, const RowPlace& place, unsigned byte, std::int64_t word_offset,
                              const Value& value) {
  using Element = typename WordOf<kElementBytes>::Type;
  constexpr unsigned kElements = sizeof(Value) / kElementBytes;
  Element elements[kElements];
  memcpy(elements, &value, sizeof(value));
  const auto group_bytes = static_cast<unsigned>(place.group_bytes);
  unsigned in_group = byte % group_bytes;
#pragma unroll
  for (unsigned k = 0; k < kElements; ++k) {
    *reinterpret_cast<Element*>(row + word_offset) = elements[k];
    word_offset += kElementBytes;
    in_group += kElementBytes;
    if (in_group < group_bytes) continue;
    in_group = 0;
    word_offset += place.group_stride - group_bytes;
  }
}

// kRounds: tokens of one thread. Called by the whole CTA.
template <class Codec, int kElementBytes, int kRounds>
__device__ void WriteByRow(const TokenWrite& write, const RowShape& shape, const BlockDivider& blocks, unsigned cta) {
  using Plain = typename Codec::Plain;
  using Word = typename WordOf<sizeof(Plain)>::Type;
  // With many rounds the threads would find the places of the same few tokens, each again.
  constexpr bool kShared = kRounds == WriteTuning::kManyRounds;
  __shared__ std::int64_t offsets[kMostParts][kShared ? WriteTuning::kMostTokensAbreast * kRounds : 1];
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
  word += cta % shape.ctas_of_token * shape.words_of_cta;
  const std::int64_t first_of_cta =
      static_cast<std::int64_t>(cta / shape.ctas_of_token) * shape.tokens_abreast * kRounds;
  const std::int64_t first = first_of_cta + abreast;
  const std::int64_t last = write.tokens - 1 - first;
  const bool used = abreast < shape.tokens_abreast && word < shape.words_of_token && last >= 0;
  if (!kShared && !used) return;
  const bool second = word >= shape.words_of_first_part;
  if (second) word -= shape.words_of_first_part;
  const TokenPart& part = write.parts[second];
  const unsigned words_of_row = shape.words_of_row[second];
  const unsigned head = word / words_of_row;
  word -= head * words_of_row;

  Word held[kRounds];
  std::int64_t slots[kShared ? 1 : kRounds];
  if (used) {
    const std::uint8_t* const source = part.source.data + first * part.source.token_stride +
                                       head * part.source.head_stride + word * shape.source_word_stride[second];
#pragma unroll
    for (int k = 0; k < kRounds; ++k) {
      // Behind the end the last token once more: a branch here would make each load wait for the one before.
      const std::int64_t step = min(static_cast<std::int64_t>(k * shape.tokens_abreast), last);
      if constexpr (!kShared) slots[k] = write.slots.Of(first + step);
      held[k] = Load<Word>(source + step * part.source.token_stride);
    }
  }
  if constexpr (kShared) {
    const std::int64_t left = write.tokens - first_of_cta;
    for (unsigned t = threadIdx.x; t < shape.tokens_abreast * kRounds; t += blockDim.x) {
      const std::int64_t of_token = t < left ? write.slots.Of(first_of_cta + t) : -1;
      for (int p = 0; p < write.part_count; ++p) {
        offsets[p][t] = of_token < 0 ? -1 : blocks.OffsetOf(write.parts[p].cache, of_token);
      }
    }
    __syncthreads();
    if (!used) return;
  }
  const Codec codec(write, part.scale.Of(head));
  const unsigned byte = word * Codec::kStoredBytes;
  const std::int64_t word_offset = OffsetInRow(part.cache, byte);
  const bool whole_words = shape.whole_words[second];
  std::uint8_t* const target = part.cache.data + head * part.cache.head_stride;
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    std::int64_t offset;
    if constexpr (kShared) {
      offset = offsets[second][abreast + k * shape.tokens_abreast];
      if (offset < 0) continue;
    } else {
      if (slots[k] < 0 || k * shape.tokens_abreast > last) continue;
      offset = blocks.OffsetOf(part.cache, slots[k]);
    }
    const typename Codec::Stored stored = codec(FromWord<Plain>(held[k]));
    if (whole_words) {
      Store(target + offset + word_offset, stored);
    } else {
      StoreElements<kElementBytes>(target + offset, part.cache, byte, word_offset, stored);
    }
  }
}

template <class Codec, int kElementBytes, int kRounds>
__global__ void __launch_bounds__(WriteTuning::kThreads, ResidentCtas(5, WriteTuning::kThreads))
    WriteRows(const __grid_constant__ TokenWrite write, const __grid_constant__ RowShape shape, BlockDivider blocks) {
  WriteByRow<Codec, kElementBytes, kRounds>(write, shape, blocks, blockIdx.x);
}

// ---- by tile ----

struct TileShape {
  std::int64_t source_word_stride[kMostParts];
  unsigned tiles_of_row[kMostParts];
  bool aligned[kMostParts];   // columns of the cache start at multiples of 16 bytes
  unsigned elements_of_tile;  // fewer than a tile holds where there are too few tiles
  unsigned tiles_of_first_part;
  unsigned tiles_of_tokens;  // all tiles of the same tokens
  unsigned tiles_of_column;  // all tiles of the same elements
  bool by_column;            // these come one after the other
  unsigned ctas;
};

template <class Codec, int kElementBytes>
__device__ void WriteTile(const TokenWrite& write, const TileShape& shape, const BlockDivider& blocks, unsigned cta,
                          std::uint8_t* memory, TileSlots<kElementBytes>* slots) {
  using Plain = typename Codec::Plain;
  using Word = typename WordOf<sizeof(Plain)>::Type;
  constexpr unsigned kTokens = kTileTokens<kElementBytes>;
  constexpr unsigned kLineBytes = kTileElements * kElementBytes;
  constexpr unsigned kWords = kLineBytes / Codec::kStoredBytes;
  constexpr unsigned kElementsOfWord = Codec::kStoredBytes / kElementBytes;
  constexpr unsigned kTokensAbreast = WriteTuning::kThreads / kWords;
  const TransposingTile<kElementBytes, kLineBytes, kTokensOfWord<kElementBytes>> tile{memory};

  // An element that is stored to a scattered slot fills a part of a sector. The other parts follow while the sector is
  // in the L2 cache: also in a large cache, if all tokens of a few columns are written before those of others.
  unsigned tile_index = shape.by_column ? cta / shape.tiles_of_column : cta % shape.tiles_of_tokens;
  const unsigned tile_of_column = shape.by_column ? cta % shape.tiles_of_column : cta / shape.tiles_of_tokens;
  const bool second = tile_index >= shape.tiles_of_first_part;
  if (second) tile_index -= shape.tiles_of_first_part;
  const TokenPart& part = write.parts[second];
  const unsigned head = tile_index / shape.tiles_of_row[second];
  const unsigned first_element = tile_index % shape.tiles_of_row[second] * shape.elements_of_tile;
  const unsigned elements = min(shape.elements_of_tile, static_cast<unsigned>(part.head_size) - first_element);
  const std::int64_t first = static_cast<std::int64_t>(tile_of_column) * kTokens;
  const std::int64_t left = write.tokens - first;
  const unsigned tokens = left < kTokens ? static_cast<unsigned>(left) : kTokens;

  std::int64_t slot = -1;
  if (threadIdx.x < tokens) slot = write.slots.Of(first + threadIdx.x);
  const unsigned word = threadIdx.x % kWords;
  const unsigned abreast = threadIdx.x / kWords;
  const std::uint8_t* source = part.source.data + first * part.source.token_stride + head * part.source.head_stride +
                               (first_element / kElementsOfWord + word) * shape.source_word_stride[second];
  const Codec codec(write, part.scale.Of(head));
  if (word * kElementsOfWord < elements) {
#pragma unroll 1
    for (unsigned start = abreast; start < tokens; start += kTokensAbreast * WriteTuning::kTileWordsInFlight) {
      Word held[WriteTuning::kTileWordsInFlight];
#pragma unroll
      for (int k = 0; k < WriteTuning::kTileWordsInFlight; ++k) {
        const unsigned token = min(start + k * kTokensAbreast, tokens - 1);
        held[k] = Load<Word>(source + token * part.source.token_stride);
      }
#pragma unroll
      for (int k = 0; k < WriteTuning::kTileWordsInFlight; ++k) {
        const unsigned token = min(start + k * kTokensAbreast, tokens - 1);
        Store(tile.At(token, word * Codec::kStoredBytes), codec(FromWord<Plain>(held[k])));
      }
    }
  }
  if (threadIdx.x < kTokens) {
    slots->Set(threadIdx.x, slot < 0 ? -1 : blocks.OffsetOf(part.cache, slot), shape.aligned[second]);
  }
  __syncthreads();
  StoreColumns(tile, *slots, part.cache.data + head * part.cache.head_stride + first_element * part.cache.group_stride,
               part.cache.group_stride, elements);
}

// Tiles, and behind them the parts that are written by row.
template <class Codec, int kElementBytes>
__global__ void __launch_bounds__(WriteTuning::kThreads, ResidentCtas(Codec::kPackedCtas, WriteTuning::kThreads))
    WritePacked(const __grid_constant__ TokenWrite write, const __grid_constant__ TileShape tiles,
                const __grid_constant__ RowShape rows, BlockDivider blocks) {
  __shared__ __align__(16) std::uint8_t memory[kTileBytes<kElementBytes>];
  __shared__ TileSlots<kElementBytes> slots;
  if (blockIdx.x < tiles.ctas) {
    WriteTile<Codec, kElementBytes>(write, tiles, blocks, blockIdx.x, memory, &slots);
  } else {
    WriteByRow<Codec, kElementBytes, WriteTuning::kPackedRounds>(write, rows, blocks, blockIdx.x - tiles.ctas);
  }
}

// ---- the host's side ----

inline int StoredBytesOf(const TokenWrite& write) { return static_cast<int>(ElementBytes(write.stored)); }

inline bool IsOneRow(const TokenWrite& write, const TokenPart& part) {
  return part.cache.group_bytes >= part.head_size * StoredBytesOf(write);
}

// All that the addresses of the words of a row have in common: bits below the lowest one set are zero in each.
inline std::uint64_t AddressBits(const SourceRows& source) {
  return reinterpret_cast<std::uintptr_t>(source.data) | static_cast<std::uint64_t>(source.token_stride) |
         static_cast<std::uint64_t>(source.head_stride);
}
inline std::uint64_t AddressBits(const RowPlace& place) {
  return reinterpret_cast<std::uintptr_t>(place.data) | static_cast<std::uint64_t>(place.block_stride) |
         static_cast<std::uint64_t>(place.token_stride) | static_cast<std::uint64_t>(place.head_stride);
}

// Whether words of so many bytes lie in one piece in the cache, and aligned.
inline bool HoldsWords(const TokenWrite& write, const TokenPart& part, unsigned word_bytes) {
  std::uint64_t bits = AddressBits(part.cache);
  if (!IsOneRow(write, part)) bits |= static_cast<std::uint64_t>(part.cache.group_bytes | part.cache.group_stride);
  return bits % word_bytes == 0;
}

inline bool IsPackedValue(const TokenWrite& write, const TokenPart& part) {
  return !IsOneRow(write, part) && part.cache.group_bytes == StoredBytesOf(write) &&
         part.cache.token_stride == StoredBytesOf(write);
}

template <class Codec>
Status RowShapeOf(const TokenWrite& write, bool skip_packed_values, int multiprocessors, RowShape* shape) {
  using Tuning = WriteTuning;
  shape->neighbours = shape->words_of_group = 1;
  for (int p = 0; p < write.part_count; ++p) {
    const TokenPart& part = write.parts[p];
    if (!(skip_packed_values && IsPackedValue(write, part))) {
      const std::int64_t elements_of_word = Codec::kStoredBytes / StoredBytesOf(write);
      shape->words_of_row[p] = static_cast<unsigned>(part.head_size / elements_of_word);
      shape->source_word_stride[p] = elements_of_word * part.source.element_stride;
      shape->whole_words[p] = HoldsWords(write, part, Codec::kStoredBytes);
      shape->words_of_token += static_cast<unsigned>(part.heads) * shape->words_of_row[p];
      if (skip_packed_values && shape->whole_words[p] && !IsOneRow(write, part)) {
        shape->neighbours = Tuning::kNeighbours;
        shape->words_of_group = static_cast<unsigned>(part.cache.group_bytes / Codec::kStoredBytes);
      }
    }
    if (p == 0) shape->words_of_first_part = shape->words_of_token;
  }
  if (shape->words_of_token == 0) return {};
  if (Tuning::kWordsOfNeighbours % shape->words_of_group != 0) shape->neighbours = 1;
  const unsigned most_words = shape->neighbours > 1 ? Tuning::kWordsOfNeighbours : Tuning::kThreads;
  shape->ctas_of_token = (shape->words_of_token + most_words - 1) / most_words;
  shape->words_of_cta =
      shape->neighbours > 1 ? most_words : (shape->words_of_token + shape->ctas_of_token - 1) / shape->ctas_of_token;
  // As many tokens abreast as fill the CTA, but not so many that multiprocessors stay idle.
  const std::int64_t per_multiprocessor = (write.tokens * shape->ctas_of_token + multiprocessors - 1) / multiprocessors;
  const std::int64_t fitting = std::min(Tuning::kThreads / shape->words_of_cta, Tuning::kMostTokensAbreast);
  shape->tokens_abreast =
      static_cast<unsigned>(shape->neighbours > 1 ? fitting : std::min<std::int64_t>(fitting, per_multiprocessor));
  return {};
}

// The CTAs of a shape whose threads take so many tokens each.
inline std::int64_t RowCtas(const TokenWrite& write, const RowShape& shape, int rounds) {
  if (shape.words_of_token == 0) return 0;
  const std::int64_t tokens_of_cta = std::int64_t{shape.tokens_abreast} * rounds;
  return (write.tokens + tokens_of_cta - 1) / tokens_of_cta * shape.ctas_of_token;
}

inline Status CountMultiprocessors(const DeviceStream& where, int* count) {
  PADDLE_KV_CUDA(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, where.device));
  return {};
}

template <class Codec, int kElementBytes>
Status LaunchRows(const TokenWrite& write, const DeviceStream& where) {
  using Tuning = WriteTuning;
  int multiprocessors = 1;
  PADDLE_KV_RETURN_IF_ERROR(CountMultiprocessors(where, &multiprocessors));
  RowShape shape{};
  PADDLE_KV_RETURN_IF_ERROR(RowShapeOf<Codec>(write, false, multiprocessors, &shape));
  const std::int64_t single = RowCtas(write, shape, 1);
  if (single == 0) return {};
  const bool many = single >= std::int64_t{2} * Tuning::kCtasPerMultiprocessor * multiprocessors;
  const std::int64_t ctas = many ? RowCtas(write, shape, Tuning::kManyRounds) : single;
  if (ctas > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "WriteRows");
  const unsigned threads = (shape.words_of_cta * shape.tokens_abreast + 31) / 32 * 32;
  const auto kernel = many ? WriteRows<Codec, kElementBytes, Tuning::kManyRounds> : WriteRows<Codec, kElementBytes, 1>;
  kernel<<<static_cast<unsigned>(ctas), threads, 0, StreamOf(where)>>>(
      write, shape, BlockDividerOf(write.parts[0].cache.block_size, write.slots.limit));
  return LaunchStatus("WriteRows");
}

template <class Codec, int kElementBytes>
Status LaunchPacked(const TokenWrite& write, const DeviceStream& where) {
  using Tuning = WriteTuning;
  int multiprocessors = 1;
  PADDLE_KV_RETURN_IF_ERROR(CountMultiprocessors(where, &multiprocessors));
  constexpr std::int64_t kTokens = kTileTokens<kElementBytes>;
  const std::int64_t tiles_of_column = (write.tokens + kTokens - 1) / kTokens;
  std::int64_t row_elements = 0;
  for (int p = 0; p < write.part_count; ++p) {
    const TokenPart& part = write.parts[p];
    if (IsPackedValue(write, part)) row_elements += part.heads * part.head_size;
  }
  // Elements and pieces of rows that are stored to scattered slots at the same time hinder each other. Tiles come
  // first; where there are enough of them to take most places, rows come behind them.
  const std::int64_t tiles_of_multiprocessor =
      write.tokens < Tuning::kSomeTokens ? Tuning::kTileCtasPerMultiprocessor : Codec::kTileCtas;
  TileShape tiles{};
  tiles.elements_of_tile = kTileElements;
  while (tiles.elements_of_tile > Tuning::kFewestTileElements &&
         tiles_of_column * row_elements / tiles.elements_of_tile < tiles_of_multiprocessor * multiprocessors) {
    tiles.elements_of_tile /= 2;
  }
  for (int p = 0; p < write.part_count; ++p) {
    const TokenPart& part = write.parts[p];
    if (IsPackedValue(write, part)) {
      tiles.source_word_stride[p] = Codec::kStoredBytes / kElementBytes * part.source.element_stride;
      tiles.tiles_of_row[p] =
          static_cast<unsigned>((part.head_size + tiles.elements_of_tile - 1) / tiles.elements_of_tile);
      const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(part.cache.data) |
                                 static_cast<std::uint64_t>(part.cache.head_stride | part.cache.group_stride);
      tiles.aligned[p] = bits % 16 == 0;
      tiles.tiles_of_tokens += static_cast<unsigned>(part.heads) * tiles.tiles_of_row[p];
    }
    if (p == 0) tiles.tiles_of_first_part = tiles.tiles_of_tokens;
  }
  RowShape rows{};
  PADDLE_KV_RETURN_IF_ERROR(RowShapeOf<Codec>(write, true, multiprocessors, &rows));
  const std::int64_t tile_ctas = tiles_of_column * tiles.tiles_of_tokens;
  const std::int64_t ctas = tile_ctas + RowCtas(write, rows, Tuning::kPackedRounds);
  if (ctas > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "WritePacked");
  if (ctas == 0) return {};
  tiles.tiles_of_column = static_cast<unsigned>(tiles_of_column);
  tiles.by_column = write.tokens >= Tuning::kManyTokens;
  tiles.ctas = static_cast<unsigned>(tile_ctas);
  WritePacked<Codec, kElementBytes><<<static_cast<unsigned>(ctas), Tuning::kThreads, 0, StreamOf(where)>>>(
      write, tiles, rows, BlockDividerOf(write.parts[0].cache.block_size, write.slots.limit));
  return LaunchStatus("WritePacked");
}

// kElementBytes: of the cache.
template <class Codec, int kElementBytes>
Status Launch(const TokenWrite& write, const DeviceStream& where) {
  bool packed = false;
  for (int p = 0; p < write.part_count; ++p) packed = packed || IsPackedValue(write, write.parts[p]);
  return packed && write.tokens > WriteTuning::kFewTokens ? LaunchPacked<Codec, kElementBytes>(write, where)
                                                          : LaunchRows<Codec, kElementBytes>(write, where);
}

// Bits of all addresses and row lengths that must be multiples of a word of the source.
struct WordBits {
  std::uint64_t source = 0;
  std::uint64_t stored = 0;  // lengths of rows in the cache
  std::uint64_t cache = 0;   // addresses in a cache of contiguous rows
  bool dense = true;         // elements of the source lie side by side
};

inline WordBits WordBitsOf(const TokenWrite& write) {
  WordBits bits;
  for (int p = 0; p < write.part_count; ++p) {
    const TokenPart& part = write.parts[p];
    bits.dense = bits.dense && part.source.element_stride == ElementBytes(write.plain);
    bits.source |= AddressBits(part.source) | static_cast<std::uint64_t>(part.head_size * ElementBytes(write.plain));
    bits.stored |= static_cast<std::uint64_t>(part.head_size * StoredBytesOf(write));
    if (IsOneRow(write, part)) bits.cache |= AddressBits(part.cache);  // others are written by element where they must
  }
  return bits;
}

// Quantises element by element, in whatever formats.
Status WriteQuantizedSingly(const TokenWrite& write, const DeviceStream& where);

// Bytes of the cache from elements of `Source`, for each of the quantised formats.
template <class Source>
Status WriteQuantized(const TokenWrite& write, const DeviceStream& where) {
  const WordBits bits = WordBitsOf(write);
  constexpr int kElements = PlainWord<Source>::kElements;
  if (!bits.dense || bits.source % 16 != 0 || (bits.stored | bits.cache) % kElements != 0) {
    return WriteQuantizedSingly(write, where);
  }
  return DispatchQuantized(write.stored,
                           [&](auto format) { return Launch<Quantized<Source, decltype(format)>, 1>(write, where); });
}

extern template Status WriteQuantized<Float32>(const TokenWrite&, const DeviceStream&);
extern template Status WriteQuantized<Float16>(const TokenWrite&, const DeviceStream&);
extern template Status WriteQuantized<BFloat16>(const TokenWrite&, const DeviceStream&);

}  // namespace paddle_kv
