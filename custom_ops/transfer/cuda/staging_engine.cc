// For blocks that are scattered on the device and lie side by side on the host. The link is at its full rate, and the
// model hardly disturbed, when the copy engine moves large pieces; a kernel of few CTAs takes them apart, or puts them
// together, in slots of device memory.
//
// The slots form a ring. Loading: copies into a slot, on the transfer stream, then its scatter, on a stream of the
// engine. Storing: the gather, on the stream of the engine, then copies out of the slot. So one stream orders what
// happens to the host's blocks and the other what happens to the device's; calls overlap where nothing stands between
// them.
//
// A kernel that resides on the device and is fed by stream memory operations would save launches, but an implicit
// synchronisation by another thread (cudaFree, say) between its launch and its last copy would never end. Here every
// wait is for an event that was recorded before it.
#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "paddle_kv/common/cuda_owners.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/upload_buffers.cuh"
#include "paddle_kv/transfer/copy_segments.h"
#include "paddle_kv/transfer/engine.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kSlotBytes = 8 << 20;  // between two slots the link is idle for some microseconds
constexpr int kSlots = 3;
constexpr std::int64_t kSegmentAlignment = 256;  // of each tensor's part of a slot

// Blocks in the order of the host.
struct Pair {
  std::int64_t host;
  std::int64_t device;
};

// Blocks [first_pair, first_pair + pair_count) of one tensor, or of a range of bytes of its blocks: side by side in a
// slot, from slot_offset on.
struct Part {
  LayerTensor tensor;
  std::int64_t group;
  std::int64_t slot_offset;
  std::int64_t first_pair;
  std::int64_t pair_count;
};

// What one slot holds at one time.
struct Fill {
  std::size_t first_part;
  std::size_t end_part;
  bool bulk;  // how it is scattered or gathered
};

std::vector<Pair> PairsByHost(const std::vector<Run>& runs, bool to_host) {
  std::vector<Pair> pairs;
  for (const Run& run : runs) {
    for (std::int64_t i = 0; i < run.length; ++i) {
      pairs.push_back(to_host ? Pair{run.target + i, run.source + i} : Pair{run.source + i, run.target + i});
    }
  }
  // One host block may go to several device blocks.
  std::sort(pairs.begin(), pairs.end(),
            [](const Pair& a, const Pair& b) { return a.host != b.host ? a.host < b.host : a.device < b.device; });
  return pairs;
}

class StagingEngine : public Engine {
 public:
  explicit StagingEngine(int device) : device_(device) {}
  ~StagingEngine() override {
    for (const CudaStream* stream : {&tables_stream_, &scatter_stream_}) {
      if (*stream) cudaStreamSynchronize(stream->get());
    }
    for (const CudaEvent& event : events_) cudaEventSynchronize(event.get());
  }

  Status Copy(const EngineWork& work, const DeviceStream& where) override {
    const DeviceGuard guard(device_);
    PADDLE_KV_RETURN_IF_ERROR(guard.status());
    PADDLE_KV_RETURN_IF_ERROR(SetUp());
    Status status;
    try {
      status = Enqueue(work, StreamOf(where));
    } catch (const std::bad_alloc&) {
      status = OutOfHostMemory();
    }
    open_ = status.ok() && work.more_follows;
    if (open_) return {};
    const Status joined = Join(where);
    return status.ok() ? joined : status;
  }

  Status Join(const DeviceStream& where) override {
    open_ = false;
    return !scatter_stream_ || end_ == nullptr ? Status{} : Order(scatter_stream_.get(), end_, StreamOf(where));
  }

