// Writes new tokens into block caches.
//
// WriteRows: the row of a head is contiguous in the cache (HND, NHD, latent). A thread owns one word of a token (part,
//   head, position) and carries it over a few tokens, so the arithmetic of finding it is done once; the words of these
//   tokens are in flight together, and the slots are read while they are.
// WriteTiles: the row is cut into groups that lie apart, and neighbours in memory are tokens (packed). A tile of 64
//   tokens x 256 bytes of one head is turned in shared memory: read along rows, written along tokens. Where 16 bytes of
//   one group of neighbours belong to consecutive slots they are stored as one word.
// One launch serves all parts. Tokens are never in grid.y.
#include "paddle_kv/cache_write/write_tokens.h"

#include <algorithm>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/quantize.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr int kThreads = 256;
  static constexpr int kTokensInFlight = 4;         // of one thread of WriteRows
  static constexpr int kCtasPerMultiprocessor = 8;  // fewer than that, and a CTA takes one token at a time
  static constexpr int kTileTokens = 64;
  static constexpr int kTileWordsInFlight = 4;  // of one thread: a whole tile of 16-byte words
  static constexpr int kTileBytes = 256;        // of the cache, in each token
};

constexpr std::int64_t kLargestGrid = (std::int64_t{1} << 31) - 1;

// Where a slot lies, without a 64-bit division in the usual cases.
struct SlotOffset {
  std::int64_t block_size;
  int shift;    // block size is 1 << shift; -1 otherwise
  bool narrow;  // slots fit in 32 bits

  __device__ std::int64_t In(const RowPlace& place, std::int64_t slot) const {
    std::int64_t block;
    if (shift >= 0) {
      block = slot >> shift;
    } else if (narrow) {
      block = static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(block_size);
    } else {
      block = slot / block_size;
    }
    return block * place.block_stride + (slot - block * block_size) * place.token_stride;
  }
};

SlotOffset SlotOffsetOf(const TokenWrite& write) {
  SlotOffset offset{write.parts[0].cache.block_size, -1, write.slots.limit <= (std::int64_t{1} << 32)};
  for (int shift = 0; shift < 31; ++shift) {
    if (offset.block_size == std::int64_t{1} << shift) offset.shift = shift;
  }
  return offset;
}

// What becomes of a word on its way. Plain: the word in the source, Stored: in the cache.
template <int kBytes>
struct Copied {
  using Plain = typename WordOf<kBytes>::Type;
  using Stored = Plain;
  static constexpr int kStoredBytes = kBytes;
  __device__ explicit Copied(float) {}
  __device__ Stored operator()(const Plain& word) const { return word; }
};

template <class Source, class Format>
struct Quantized {
  using Plain = PlainWord<Source>;
  using Stored = CodeWord<Source>;
  static constexpr int kStoredBytes = PlainWord<Source>::kElements;
  ScaleDivider divider;
  __device__ explicit Quantized(float scale) : divider(scale) {}
  __device__ Stored operator()(const Plain& word) const { return QuantizeWord<Source, Format>(word, divider); }
};

template <class Source, class Format>
struct QuantizedSingly {
  using Plain = typename Source::Bits;
  using Stored = std::uint8_t;
  static constexpr int kStoredBytes = 1;
  float scale;
  __device__ explicit QuantizedSingly(float value) : scale(value) {}
  __device__ Stored operator()(Plain bits) const { return Format::Quantize(Source::ToFloat(bits), scale); }
};

template <class Value>
__device__ void Store(void* address, const Value& value) {
  using Word = typename WordOf<sizeof(Value)>::Type;
  Word word;
  memcpy(&word, &value, sizeof(word));
  *static_cast<Word*>(address) = word;  // not streaming: attention reads it next
}

struct RowShape {
  std::int64_t source_word_stride[kMostParts];
  unsigned words_of_row[kMostParts];
  unsigned words_of_first_part;
  unsigned words_of_token;
  unsigned words_of_cta;  // that many of one token, the token's others go to neighbouring CTAs
  unsigned ctas_of_token;
  unsigned tokens_abreast;  // of one CTA
  unsigned rounds;          // tokens of one thread, at most kTokensInFlight
};

