// What the engines launch, done by the threads of fake streams: the kernel of copy_segments.h, waits for its counters,
// and lists of copies.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "fake_cuda.h"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/stream_waits.cuh"
#include "paddle_kv/memcpy/memcpy_batch.h"
#include "paddle_kv/transfer/copy_rows.h"
#include "paddle_kv/transfer/copy_segments.h"

namespace paddle_kv {
namespace {

constexpr int kWarpsOfCta = 3;

std::atomic<int> last_ctas{0};
std::atomic<bool> counter_waits_fail{false};

std::atomic<std::uint32_t>& Counter(std::uint32_t* counter) {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(counter);
}

void CopySegments(const SegmentCopy& copy) {
  int sent = 0;
  const auto send = [&](int group) {
    for (; sent < copy.signal_count && sent < group; ++sent) Counter(copy.done + sent) += WarpsOf(copy, true, {});
  };
  for (int s = 0; s < copy.segment_count; ++s) {
    send(s / copy.segments_per_group);
    const Segment& segment = copy.segments[s];
    for (std::int64_t pair = segment.first_pair; pair < segment.first_pair + segment.pair_count; ++pair) {
      const auto block_of = [&](const std::int64_t* ids) {
        return ids == nullptr ? pair - segment.first_pair : ids[pair];
      };
      std::memcpy(segment.rows.target + block_of(copy.target_ids) * segment.rows.target_stride,
                  segment.rows.source + block_of(copy.source_ids) * segment.rows.source_stride,
                  segment.rows.block_bytes);
    }
  }
  send(copy.signal_count);
}

}  // namespace

Status HasBulkCopies(int device, bool* has) {
  static const int kernel = 0;
  return RunsWithBulkCopies(&kernel, 200 << 10, device, has);
}

bool BulkCopyable(const BlockRows& rows) { return rows.block_bytes % 16 == 0; }

Segment CutSegment(const BlockRows& rows, std::int64_t first_pair, std::int64_t pair_count, bool, Direction) {
  Segment segment{};
  segment.rows = rows;
  segment.first_pair = first_pair;
  segment.pair_count = pair_count;
  return segment;
}

int WarpsOf(const SegmentCopy& copy, bool, Direction) { return kWarpsOfCta * std::max(1, copy.ctas); }

Status LaunchCopySegments(const SegmentCopy& copy, bool, Direction, const DeviceStream& where) {
  const InsideFakeCuda inside;
  last_ctas = copy.ctas;
  return ToStatus(Launch(StreamOf(where), [copy] { CopySegments(copy); }), "CopySegments");
}

Status LaunchCopyRows(const RowCopy& copy, const DeviceStream& where) {
  const auto work = [copy] {
    for (const RowPart* part = copy.parts; part != copy.parts + copy.part_count; ++part) {
      for (std::int64_t item = 0; item < part->items; ++item) {
        const RowPiece& piece = part->pieces[item % part->piece_count];
        const std::int64_t pair = item / part->piece_count;
        std::uint8_t* const staged = part->slot + pair * part->row_bytes + piece.offset;
        std::uint8_t* const device = piece.device + part->ids[pair] * piece.device_stride;
        std::memcpy(copy.to_slot ? staged : device, copy.to_slot ? device : staged, piece.bytes);
      }
    }
  };
  const InsideFakeCuda inside;
  return ToStatus(Launch(StreamOf(where), work), "CopyRowsByBulk");
}

Status WaitUntilReached(const std::uint32_t* counter, std::uint32_t value, cudaStream_t stream) {
  if (counter_waits_fail) return ToStatus(cudaErrorNotSupported, "cuStreamWaitValue32");
  const InsideFakeCuda inside;
  const auto wait = [counter, value] {
    while (static_cast<std::int32_t>(Counter(const_cast<std::uint32_t*>(counter)) - value) < 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  };
  return ToStatus(Launch(stream, wait), "cuStreamWaitValue32");
}

bool HasMemcpyBatchAsync() { return true; }

Status MemcpyBatchCuda(const CopyPair* pairs, std::int64_t pair_count, bool, const DeviceStream& where) {
  for (std::int64_t i = 0; i < pair_count; ++i) {
    PADDLE_KV_CUDA(
        cudaMemcpyAsync(pairs[i].target, pairs[i].source, pairs[i].bytes, cudaMemcpyDefault, StreamOf(where)));
  }
  return {};
}

}  // namespace paddle_kv

int CtasOfLastKernel() { return paddle_kv::last_ctas; }
void SetCounterWaitsFail(bool fail) { paddle_kv::counter_waits_fail = fail; }
