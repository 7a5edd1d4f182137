// A tile of tokens x elements in shared memory, that is filled along its lines and read across them: what turns the
// rows of tokens into the columns of a packed value cache, and back.
#pragma once

#include <cstdint>

#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {

// Packed values keep an element of neighbouring tokens side by side: the slots of so many tokens make an aligned word.
template <int kElementBytes>
constexpr unsigned kTokensOfWord = 16 / kElementBytes;

constexpr unsigned kTileElements = 128;
template <int kElementBytes>
constexpr unsigned kTileTokens = 128 / kElementBytes;
template <int kElementBytes>
constexpr unsigned kTileBytes = kTileElements * kTileTokens<kElementBytes> * kElementBytes;

// Turns 32-bit pieces of kLines lines into the pieces across them: across[e] holds element e of every line.
template <int kElementBytes, int kLines>
__device__ inline void Transpose(const std::uint32_t (&lines)[kLines],
                                 std::uint32_t (&across)[4 / kElementBytes][kLines * kElementBytes / 4]) {
  if constexpr (kElementBytes == 4) {
#pragma unroll
    for (int k = 0; k < kLines; ++k) across[0][k] = lines[k];
  } else if constexpr (kElementBytes == 2) {
#pragma unroll
    for (int k = 0; k < kLines; k += 2) {
      across[0][k / 2] = __byte_perm(lines[k], lines[k + 1], 0x5410);
      across[1][k / 2] = __byte_perm(lines[k], lines[k + 1], 0x7632);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kLines; k += 4) {
      const std::uint32_t low[2] = {__byte_perm(lines[k], lines[k + 1], 0x5140),
                                    __byte_perm(lines[k + 2], lines[k + 3], 0x5140)};
      const std::uint32_t high[2] = {__byte_perm(lines[k], lines[k + 1], 0x7362),
                                     __byte_perm(lines[k + 2], lines[k + 3], 0x7362)};
      across[0][k / 4] = __byte_perm(low[0], low[1], 0x5410);
      across[1][k / 4] = __byte_perm(low[0], low[1], 0x7632);
      across[2][k / 4] = __byte_perm(high[0], high[1], 0x5410);
      across[3][k / 4] = __byte_perm(high[0], high[1], 0x7632);
    }
  }
}

// Lines of kLineBytes, of which kLines at a time are read across. The 16-byte chunks of a line are permuted, so that
// those which eight lanes access at once lie in different banks: the same chunk of eight groups of lines where they are
// read across; where they are filled, eight chunks of a line, or 1, 2 or 4 of neighbouring lines.
template <int kElementBytes, int kLineBytes, int kLines>
struct TransposingTile {
  static_assert(kLineBytes % 128 == 0, "eight chunks are permuted among each other");
  static constexpr int kElements = 4 / kElementBytes;         // across which one read goes
  static constexpr int kPieces = kLines * kElementBytes / 4;  // of 32 bits, of each of them
  static constexpr unsigned kColumns = kLineBytes / 4;        // reads that cover a group of lines
  std::uint8_t* bytes;

  // `byte` is a multiple of the word that is stored there.
  __device__ std::uint8_t* At(unsigned line, unsigned byte) const {
    return bytes + line * kLineBytes + ((byte / 16 ^ line / kLines % 8 ^ Turn(line)) * 16 | byte % 16);
  }
  // Of a line among its kLines: three bits of its number, the lowest first.
  static __device__ constexpr unsigned Turn(unsigned line) {
    const unsigned number = line % (kLines < 8 ? kLines : 8);
    return (number & 1) << 2 | (number & 2) | (number & 4) >> 2;
  }

