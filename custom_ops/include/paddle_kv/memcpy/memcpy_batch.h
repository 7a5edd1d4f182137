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

// Whether rows at equal distances are better moved by one strided copy than as pieces of a batch. Beside products that
// are bound by memory a copy of few rows takes some 6 us longer than they do among others: with those of four rows of
// 64 KiB and more, loads reached 40 GB/s on an H200, without them 52. A row of a batch takes 0.6 us of a thread and
// more.
inline bool IsForStridedCopy(std::int64_t rows, std::int64_t stride_bytes) {
  constexpr std::int64_t kFewestRows = 32;
  constexpr std::int64_t kLargestPitch = 0x7fffffff;
  return rows >= kFewestRows && stride_bytes <= kLargestPitch;
}

}  // namespace paddle_kv
