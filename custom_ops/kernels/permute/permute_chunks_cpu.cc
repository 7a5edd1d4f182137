#include <cstring>

#include "paddle_kv/common/parallel_for.h"
#include "paddle_kv/permute/permute_chunks.h"

namespace paddle_kv {

void PermuteChunksCpu(const PermuteShape& given_shape, const ChunkSide& given_chunks, const DenseSide& given_dense,
                      PermuteDirection direction) {
  PermuteShape shape = given_shape;
  ChunkSide chunks = given_chunks;
  DenseSide dense = given_dense;
  MergeRows(&shape, &chunks, &dense);
  const std::int64_t items = shape.blocks * shape.chunks * shape.heads;
  const auto copy_items = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t head = item % shape.heads;
      const std::int64_t chunk = item / shape.heads % shape.chunks;
      const std::int64_t block = item / shape.heads / shape.chunks;
      auto* in_chunk = reinterpret_cast<std::uint8_t*>(chunks.bases[block * chunks.bases_per_block + chunk]) +
                       (chunks.ids != nullptr ? chunks.ids[block] : block) * chunks.block_stride +
                       head * chunks.head_stride;
      std::uint8_t* in_dense =
          dense.base + block * dense.block_stride + chunk * dense.chunk_stride + head * dense.head_stride;
      for (std::int64_t token = 0; token < shape.tokens; ++token) {
        if (direction == PermuteDirection::kToDense) {
          std::memcpy(in_dense, in_chunk, shape.row_bytes);
        } else {
          std::memcpy(in_chunk, in_dense, shape.row_bytes);
        }
        in_chunk += chunks.token_stride;
        in_dense += dense.token_stride;
      }
    }
  };
  ParallelFor(items, items * shape.tokens * shape.row_bytes, copy_items);
}

}  // namespace paddle_kv