template <class Codec>
__global__ void __launch_bounds__(Tuning::kThreads)
    WriteRows(const __grid_constant__ TokenWrite write, const __grid_constant__ RowShape shape, SlotOffset offset) {
  using Plain = typename Codec::Plain;
  const unsigned abreast = threadIdx.x / shape.words_of_cta;
  unsigned word = blockIdx.x % shape.ctas_of_token * shape.words_of_cta + threadIdx.x % shape.words_of_cta;
  if (abreast >= shape.tokens_abreast || word >= shape.words_of_token) return;
  const bool second = word >= shape.words_of_first_part;
  if (second) word -= shape.words_of_first_part;
  const TokenPart& part = write.parts[second];
  const unsigned words_of_row = shape.words_of_row[second];
  const unsigned head = word / words_of_row;
  word -= head * words_of_row;

  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x / shape.ctas_of_token) * shape.tokens_abreast * shape.rounds + abreast;
  const std::uint8_t* source = part.source.data + first * part.source.token_stride + head * part.source.head_stride +
                               word * shape.source_word_stride[second];
  std::uint8_t* const target = part.cache.data + head * part.cache.head_stride + word * Codec::kStoredBytes;
  Plain held[Tuning::kTokensInFlight];
  std::int64_t slots[Tuning::kTokensInFlight];
#pragma unroll
  for (int k = 0; k < Tuning::kTokensInFlight; ++k) {
    const std::int64_t token = first + k * shape.tokens_abreast;
    slots[k] = -1;
    if (k >= shape.rounds || token >= write.tokens) continue;
    slots[k] = write.slots.Of(token);
    held[k] = LoadStreaming<Plain>(source + k * shape.tokens_abreast * part.source.token_stride);
  }
  const Codec codec(part.scale.Of(head));
#pragma unroll
  for (int k = 0; k < Tuning::kTokensInFlight; ++k) {
    if (slots[k] >= 0) Store(target + offset.In(part.cache, slots[k]), codec(held[k]));
  }
}

struct TileShape {
  std::int64_t source_word_stride[kMostParts];
  unsigned words_of_row[kMostParts];
  unsigned tiles_of_row[kMostParts];
  unsigned unit_bytes[kMostParts];      // what is contiguous and aligned in the cache
  unsigned tokens_of_word[kMostParts];  // whose units make 16 bytes when their slots are consecutive; 1: never joined
  unsigned tiles_of_first_part;
  unsigned tiles_of_tokens;  // all tiles of the same tokens
};

// Shared memory of a tile: rows of 16 chunks of 16 bytes. A row's chunks are permuted so that a warp that walks along
// tokens meets different banks.
struct Tile {
  std::uint8_t* bytes;
  unsigned tokens_of_word;

  __device__ std::uint8_t* At(unsigned token, unsigned byte) const {
    const unsigned chunk = byte / 16 ^ (token / tokens_of_word & 7);
    return bytes + token * Tuning::kTileBytes + chunk * 16 + byte % 16;
  }
};

// Byte offset in the cache of byte `byte` of a row.
__device__ std::int64_t OffsetInRow(const RowPlace& place, unsigned byte) {
  const auto group_bytes = static_cast<unsigned>(place.group_bytes);
  return byte / group_bytes * place.group_stride + byte % group_bytes;
}

template <class Unit>
__device__ void StoreUnits(const Tile& tile, const std::int64_t* offsets, std::uint8_t* target, const RowPlace& place,
                           unsigned tokens, unsigned first_byte, unsigned bytes) {
  const unsigned units = bytes / sizeof(Unit);
  for (unsigned i = threadIdx.x; i < units * Tuning::kTileTokens; i += Tuning::kThreads) {
    const unsigned token = i % Tuning::kTileTokens;
    const unsigned byte = i / Tuning::kTileTokens * sizeof(Unit);
    if (token >= tokens || offsets[token] < 0) continue;
    Unit unit;
    memcpy(&unit, tile.At(token, byte), sizeof(unit));
    Store(target + offsets[token] + OffsetInRow(place, first_byte + byte), unit);
  }
}