 private:
  Status Enqueue(const EngineWork& work, cudaStream_t stream) {
    const bool to_host = work.direction == Direction::kDeviceToHost;
    const std::vector<Pair> pairs = PairsByHost(*work.runs, to_host);
    std::vector<Part> parts;
    std::vector<Fill> fills;
    Pack(work, static_cast<std::int64_t>(pairs.size()), &parts, &fills);

    // The device's ids, then one segment a part.
    const std::size_t table_bytes = pairs.size() * sizeof(std::int64_t) + parts.size() * sizeof(Segment);
    UploadBuffer* table = nullptr;
    PADDLE_KV_RETURN_IF_ERROR(tables_.Take(table_bytes, &table));
    auto* ids = reinterpret_cast<std::int64_t*>(table->host());
    for (std::size_t i = 0; i < pairs.size(); ++i) ids[i] = pairs[i].device;
    auto* segments = reinterpret_cast<Segment*>(ids + pairs.size());
    for (std::size_t f = 0; f < fills.size(); ++f) {
      std::vector<BlockRows> rows;
      for (std::size_t p = fills[f].first_part; p < fills[f].end_part; ++p) {
        rows.push_back(RowsOfPart(parts[p], Slot(next_fill_ + f), to_host));
      }
      fills[f].bulk = has_bulk_copies_ && std::all_of(rows.begin(), rows.end(), BulkCopyable);
      for (std::size_t p = fills[f].first_part; p < fills[f].end_part; ++p) {
        segments[p] = CutSegment(rows[p - fills[f].first_part], parts[p].first_pair, parts[p].pair_count, fills[f].bulk,
                                 Direction::kDeviceToDevice);
      }
    }
    // The table of a load goes in front of its blocks: on the stream of scatters it would wait for the blocks of other
    // calls that the copy engine is busy with, and the slots would stay full. It takes a stream of its own, for which
    // the blocks wait: the copy engine stays with a stream as long as that has copies, and an urgent load is let in
    // here alone. The stream of scatters waits for it in any case: there the table is released, also where an error
    // comes before the first kernel.
    if (!to_host) {
      PADDLE_KV_RETURN_IF_ERROR(Order(stream, start_, tables_stream_.get()));
      PADDLE_KV_RETURN_IF_ERROR(table->Upload(table_bytes, tables_stream_.get()));
      PADDLE_KV_RETURN_IF_ERROR(Order(tables_stream_.get(), uploaded_, stream));
    }
    if (!to_host || !open_) PADDLE_KV_RETURN_IF_ERROR(Order(stream, start_, scatter_stream_.get()));
    Status status = to_host ? table->Upload(table_bytes, scatter_stream_.get()) : Status{};
    if (status.ok()) status = EnqueueFills(work, fills, parts, pairs, table->device(), stream);
    const Status released = table->ReleaseBehind(scatter_stream_.get());
    return status.ok() ? released : status;
  }

  Status EnqueueFills(const EngineWork& work, const std::vector<Fill>& fills, const std::vector<Part>& parts,
                      const std::vector<Pair>& pairs, const std::uint8_t* table, cudaStream_t stream) {
    const bool to_host = work.direction == Direction::kDeviceToHost;
    const auto* ids = reinterpret_cast<const std::int64_t*>(table);
    const auto* segments = reinterpret_cast<const Segment*>(ids + pairs.size());
    const auto launch = [&](const Fill& fill) {
      SegmentCopy copy{};
      copy.segments = segments + fill.first_part;
      copy.segment_count = static_cast<int>(fill.end_part - fill.first_part);
      copy.segments_per_group = copy.segment_count;
      (to_host ? copy.source_ids : copy.target_ids) = ids;
      return LaunchCopySegments(copy, fill.bulk, Direction::kDeviceToDevice,
                                {device_, reinterpret_cast<std::int64_t>(scatter_stream_.get())});
    };
    const auto copy_runs = [&](const Fill& fill) -> Status {
      for (std::size_t p = fill.first_part; p < fill.end_part; ++p) {
        PADDLE_KV_RETURN_IF_ERROR(CopyHostRuns(parts[p], pairs, Slot(next_fill_), to_host, stream));
      }
      return {};
    };
    const cudaStream_t last =
        to_host ? stream : scatter_stream_.get();  // the blocks of a fill have arrived behind this
    const std::int64_t groups = (work.end_layer - work.first_layer + work.layers_per_event - 1) / work.layers_per_event;
    std::int64_t group = 0;  // the first whose event is not recorded
    const auto record_until = [&](std::int64_t end) -> Status {
      for (; group < end; ++group) {
        PADDLE_KV_CUDA(cudaEventRecord(reinterpret_cast<cudaEvent_t>(work.record_events[group]), last));
      }
      return {};
    };
    for (const Fill& fill : fills) {
      const std::size_t slot = next_fill_ % kSlots;
      if (to_host) {
        PADDLE_KV_CUDA(cudaStreamWaitEvent(scatter_stream_.get(), emptied_[slot].get(), 0));
        PADDLE_KV_RETURN_IF_ERROR(launch(fill));
        PADDLE_KV_RETURN_IF_ERROR(Order(scatter_stream_.get(), filled_[slot].get(), stream));
        PADDLE_KV_RETURN_IF_ERROR(copy_runs(fill));
      } else {
        PADDLE_KV_CUDA(cudaStreamWaitEvent(stream, emptied_[slot].get(), 0));
        PADDLE_KV_RETURN_IF_ERROR(copy_runs(fill));
        PADDLE_KV_RETURN_IF_ERROR(Order(stream, filled_[slot].get(), scatter_stream_.get()));
        PADDLE_KV_RETURN_IF_ERROR(launch(fill));
      }
      PADDLE_KV_CUDA(cudaEventRecord(emptied_[slot].get(), last));
      ++next_fill_;
      // The groups before the one that the next fill begins with.
      if (fill.end_part < parts.size()) PADDLE_KV_RETURN_IF_ERROR(record_until(parts[fill.end_part].group));
    }
    return record_until(groups);
  }

