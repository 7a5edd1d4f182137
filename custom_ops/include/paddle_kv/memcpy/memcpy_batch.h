// Copies a list of pieces of memory with the copy engine.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/memcpy/copy_pair.h"

namespace paddle_kv {

// Whether the driver has cudaMemcpyBatchAsync (CUDA 12.8 and later). Never fails.
bool HasMemcpyBatchAsync();

// Enqueues one copy for each pair; all arguments may be freed on return. `batched`: as few calls of
// cudaMemcpyBatchAsync as possible, which needs HasMemcpyBatchAsync(). Where that call is not allowed, on the legacy
// default stream and while a graph is captured, the pairs are copied one by one all the same.
Status MemcpyBatchCuda(const CopyPair* pairs, std::int64_t pair_count, bool batched, const DeviceStream& where);

}  // namespace paddle_kv