// As StoreUnits, but where the units of neighbouring tokens make an aligned word of 16 bytes they are stored as one.
template <class Unit>
__device__ void StoreWords(const Tile& tile, const std::int64_t* offsets, const bool* joined, std::uint8_t* target,
                           const RowPlace& place, unsigned tokens, unsigned first_byte, unsigned bytes) {
  constexpr unsigned kTokens = 16 / sizeof(Unit);
  constexpr unsigned kGroups = Tuning::kTileTokens / kTokens;
  const unsigned units = bytes / sizeof(Unit);
  for (unsigned i = threadIdx.x; i < units * kGroups; i += Tuning::kThreads) {
    const unsigned group = i % kGroups;
    const unsigned byte = i / kGroups * sizeof(Unit);
    const unsigned first = group * kTokens;
    std::uint8_t* const column = target + OffsetInRow(place, first_byte + byte);
    struct alignas(16) {
      Unit units[kTokens];
    } word;
#pragma unroll
    for (unsigned k = 0; k < kTokens; ++k) memcpy(&word.units[k], tile.At(first + k, byte), sizeof(Unit));
    if (joined[group]) {
      Store(column + offsets[first], word);
      continue;
    }
#pragma unroll
    for (unsigned k = 0; k < kTokens; ++k) {
      if (first + k < tokens && offsets[first + k] >= 0) Store(column + offsets[first + k], word.units[k]);
    }
  }
}

template <class Codec>
__global__ void __launch_bounds__(Tuning::kThreads)
    WriteTiles(const __grid_constant__ TokenWrite write, const __grid_constant__ TileShape shape, SlotOffset offset) {
  using Plain = typename Codec::Plain;
  constexpr int kTokens = Tuning::kTileTokens;
  constexpr unsigned kMostWords = Tuning::kTileBytes / Codec::kStoredBytes;
  __shared__ __align__(16) std::uint8_t memory[kTokens * Tuning::kTileBytes];
  __shared__ std::int64_t offsets[kTokens];
  __shared__ bool joined[kTokens];

  unsigned tile_index = blockIdx.x % shape.tiles_of_tokens;
  const bool second = tile_index >= shape.tiles_of_first_part;
  if (second) tile_index -= shape.tiles_of_first_part;
  const TokenPart& part = write.parts[second];
  const unsigned head = tile_index / shape.tiles_of_row[second];
  const unsigned first_word = tile_index % shape.tiles_of_row[second] * kMostWords;
  const unsigned words = min(kMostWords, shape.words_of_row[second] - first_word);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x / shape.tiles_of_tokens) * kTokens;
  const std::int64_t left = write.tokens - first;
  const unsigned tokens = left < kTokens ? static_cast<unsigned>(left) : kTokens;
  const Tile tile{memory, shape.tokens_of_word[second]};
  std::uint8_t* const target = part.cache.data + head * part.cache.head_stride;

  if (threadIdx.x < kTokens) {
    const std::int64_t slot = threadIdx.x < tokens ? write.slots.Of(first + threadIdx.x) : -1;
    offsets[threadIdx.x] = slot < 0 ? -1 : offset.In(part.cache, slot);
  }
  const Codec codec(part.scale.Of(head));
  const std::uint8_t* const source = part.source.data + first * part.source.token_stride +
                                     head * part.source.head_stride + first_word * shape.source_word_stride[second];
  for (unsigned start = threadIdx.x; start < tokens * words; start += Tuning::kThreads * Tuning::kTileWordsInFlight) {
    Plain held[Tuning::kTileWordsInFlight];
    std::uint8_t* places[Tuning::kTileWordsInFlight];
#pragma unroll
    for (int k = 0; k < Tuning::kTileWordsInFlight; ++k) {
      const unsigned i = start + k * Tuning::kThreads;
      places[k] = nullptr;
      if (i >= tokens * words) continue;
      const unsigned token = i / words;
      const unsigned word = i - token * words;
      held[k] =
          LoadStreaming<Plain>(source + token * part.source.token_stride + word * shape.source_word_stride[second]);
      places[k] = tile.At(token, word * Codec::kStoredBytes);
    }
#pragma unroll
    for (int k = 0; k < Tuning::kTileWordsInFlight; ++k) {
      if (places[k] != nullptr) Store(places[k], codec(held[k]));
    }
  }
  __syncthreads();
  const unsigned tokens_of_word = shape.tokens_of_word[second];
  if (tokens_of_word > 1) {
    if (threadIdx.x < kTokens / tokens_of_word) {
      const unsigned start = threadIdx.x * tokens_of_word;
      const std::int64_t offset_of_first = offsets[start];
      bool consecutive = offset_of_first >= 0 && (reinterpret_cast<std::uintptr_t>(target) + offset_of_first) % 16 == 0;
      for (unsigned k = 1; k < tokens_of_word; ++k) {
        consecutive = consecutive && offsets[start + k] == offset_of_first + k * shape.unit_bytes[second];
      }
      joined[threadIdx.x] = consecutive;
    }
    __syncthreads();
  }
  const unsigned first_byte = first_word * Codec::kStoredBytes;
  const unsigned bytes = words * Codec::kStoredBytes;
  const auto store_words = [&](auto unit) {
    StoreWords<decltype(unit)>(tile, offsets, joined, target, part.cache, tokens, first_byte, bytes);
  };
  const auto store_units = [&](auto unit) {
    StoreUnits<decltype(unit)>(tile, offsets, target, part.cache, tokens, first_byte, bytes);
  };
  const bool join = tokens_of_word > 1;
  switch (shape.unit_bytes[second]) {
    case 16:
      return store_units(uint4{});
    case 8:
      return join ? store_words(uint2{}) : store_units(uint2{});
    case 4:
      return join ? store_words(std::uint32_t{}) : store_units(std::uint32_t{});
    case 2:
      return join ? store_words(std::uint16_t{}) : store_units(std::uint16_t{});
    default:
      return join ? store_words(std::uint8_t{}) : store_units(std::uint8_t{});
  }
}

