// Rows between scattered chunks and one dense tensor.
//
// 1. Rows that follow each other on both sides are merged (MergeRows): heads-first chunks become long rows, operational
//    chunks one row each.
// 2. A work item is a tile of one chunk: several tokens of one head, or a piece of one long row. One warp copies it.
//    Heads vary fastest, so the warps of a CTA read and write neighbouring memory on both sides.
// 3. Each item takes the widest words that its own addresses allow. A lane walks through the words of a tile with two
//    counters, row and column: the only divisions are those that find the item.
// Addresses and block ids travel as kernel parameters where they fit, otherwise in a KernelTable.
#include "paddle_kv/permute/permute_chunks.h"

#include <algorithm>
#include <vector>

#include "paddle_kv/common/copy_bytes.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/kernel_parameters.cuh"
#include "paddle_kv/common/kernel_table.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr std::int64_t kTileBytes = 4 << 10;
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kHostLinkCtas =
      8;  // reaches the rate of the link; more only take bandwidth from a running model
  static constexpr int kWordsInFlight = 4;
};

constexpr int kWarpsPerCta = Tuning::kThreads / kWarpLanes;
constexpr int kInlineWords = 460;

struct Launch {
  PermuteShape shape;
  DenseSide dense;
  std::int64_t bases_per_block;
  std::int64_t chunk_block_stride;
  std::int64_t chunk_head_stride;
  std::int64_t chunk_token_stride;
  std::int64_t tile_tokens;
  std::int64_t tile_bytes;  // of one row: less than the row where it is cut
  std::int64_t tiles;       // of one head of one chunk
  std::int64_t row_pieces;  // of one row; 1 where a tile has whole rows
  std::int64_t items;
  DeviceIds device_ids;
  bool to_dense;
  bool has_ids;
  int id_position;            // of block ids among the words
  const std::int64_t* words;  // bases, then block ids; null: they are here
  std::int64_t inline_words[kInlineWords];
};
static_assert(sizeof(Launch) <= kSmallParameterBytes);

// Where a lane stands in the words of rows that lie a stride apart. A step is one warp of words further.
template <class Word>
struct RowCursor {
  std::uintptr_t address;
  std::int64_t step;
  std::int64_t wrap;  // on top of a step that passes the end of a row
  std::uint32_t column;

  __device__ RowCursor(const std::uint8_t* first, std::int64_t stride, std::uint32_t row_words, std::uint32_t lane) {
    const auto row = static_cast<std::int64_t>(lane / row_words);
    column = lane % row_words;
    address = reinterpret_cast<std::uintptr_t>(first) + row * stride + column * sizeof(Word);
    step = kWarpLanes / row_words * stride + kWarpLanes % row_words * sizeof(Word);
    wrap = stride - static_cast<std::int64_t>(row_words * sizeof(Word));
  }
  __device__ Word* word() const { return reinterpret_cast<Word*>(address); }
  __device__ void Advance(std::uint32_t row_words) {
    address += step;
    column += kWarpLanes % row_words;
    if (column >= row_words) {
      column -= row_words;
      address += wrap;
    }
  }
};

template <class Word>
__device__ void CopyRowWords(const std::uint8_t* source, std::uint8_t* target, std::int64_t source_stride,
                             std::int64_t target_stride, std::uint32_t rows, std::uint32_t row_words,
                             std::uint32_t lane) {
  RowCursor<Word> from(source, source_stride, row_words, lane);
  RowCursor<Word> to(target, target_stride, row_words, lane);
  const std::uint32_t words = rows * row_words;
  for (std::uint32_t i = lane; i < words; i += Tuning::kWordsInFlight * kWarpLanes) {
    Word held[Tuning::kWordsInFlight];
#pragma unroll
    for (int k = 0; k < Tuning::kWordsInFlight; ++k) {
      if (i + k * kWarpLanes < words) held[k] = __ldcs(from.word());
      from.Advance(row_words);
    }
#pragma unroll
    for (int k = 0; k < Tuning::kWordsInFlight; ++k) {
      if (i + k * kWarpLanes < words) __stcs(to.word(), held[k]);
      to.Advance(row_words);
    }
  }
}

