#include <cstring>

#include "paddle_kv/common/parallel_for.h"
#include "paddle_kv/swap/transfer_blocks.h"

namespace paddle_kv {

void TransferBlocksCpu(const BlockRows* tensors, std::int64_t tensor_count, const std::int64_t* source_ids,
                       const std::int64_t* target_ids, std::int64_t block_count) {
  for (std::int64_t t = 0; t < tensor_count; ++t) {
    const BlockRows& rows = tensors[t];
    ParallelFor(block_count, block_count * rows.block_bytes, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        std::memcpy(rows.target + target_ids[i] * rows.target_stride, rows.source + source_ids[i] * rows.source_stride,
                    rows.block_bytes);
      }
    });
  }
}

}  // namespace paddle_kv
