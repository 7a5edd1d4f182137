#include "paddle_kv/transfer/piece_calls.h"

#include <algorithm>

#include "paddle_kv/memcpy/memcpy_batch.h"

namespace paddle_kv {

Status CopyPieces(const CopyPair* pieces, std::int64_t count, int device, cudaStream_t stream) {
  const DeviceStream where = {device, reinterpret_cast<std::int64_t>(stream)};
  for (std::int64_t first = 0; first < count; first += kPiecesPerCall) {
    const std::int64_t part = std::min(kPiecesPerCall, count - first);
    PADDLE_KV_RETURN_IF_ERROR(MemcpyBatchCuda(pieces + first, part, part > 1 && HasMemcpyBatchAsync(), where));
  }
  return {};
}

}  // namespace paddle_kv