__device__ void CopyRows(const std::uint8_t* source, std::uint8_t* target, std::int64_t source_stride,
                         std::int64_t target_stride, std::uint32_t rows, std::uint32_t row_bytes, std::uint32_t lane) {
  // Its low zero bits are those that all addresses of the tile have in common.
  const auto alignment =
      static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(source) | reinterpret_cast<std::uintptr_t>(target) |
                                 source_stride | target_stride | row_bytes);
  if (alignment % 16 == 0) {
    CopyRowWords<uint4>(source, target, source_stride, target_stride, rows, row_bytes / 16, lane);
  } else if (alignment % 8 == 0) {
    CopyRowWords<uint2>(source, target, source_stride, target_stride, rows, row_bytes / 8, lane);
  } else if (alignment % 4 == 0) {
    CopyRowWords<std::uint32_t>(source, target, source_stride, target_stride, rows, row_bytes / 4, lane);
  } else if (alignment % 2 == 0) {
    CopyRowWords<std::uint16_t>(source, target, source_stride, target_stride, rows, row_bytes / 2, lane);
  } else {
    CopyRowWords<std::uint8_t>(source, target, source_stride, target_stride, rows, row_bytes, lane);
  }
}

__device__ std::int64_t BlockId(const Launch& launch, const std::int64_t* words, std::int64_t block) {
  if (launch.has_ids) return words[launch.id_position + block];
  const DeviceIds& given = launch.device_ids;
  if (given.ids == nullptr) return block;
  const std::int64_t id = given.is_int64 ? static_cast<const std::int64_t*>(given.ids)[block]
                                         : static_cast<const std::int32_t*>(given.ids)[block];
  return id < given.limit ? id : -1;
}

struct Tile {
  const std::uint8_t* source;
  std::uint8_t* target;
  std::uint32_t rows;  // 0: nothing to copy
  std::uint32_t row_bytes;
};

__device__ Tile TileOf(const Launch& launch, const std::int64_t* words, std::int64_t item) {
  if (item >= launch.items) return {};
  const std::int64_t above_head = item / launch.shape.heads;
  const std::int64_t head = item - above_head * launch.shape.heads;
  const std::int64_t above_tile = above_head / launch.tiles;
  const std::int64_t tile = above_head - above_tile * launch.tiles;
  const std::int64_t block = above_tile / launch.shape.chunks;
  const std::int64_t chunk = above_tile - block * launch.shape.chunks;
  const std::int64_t id = BlockId(launch, words, block);
  if (id < 0) return {};

  const std::int64_t token = tile / launch.row_pieces * launch.tile_tokens;
  const std::int64_t offset = tile % launch.row_pieces * launch.tile_bytes;
  auto* in_chunk = reinterpret_cast<std::uint8_t*>(words[block * launch.bases_per_block + chunk]) +
                   id * launch.chunk_block_stride + head * launch.chunk_head_stride +
                   token * launch.chunk_token_stride + offset;
  std::uint8_t* in_dense = launch.dense.base + block * launch.dense.block_stride + chunk * launch.dense.chunk_stride +
                           head * launch.dense.head_stride + token * launch.dense.token_stride + offset;
  return {launch.to_dense ? in_chunk : in_dense, launch.to_dense ? in_dense : in_chunk,
          static_cast<std::uint32_t>(min(launch.tile_tokens, launch.shape.tokens - token)),
          static_cast<std::uint32_t>(min(launch.tile_bytes, launch.shape.row_bytes - offset))};
}

template <bool kOneRow>
__device__ void CopyTile(const Launch& launch, const Tile& tile, std::uint32_t lane) {
  if (tile.rows == 0) return;
  if constexpr (kOneRow) {
    CopyBytesWithWarp(tile.source, tile.target, tile.row_bytes, static_cast<int>(lane));
  } else {
    CopyRows(tile.source, tile.target, launch.to_dense ? launch.chunk_token_stride : launch.dense.token_stride,
             launch.to_dense ? launch.dense.token_stride : launch.chunk_token_stride, tile.rows, tile.row_bytes, lane);
  }
}