  std::uint8_t* Slot(std::size_t fill) const {
    return static_cast<std::uint8_t*>(ring_.get()) + fill % kSlots * kSlotBytes;
  }

  static BlockRows RowsOfPart(const Part& part, std::uint8_t* slot, bool to_host) {
    const LayerTensor& tensor = part.tensor;
    std::uint8_t* staged = slot + part.slot_offset;
    if (to_host) return {tensor.device, staged, tensor.device_stride, tensor.block_bytes, tensor.block_bytes};
    return {staged, tensor.device, tensor.block_bytes, tensor.device_stride, tensor.block_bytes};
  }

  // Later work on `after` waits for what is on `before` now.
  static Status Order(cudaStream_t before, cudaEvent_t event, cudaStream_t after) {
    PADDLE_KV_CUDA(cudaEventRecord(event, before));
    PADDLE_KV_CUDA(cudaStreamWaitEvent(after, event, 0));
    return {};
  }

  static void Pack(const EngineWork& work, std::int64_t pairs, std::vector<Part>* parts, std::vector<Fill>* fills) {
    if (pairs == 0) return;
    std::int64_t used = kSlotBytes;  // of the last fill
    const TransferPlan& plan = *work.plan;
    for (std::int64_t layer = work.first_layer; layer < work.end_layer; ++layer) {
      for (std::int64_t t = 0; t < plan.tensors_per_layer; ++t) {
        const LayerTensor& whole = plan.tensors[layer * plan.tensors_per_layer + t];
        for (std::int64_t begin = 0; begin < whole.block_bytes; begin += kSlotBytes) {
          LayerTensor tensor = whole;
          tensor.device += begin;
          tensor.host += begin;
          tensor.block_bytes = std::min<std::int64_t>(kSlotBytes, whole.block_bytes - begin);
          for (std::int64_t pair = 0; pair < pairs;) {
            if (used + tensor.block_bytes > kSlotBytes) {
              fills->push_back({parts->size(), parts->size(), false});
              used = 0;
            }
            const std::int64_t count = std::min(pairs - pair, (kSlotBytes - used) / tensor.block_bytes);
            parts->push_back({tensor, (layer - work.first_layer) / work.layers_per_event, used, pair, count});
            fills->back().end_part = parts->size();
            pair += count;
            used += (count * tensor.block_bytes + kSegmentAlignment - 1) / kSegmentAlignment * kSegmentAlignment;
          }
        }
      }
    }
  }