// ---- the host's side ----

int StoredBytesOf(const TokenWrite& write) { return static_cast<int>(ElementBytes(write.stored)); }

bool IsOneRow(const TokenWrite& write, const TokenPart& part) {
  return part.cache.group_bytes >= part.head_size * StoredBytesOf(write);
}

// All that the addresses of the words of a row have in common: bits below the lowest one set are zero in each.
std::uint64_t AddressBits(const SourceRows& source) {
  return reinterpret_cast<std::uintptr_t>(source.data) | static_cast<std::uint64_t>(source.token_stride) |
         static_cast<std::uint64_t>(source.head_stride);
}
std::uint64_t AddressBits(const RowPlace& place) {
  return reinterpret_cast<std::uintptr_t>(place.data) | static_cast<std::uint64_t>(place.block_stride) |
         static_cast<std::uint64_t>(place.token_stride) | static_cast<std::uint64_t>(place.head_stride);
}

// Heads that lie side by side on both sides are one long row. Strides of dimensions of size 1 mean nothing: they must
// not decide about alignment.
void JoinHeads(const TokenWrite& write, TokenPart* part) {
  if (write.tokens == 1) part->source.token_stride = 0;
  if (part->heads == 1) part->source.head_stride = part->cache.head_stride = 0;
  const std::int64_t source_bytes = part->head_size * ElementBytes(write.plain);
  const std::int64_t stored_bytes = part->head_size * ElementBytes(write.stored);
  const bool one_scale = part->scale.pointer == nullptr || part->scale.stride_per_head == 0;
  if (part->source.element_stride != ElementBytes(write.plain) || part->source.head_stride != source_bytes ||
      part->cache.head_stride != stored_bytes || !one_scale || !IsOneRow(write, *part)) {
    return;
  }
  part->head_size *= part->heads;
  part->cache.group_bytes = stored_bytes * part->heads;
  part->heads = 1;
  part->source.head_stride = part->cache.head_stride = 0;
}