// kOneRow: each tile is one row or a piece of it, copied in the widest words that its two addresses agree on.
// kFewCtas: the grid is smaller than the work. The next tile is looked up before the copy of this one.
template <bool kOneRow, bool kFewCtas>
__global__ void __launch_bounds__(Tuning::kThreads) PermuteTiles(const __grid_constant__ Launch launch) {
  const std::uint32_t lane = threadIdx.x % kWarpLanes;
  const std::int64_t* words = launch.words != nullptr ? launch.words : launch.inline_words;
  std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerCta + threadIdx.x / kWarpLanes;
  if constexpr (kFewCtas) {
    const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarpsPerCta;
    Tile tile = TileOf(launch, words, item);
    for (; item < launch.items; item += warps) {
      const Tile next = TileOf(launch, words, item + warps);
      CopyTile<kOneRow>(launch, tile, lane);
      tile = next;
    }
  } else {
    CopyTile<kOneRow>(launch, TileOf(launch, words, item), lane);
  }
}

using Kernel = void (*)(Launch);

Kernel KernelFor(bool one_row, bool few_ctas) {
  if (few_ctas) return one_row ? PermuteTiles<true, true> : PermuteTiles<false, true>;
  return one_row ? PermuteTiles<true, false> : PermuteTiles<false, false>;
}

// How a head of a chunk is cut: whole rows while several fit into a tile, otherwise pieces of one row.
void CutIntoTiles(Launch* launch) {
  const PermuteShape& shape = launch->shape;
  const bool rows_are_long = shape.row_bytes > Tuning::kTileBytes;
  launch->tile_tokens = rows_are_long ? 1 : std::min(shape.tokens, Tuning::kTileBytes / shape.row_bytes);
  launch->tile_bytes = rows_are_long ? Tuning::kTileBytes : shape.row_bytes;
  launch->row_pieces = (shape.row_bytes + launch->tile_bytes - 1) / launch->tile_bytes;
  launch->tiles = (shape.tokens + launch->tile_tokens - 1) / launch->tile_tokens * launch->row_pieces;
  launch->items = shape.blocks * shape.chunks * shape.heads * launch->tiles;
}

}  // namespace

Status PermuteChunksCuda(const PermuteShape& given_shape, const ChunkSide& given_chunks, const DenseSide& given_dense,
                         PermuteDirection direction, bool touches_host, const DeviceStream& where) {
  Launch launch{};
  launch.shape = given_shape;
  launch.dense = given_dense;
  ChunkSide chunks = given_chunks;
  MergeRows(&launch.shape, &chunks, &launch.dense);
  const PermuteShape& shape = launch.shape;
  if (shape.blocks == 0 || shape.chunks == 0 || shape.heads == 0 || shape.tokens == 0 || shape.row_bytes == 0)
    return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());

  launch.bases_per_block = chunks.bases_per_block;
  launch.chunk_block_stride = chunks.block_stride;
  launch.chunk_head_stride = chunks.head_stride;
  launch.chunk_token_stride = chunks.token_stride;
  launch.device_ids = chunks.device_ids;
  launch.to_dense = direction == PermuteDirection::kToDense;
  launch.has_ids = chunks.ids != nullptr;
  launch.id_position = static_cast<int>(chunks.base_count);
  CutIntoTiles(&launch);

  std::vector<std::int64_t> words(chunks.bases, chunks.bases + chunks.base_count);
  if (launch.has_ids) words.insert(words.end(), chunks.ids, chunks.ids + shape.blocks);
  KernelTable table;
  if (words.size() <= kInlineWords) {
    std::copy(words.begin(), words.end(), launch.inline_words);
  } else {
    PADDLE_KV_RETURN_IF_ERROR(table.Store(words, touches_host, where));
    launch.words = table.rows<std::int64_t>();
  }

  const std::int64_t whole_grid = (launch.items + kWarpsPerCta - 1) / kWarpsPerCta;
  const std::int64_t grid = std::min(whole_grid, touches_host ? Tuning::kHostLinkCtas : kLargestGrid);
  KernelFor(launch.tile_tokens == 1, grid < whole_grid)<<<grid, Tuning::kThreads, 0, StreamOf(where)>>>(launch);
  return LaunchStatus("PermuteTiles");
}

}  // namespace paddle_kv