  Status CopyHostRuns(const Part& part, const std::vector<Pair>& pairs, std::uint8_t* slot, bool to_host,
                      cudaStream_t stream) const {
    const LayerTensor& tensor = part.tensor;
    const std::int64_t end = part.first_pair + part.pair_count;
    for (std::int64_t first = part.first_pair; first < end;) {
      std::int64_t next = first + 1;
      while (next < end && pairs[next].host == pairs[next - 1].host + 1) ++next;
      std::uint8_t* staged = slot + part.slot_offset + (first - part.first_pair) * tensor.block_bytes;
      std::uint8_t* host = tensor.host + pairs[first].host * tensor.host_stride;
      PADDLE_KV_RETURN_IF_ERROR(CopyRows(to_host ? host : staged, to_host ? tensor.host_stride : tensor.block_bytes,
                                         to_host ? staged : host, to_host ? tensor.block_bytes : tensor.host_stride,
                                         tensor.block_bytes, next - first, stream));
      first = next;
    }
    return {};
  }

  Status CopyRows(std::uint8_t* target, std::int64_t target_stride, const std::uint8_t* source,
                  std::int64_t source_stride, std::int64_t row_bytes, std::int64_t rows, cudaStream_t stream) const {
    if (rows == 1 || (target_stride == row_bytes && source_stride == row_bytes)) {
      PADDLE_KV_CUDA(cudaMemcpyAsync(target, source, rows * row_bytes, cudaMemcpyDefault, stream));
    } else if (target_stride <= largest_pitch_ && source_stride <= largest_pitch_) {
      PADDLE_KV_CUDA(
          cudaMemcpy2DAsync(target, target_stride, source, source_stride, row_bytes, rows, cudaMemcpyDefault, stream));
    } else {
      for (std::int64_t row = 0; row < rows; ++row) {
        PADDLE_KV_CUDA(cudaMemcpyAsync(target + row * target_stride, source + row * source_stride, row_bytes,
                                       cudaMemcpyDefault, stream));
      }
    }
    return {};
  }

  Status SetUp() {
    if (ring_) return {};
    PADDLE_KV_RETURN_IF_ERROR(HasBulkCopies(device_, &has_bulk_copies_));
    PADDLE_KV_CUDA(cudaDeviceGetAttribute(&largest_pitch_, cudaDevAttrMaxPitch, device_));
    if (!scatter_stream_) {
      int lowest = 0;
      int highest = 0;
      PADDLE_KV_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
      PADDLE_KV_CUDA(cudaStreamCreateWithPriority(scatter_stream_.Receive(), cudaStreamNonBlocking, highest));
    }
    if (!tables_stream_) {
      PADDLE_KV_CUDA(cudaStreamCreateWithFlags(tables_stream_.Receive(), cudaStreamNonBlocking));
    }
    events_.reserve(2 * kSlots + 3);
    while (events_.size() < 2 * kSlots + 3) {
      CudaEvent event;
      PADDLE_KV_CUDA(MakeEvent(&event));
      events_.push_back(std::move(event));
    }
    start_ = events_[0].get();
    end_ = events_[1].get();
    uploaded_ = events_[2].get();
    filled_ = &events_[3];
    emptied_ = &events_[3 + kSlots];
    PADDLE_KV_CUDA(cudaMalloc(ring_.Receive(), kSlots * kSlotBytes));
    return {};
  }

  int device_;
  bool has_bulk_copies_ = false;
  int largest_pitch_ = 0;
  CudaStream scatter_stream_;  // scatters and gathers, before other kernels that wait
  CudaStream tables_stream_;   // tables of loads
  std::vector<CudaEvent> events_;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
  cudaEvent_t uploaded_ = nullptr;
  const CudaEvent* filled_ = nullptr;   // one a slot
  const CudaEvent* emptied_ = nullptr;  // one a slot
  DeviceMemory ring_;
  std::size_t next_fill_ = 0;  // counts over all calls; fill f lies in slot f modulo kSlots
  bool open_ = false;          // the last call said that more follows
  UploadBuffers tables_;
};

}  // namespace

std::unique_ptr<Engine> MakeStagingEngine(int device) { return std::make_unique<StagingEngine>(device); }

}  // namespace paddle_kv