int MultiprocessorCount(int device, Status* status) {
  int count = 1;
  *status = ToStatus(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

template <class Codec>
Status LaunchRows(const TokenWrite& write, const DeviceStream& where) {
  RowShape shape{};
  for (int p = 0; p < write.part_count; ++p) {
    const TokenPart& part = write.parts[p];
    const std::int64_t elements_of_word = Codec::kStoredBytes / StoredBytesOf(write);
    shape.words_of_row[p] = static_cast<unsigned>(part.head_size / elements_of_word);
    shape.source_word_stride[p] = elements_of_word * part.source.element_stride;
    shape.words_of_token += static_cast<unsigned>(part.heads) * shape.words_of_row[p];
    if (p == 0) shape.words_of_first_part = shape.words_of_token;
  }
  if (shape.words_of_token == 0) return {};
  Status status;
  const std::int64_t multiprocessors = MultiprocessorCount(where.device, &status);
  PADDLE_KV_RETURN_IF_ERROR(status);
  shape.ctas_of_token = (shape.words_of_token + Tuning::kThreads - 1) / Tuning::kThreads;
  shape.words_of_cta = (shape.words_of_token + shape.ctas_of_token - 1) / shape.ctas_of_token;
  const std::int64_t full = multiprocessors * Tuning::kCtasPerMultiprocessor;
  // As many tokens abreast as fill the CTA, but not so many that multiprocessors stay idle.
  const std::int64_t per_multiprocessor = (write.tokens * shape.ctas_of_token + multiprocessors - 1) / multiprocessors;
  shape.tokens_abreast =
      static_cast<unsigned>(std::min<std::int64_t>(Tuning::kThreads / shape.words_of_cta, per_multiprocessor));
  const std::int64_t single = (write.tokens + shape.tokens_abreast - 1) / shape.tokens_abreast * shape.ctas_of_token;
  shape.rounds = static_cast<unsigned>(std::clamp<std::int64_t>(single / full, 1, Tuning::kTokensInFlight));
  const std::int64_t tokens_of_cta = std::int64_t{shape.tokens_abreast} * shape.rounds;
  const std::int64_t grid = (write.tokens + tokens_of_cta - 1) / tokens_of_cta * shape.ctas_of_token;
  if (grid > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "WriteRows");
  const unsigned threads = (shape.words_of_cta * shape.tokens_abreast + 31) / 32 * 32;
  WriteRows<Codec><<<static_cast<unsigned>(grid), threads, 0, StreamOf(where)>>>(write, shape, SlotOffsetOf(write));
  return LaunchStatus("WriteRows");
}

// The widest unit in which a row can be written: it divides a group, and all addresses of the cache are multiples of
// it.
unsigned UnitBytes(const RowPlace& place, std::int64_t row_bytes) {
  std::uint64_t bits = AddressBits(place) | static_cast<std::uint64_t>(row_bytes) | 16;
  if (place.group_bytes < row_bytes) bits |= static_cast<std::uint64_t>(place.group_bytes | place.group_stride);
  return static_cast<unsigned>(bits & (~bits + 1));
}

template <class Codec>
Status LaunchTiles(const TokenWrite& write, const DeviceStream& where) {
  TileShape shape{};
  for (int p = 0; p < write.part_count; ++p) {
    const TokenPart& part = write.parts[p];
    const RowPlace& place = part.cache;
    const std::int64_t elements_of_word = Codec::kStoredBytes / StoredBytesOf(write);
    constexpr unsigned kMostWords = Tuning::kTileBytes / Codec::kStoredBytes;
    shape.words_of_row[p] = static_cast<unsigned>(part.head_size / elements_of_word);
    shape.tiles_of_row[p] = (shape.words_of_row[p] + kMostWords - 1) / kMostWords;
    shape.source_word_stride[p] = elements_of_word * part.source.element_stride;
    const std::int64_t row_bytes = part.head_size * StoredBytesOf(write);
    shape.unit_bytes[p] = UnitBytes(place, row_bytes);
    const bool neighbours = place.token_stride == shape.unit_bytes[p] && place.group_bytes == shape.unit_bytes[p] &&
                            place.group_stride % 16 == 0;
    shape.tokens_of_word[p] = neighbours ? 16 / shape.unit_bytes[p] : 1;
    shape.tiles_of_tokens += static_cast<unsigned>(part.heads) * shape.tiles_of_row[p];
    if (p == 0) shape.tiles_of_first_part = shape.tiles_of_tokens;
  }
  const std::int64_t grid = (write.tokens + Tuning::kTileTokens - 1) / Tuning::kTileTokens * shape.tiles_of_tokens;
  if (grid == 0) return {};
  if (grid > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "WriteTiles");
  WriteTiles<Codec>
      <<<static_cast<unsigned>(grid), Tuning::kThreads, 0, StreamOf(where)>>>(write, shape, SlotOffsetOf(write));
  return LaunchStatus("WriteTiles");
}

template <class Codec>
Status Launch(const TokenWrite& write, bool rows, const DeviceStream& where) {
  return rows ? LaunchRows<Codec>(write, where) : LaunchTiles<Codec>(write, where);
}

// Bits of all addresses and row lengths that must be multiples of a word of the source, and of one of the cache.
struct WordBits {
  std::uint64_t source = 0;
  std::uint64_t cache = 0;
  bool dense = true;  // elements of the source lie side by side
};

WordBits WordBitsOf(const TokenWrite& write, bool rows) {
  WordBits bits;
  for (int p = 0; p < write.part_count; ++p) {
    const TokenPart& part = write.parts[p];
    bits.dense = bits.dense && part.source.element_stride == ElementBytes(write.plain);
    bits.source |= AddressBits(part.source) | static_cast<std::uint64_t>(part.head_size * ElementBytes(write.plain));
    bits.cache |= static_cast<std::uint64_t>(part.head_size * StoredBytesOf(write));
    if (rows) bits.cache |= AddressBits(part.cache);  // tiles have words of their own on the side of the cache
  }
  return bits;
}

Status LaunchCopy(const TokenWrite& write, bool rows, const DeviceStream& where) {
  const WordBits bits = WordBitsOf(write, rows);
  const std::uint64_t all = bits.source | bits.cache;
  if (bits.dense && all % 16 == 0) return Launch<Copied<16>>(write, rows, where);
  if (bits.dense && all % 8 == 0) return Launch<Copied<8>>(write, rows, where);
  const bool pairs = bits.dense && all % 4 == 0;
  if (pairs || ElementBytes(write.plain) == 4) return Launch<Copied<4>>(write, rows, where);
  return Launch<Copied<2>>(write, rows, where);
}

Status LaunchQuantize(const TokenWrite& write, bool rows, const DeviceStream& where) {
  const WordBits bits = WordBitsOf(write, rows);
  return DispatchPlain(write.plain, [&](auto source) {
    return DispatchQuantized(write.stored, [&](auto format) {
      using Source = decltype(source);
      using Format = decltype(format);
      constexpr int kElements = PlainWord<Source>::kElements;
      return bits.dense && bits.source % 16 == 0 && bits.cache % kElements == 0
                 ? Launch<Quantized<Source, Format>>(write, rows, where)
                 : Launch<QuantizedSingly<Source, Format>>(write, rows, where);
    });
  });
}

}  // namespace

Status WriteTokensCuda(const TokenWrite& write, const DeviceStream& where) {
  if (write.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  TokenWrite joined = write;
  bool rows = true;
  for (int p = 0; p < joined.part_count; ++p) {
    JoinHeads(write, &joined.parts[p]);
    rows = rows && IsOneRow(joined, joined.parts[p]);
  }
  return write.plain == write.stored ? LaunchCopy(joined, rows, where) : LaunchQuantize(joined, rows, where);
}

}  // namespace paddle_kv