  // Elements column * kElements and on of the lines group * kLines and on.
  __device__ void Across(unsigned group, unsigned column, std::uint32_t (&across)[kElements][kPieces]) const {
    const auto first = static_cast<unsigned>(At(group * kLines, column * 4) - bytes);
    std::uint32_t lines[kLines];
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      lines[k] = *reinterpret_cast<const std::uint32_t*>(bytes + (first ^ Turn(k) * 16) + k * kLineBytes);
    }
    Transpose<kElementBytes, kLines>(lines, across);
  }
};

// One read of a warp: lanes take eight groups of lines and four columns, which share no bank.
struct WarpRead {
  unsigned group;
  unsigned column;

  __device__ WarpRead(unsigned read, unsigned columns) {
    const unsigned lane = threadIdx.x % 32;
    group = read / (columns / 4) * 8 + lane % 8;
    column = read % (columns / 4) * 4 + lane / 8;
  }
};

// ---- the side of a packed value cache ----

// Where the tokens of a tile lie: in each column of the cache at these byte offsets; -1: nowhere.
template <int kElementBytes>
struct TileSlots {
  static constexpr unsigned kTokens = kTileTokens<kElementBytes>;
  static constexpr unsigned kGroups = kTokens / kTokensOfWord<kElementBytes>;
  std::int64_t offsets[kTokens];
  std::int64_t joined[kGroups];  // of so many tokens, whose slots are one aligned word; else -1

  // By whole warps, thread t for token t. `aligned`: each column starts at a multiple of 16 bytes.
  __device__ void Set(unsigned token, std::int64_t offset, bool aligned) {
    constexpr unsigned kLanes = kTokensOfWord<kElementBytes>;
    const unsigned in_group = token % kLanes;
    const std::int64_t of_first = __shfl_sync(0xFFFFFFFFu, offset, static_cast<int>(threadIdx.x % 32 - in_group));
    const bool follows = of_first >= 0 && of_first % 16 == 0 && offset == of_first + in_group * kElementBytes;
    const std::uint32_t group_lanes = ((1u << kLanes) - 1) << (threadIdx.x % 32 - in_group);
    const std::uint32_t following = __ballot_sync(0xFFFFFFFFu, aligned && follows);
    offsets[token] = offset;
    if (in_group == 0) joined[token / kLanes] = (following & group_lanes) == group_lanes ? offset : -1;
  }
};

// Stores a tile whose lines are tokens into the columns of the cache, `elements` of them from `columns` on. Slots that
// make no word are stored one by one.
template <int kElementBytes, class Tile>
__device__ void StoreColumns(const Tile& tile, const TileSlots<kElementBytes>& slots, std::uint8_t* columns,
                             std::int64_t column_stride, unsigned elements) {
  using Element = typename WordOf<kElementBytes>::Type;
  constexpr unsigned kTokens = kTokensOfWord<kElementBytes>;
  for (unsigned read = threadIdx.x / 32; read < Tile::kColumns / 4; read += blockDim.x / 32) {
    const WarpRead place(read, Tile::kColumns);
    const unsigned first_element = place.column * Tile::kElements;
    const std::int64_t joined = slots.joined[place.group];
    if (first_element >= elements) continue;
    std::uint32_t across[Tile::kElements][Tile::kPieces];
    tile.Across(place.group, place.column, across);
#pragma unroll
    for (int e = 0; e < Tile::kElements; ++e) {
      if (first_element + e >= elements) break;
      std::uint8_t* const column = columns + (first_element + e) * column_stride;
      if (joined >= 0) {
        *reinterpret_cast<uint4*>(column + joined) = make_uint4(across[e][0], across[e][1], across[e][2], across[e][3]);
        continue;
      }
#pragma unroll
      for (unsigned k = 0; k < kTokens; ++k) {
        const std::int64_t offset = slots.offsets[place.group * kTokens + k];
        if (offset < 0) continue;
        *reinterpret_cast<Element*>(column + offset) =
            static_cast<Element>(across[e][k * kElementBytes / 4] >> (k * kElementBytes % 4 * 8));
      }
    }
  }
}

}  // namespace paddle_kv
