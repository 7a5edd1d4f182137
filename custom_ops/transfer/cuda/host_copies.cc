#include "paddle_kv/transfer/host_copies.h"

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/memcpy/memcpy_batch.h"
#include "paddle_kv/transfer/piece_calls.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kFewestOfAThread = 128;  // pieces: with fewer a second thread would wake too late
constexpr std::int64_t kSmallPiece = 43 << 10;  // which the link moves sooner than one thread describes it

// Calls use(part, row, first pair, how many follow each other on the host), until one fails.
template <class Use>
Status ForEachRun(const Packed& packed, const Fill& fill, Use use) {
  for (std::size_t p = fill.first_part; p < fill.end_part; ++p) {
    const Part& part = packed.parts[p];
    const Pair* const pairs = &packed.pairs[part.first_pair];
    for (std::int64_t first = 0, next = 1; first < part.pair_count; first = next++) {
      while (next < part.pair_count && pairs[next].host == pairs[next - 1].host + 1) ++next;
      PADDLE_KV_RETURN_IF_ERROR(use(part, packed.rows[part.row].row, first, next - first));
    }
  }
  return {};
}

// All blocks of a run by one call.
bool IsOneCall(const HostRow& row, std::int64_t count) {
  return row.IsDense() || IsForStridedCopy(count, row.host_stride);
}

}  // namespace

bool HostCopies::AreMany(const Packed& packed, const Fill& fill) {
  std::int64_t pieces = 0;
  std::int64_t bytes = 0;
  ForEachRun(packed, fill, [&](const Part&, const HostRow& row, std::int64_t, std::int64_t count) {
    pieces += IsOneCall(row, count) ? 1 : count;
    bytes += row.bytes * count;
    return Status{};
  });
  return pieces >= kFewestOfAThread && bytes < pieces * kSmallPiece;
}

Status HostCopies::Enqueue(const Packed& packed, const Fill& fill, std::uint8_t* slot, bool to_host, int device,
                           cudaStream_t stream) {
  pieces_.clear();
  PADDLE_KV_RETURN_IF_ERROR(
      ForEachRun(packed, fill, [&](const Part& part, const HostRow& row, std::int64_t first, std::int64_t count) {
        std::uint8_t* const host = row.host + packed.pairs[part.first_pair + first].host * row.host_stride;
        return AddRows(row, slot + part.slot_offset + first * row.bytes, host, count, to_host, stream);
      }));
  return CopyPieces(pieces_.data(), static_cast<std::int64_t>(pieces_.size()), device, stream);
}

// Rows of neighbouring blocks.
Status HostCopies::AddRows(const HostRow& row, std::uint8_t* staged, std::uint8_t* host, std::int64_t count,
                           bool to_host, cudaStream_t stream) {
  const auto add = [&](std::uint8_t* in_slot, std::uint8_t* on_host, std::int64_t bytes) {
    pieces_.push_back(to_host ? CopyPair{in_slot, on_host, bytes} : CopyPair{on_host, in_slot, bytes});
  };
  if (row.IsDense()) {
    add(staged, host, count * row.bytes);
  } else if (IsOneCall(row, count)) {
    PADDLE_KV_CUDA(cudaMemcpy2DAsync(to_host ? host : staged, to_host ? row.host_stride : row.bytes,
                                     to_host ? staged : host, to_host ? row.bytes : row.host_stride, row.bytes, count,
                                     cudaMemcpyDefault, stream));
  } else {
    for (std::int64_t i = 0; i < count; ++i) add(staged + i * row.bytes, host + i * row.host_stride, row.bytes);
  }
  return {};
}

}  // namespace paddle_kv
