// The one core of the permute family: rows of bytes between chunks, which lie anywhere, and one dense tensor.
//
// Row (b, c, h, t) of block b, chunk c (one layer, key or value), head h and token t lies
//   among the chunks at  bases[b * bases_per_block + c] + block(b) * block_stride + h * head_stride + t * token_stride
//   in the dense tensor at   dense + b * block_stride + c * chunk_stride + h * head_stride + t * token_stride
// with strides in bytes. Every layout of the family is a choice of these strides.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

struct PermuteShape {
  std::int64_t blocks = 0;
  std::int64_t chunks = 0;  // of one block: layers times outer
  std::int64_t heads = 0;
  std::int64_t tokens = 0;
  std::int64_t row_bytes = 0;  // contiguous on both sides
};

// Block ids in device memory, read when the kernel runs: negative ones and those from `limit` on are skipped.
struct DeviceIds {
  const void* ids = nullptr;
  bool is_int64 = false;
  std::int64_t limit = 0;
};

struct ChunkSide {
  const std::int64_t* bases = nullptr;  // addresses as integers, in host memory
  std::int64_t base_count = 0;
  std::int64_t bases_per_block = 0;   // 0: all blocks share the bases and differ by block_stride alone
  const std::int64_t* ids = nullptr;  // block(b), in host memory; null: device_ids, or without them b itself
  DeviceIds device_ids;
  std::int64_t block_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};

struct DenseSide {
  std::uint8_t* base = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t chunk_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};

enum class PermuteDirection { kToDense = 0, kFromDense = 1 };

// Returns when the rows are copied. No two target rows overlap, and no target overlaps a source (the caller has
// checked). `device_ids` must be empty. Zero rows is success.
void PermuteChunksCpu(const PermuteShape& shape, const ChunkSide& chunks, const DenseSide& dense,
                      PermuteDirection direction);

// Enqueues; bases and ids are copied into the launches, so they may be freed on return. Memory is on the device or
// page-locked; `touches_host`: some of it is page-locked.
Status PermuteChunksCuda(const PermuteShape& shape, const ChunkSide& chunks, const DenseSide& dense,
                         PermuteDirection direction, bool touches_host, const DeviceStream& where);

// The same rows with as few and as long ones as the strides allow: tokens that follow each other on both sides become
// one row. If one token is left, the heads take its place, so that the last loop is the long one.
inline void MergeRows(PermuteShape* shape, ChunkSide* chunks, DenseSide* dense) {
  const auto fold_tokens = [&] {
    if (shape->tokens > 1 && chunks->token_stride == shape->row_bytes && dense->token_stride == shape->row_bytes) {
      shape->row_bytes *= shape->tokens;
      shape->tokens = 1;
    }
  };
  fold_tokens();
  if (shape->tokens == 1) {
    shape->tokens = shape->heads;
    chunks->token_stride = chunks->head_stride;
    dense->token_stride = dense->head_stride;
    shape->heads = 1;
    fold_tokens();
  }
}

}  // namespace paddle_kv
