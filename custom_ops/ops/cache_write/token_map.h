// Block tables and cumulative lengths of the caller, checked.
#pragma once

#include "../common/paddle_api.h"
#include "cache_layout.h"
#include "paddle_kv/common/device_stream.h"

namespace paddle_kv {

enum class BlockUse { kRead, kWritten };

// block_table [sequences, blocks per sequence], cu_seq_lens [sequences + 1], int32 or int64, on the device of the
// cache; `starts`, where it is given, [sequences] likewise. With PADDLE_KV_CHECK=1 what they hold is read back and
// checked too: IndexError for a block beyond the cache and for a sequence longer than its row of the table, ValueError
// for lengths that decrease or end beyond `tokens`, and for a slot that would be written for two sequences. Not while
// the stream is captured into a CUDA graph.
TokenMap CheckTokenMap(const paddle::Tensor& block_table, const paddle::Tensor& cu_seq_lens,
                       const paddle::optional<paddle::Tensor>& starts, const paddle::Tensor& cache,
                       const CacheShape& shape, int64_t tokens, BlockUse use, const DeviceStream& where);

}  // namespace paddle_kv
