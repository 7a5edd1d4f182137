#include <algorithm>

#include "paddle_kv/common/bulk_copy.h"
#include "paddle_kv/common/parallel_for.h"
#include "paddle_kv/swap/transfer_blocks.h"

namespace paddle_kv {

// The loop runs over the bytes of all tensors: many small ones are worth several threads together, and one large block
// is shared out too.
void TransferBlocksCpu(const BlockRows* tensors, std::int64_t tensor_count, const std::int64_t* source_ids,
                       const std::int64_t* target_ids, std::int64_t block_count) {
  std::int64_t total_bytes = 0;
  for (std::int64_t t = 0; t < tensor_count; ++t) total_bytes += block_count * tensors[t].block_bytes;
  const BulkCopy copy(total_bytes);
  ParallelFor(total_bytes, total_bytes, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < tensor_count && end > 0; ++t) {
      const BlockRows& rows = tensors[t];
      const std::int64_t tensor_bytes = block_count * rows.block_bytes;
      const std::int64_t stop = std::min(end, tensor_bytes);
      for (std::int64_t at = std::max<std::int64_t>(begin, 0); at < stop;) {
        const std::int64_t block = at / rows.block_bytes;
        const std::int64_t offset = at - block * rows.block_bytes;
        const std::int64_t bytes = std::min(rows.block_bytes - offset, stop - at);
        copy(rows.target + target_ids[block] * rows.target_stride + offset,
             rows.source + source_ids[block] * rows.source_stride + offset, bytes);
        at += bytes;
      }
      begin -= tensor_bytes;  // both count from the next tensor on
      end -= tensor_bytes;
    }
  });
}

}  // namespace paddle_kv
