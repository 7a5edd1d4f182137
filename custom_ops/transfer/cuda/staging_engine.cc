// The link is at its full rate, and the model hardly disturbed, when the copy engine moves large pieces. Blocks are
// small and scattered on the device, but on the host much lies together: neighbouring blocks, and, in pools in
// block-first order, the tensors of several layers of each block. The copy engine moves these pieces between the host
// and slots of device memory; there a kernel of few CTAs takes them apart, or puts them together.
//
// The slots form a ring. Loading: copies into a slot, on the transfer stream, then its scatter, on a stream of the
// engine. Storing: the gather, on the stream of the engine, then copies out of the slot. So one stream orders what
// happens to the host's blocks and the other what happens to the device's; calls overlap where nothing stands between
// them.
//
// One thread describes a piece to the driver in 0.5 to 1 us, in which the link moves 27 to 55 KiB. So of two fills of
// many pieces a helper submits one, to a stream of the engine: two threads take about half as long if each has a
// stream.
//
// A kernel that resides on the device and is fed by stream memory operations would save launches, but an implicit
// synchronisation by another thread (cudaFree, say) between its launch and its last copy would never end. Here every
// wait is for an event that was recorded before it.
#include <new>
#include <utility>
#include <vector>

#include "paddle_kv/common/cuda_owners.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/helper_thread.h"
#include "paddle_kv/common/upload_buffers.cuh"
#include "paddle_kv/transfer/copy_segments.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/engine_events.cuh"
#include "paddle_kv/transfer/host_copies.h"
#include "paddle_kv/transfer/piece_calls.h"
#include "paddle_kv/transfer/staging_fills.h"

namespace paddle_kv {
namespace {

class StagingEngine : public Engine {
 public:
  explicit StagingEngine(int device) : device_(device) {}
  ~StagingEngine() override {
    for (const CudaStream* stream : {&tables_stream_, &scatter_stream_, &copies_stream_}) {
      if (*stream) cudaStreamSynchronize(stream->get());
    }
    for (const CudaEvent& event : events_) cudaEventSynchronize(event.get());
  }

  Status Copy(const EngineWork& work, const DeviceStream& where) override {
    const DeviceGuard guard(device_);
    PADDLE_KV_RETURN_IF_ERROR(guard.status());
    PADDLE_KV_RETURN_IF_ERROR(SetUp(work.direction));
    Status status;
    try {
      status = Enqueue(work, StreamOf(where));
    } catch (const std::bad_alloc&) {
      status = OutOfHostMemory();
    }
    if (is_helped_) {
      is_helped_ = false;
      const Status helped = Order(copies_stream_.get(), joined_, StreamOf(where));
      if (status.ok()) status = helped;
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
    const Packed packed = Pack(work, has_bulk_copies_);
    UploadBuffer* table = nullptr;
    const std::size_t table_bytes = packed.TableBytes();
    PADDLE_KV_RETURN_IF_ERROR(tables_.Take(table_bytes, &table));
    const auto slot_of = [&](std::size_t fill) { return Slot(next_fill_ + fill); };
    WriteTable(packed, to_host, slot_of, table->device(), table->host());
    PADDLE_KV_RETURN_IF_ERROR(RecordStart(work, stream));
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
    if (status.ok()) status = EnqueueFills(work, packed, table->device(), stream);
    const Status released = table->ReleaseBehind(scatter_stream_.get());
    return status.ok() ? released : status;
  }

  Status EnqueueFills(const EngineWork& work, const Packed& packed, const std::uint8_t* table, cudaStream_t stream) {
    const bool to_host = work.direction == Direction::kDeviceToHost;
    const DeviceStream scatters = {device_, reinterpret_cast<std::int64_t>(scatter_stream_.get())};
    const auto launch = [&](const Fill& fill) {
      if (fill.by_rows) return LaunchCopyRows(packed.RowsOf(fill, to_host, table), scatters);
      return LaunchCopySegments(packed.SegmentsOf(fill, to_host, table), fill.bulk, Direction::kDeviceToDevice,
                                scatters);
    };
    const cudaStream_t last =
        to_host ? stream : scatter_stream_.get();  // the blocks of a fill have arrived behind this
    const std::int64_t groups = (work.end_layer - work.first_layer + work.layers_per_event - 1) / work.layers_per_event;
    std::int64_t group = 0;  // the first whose event is not recorded
    const auto record_until = [&](std::int64_t end) -> Status {
      if (work.record_events == nullptr) return {};
      for (; group < end; ++group) {
        PADDLE_KV_CUDA(cudaEventRecord(EventOf(work.record_events[group]), last));
      }
      return {};
    };
    for (std::size_t f = 0; f < packed.fills.size();) {
      const bool are_two = f + 1 < packed.fills.size() && HostCopies::AreMany(packed, packed.fills[f]) &&
                           HostCopies::AreMany(packed, packed.fills[f + 1]) && ProvideHelper(stream);
      const std::size_t count = are_two ? 2 : 1;
      const Fill* const fills = &packed.fills[f];
      const cudaStream_t streams[] = {stream, copies_stream_.get()};
      const auto slot = [&](std::size_t i) { return (next_fill_ + i) % kStagingSlots; };
      for (std::size_t i = 0; i < count; ++i) {
        const cudaStream_t first = to_host ? scatter_stream_.get() : streams[i];
        PADDLE_KV_CUDA(cudaStreamWaitEvent(first, emptied_[slot(i)].get(), 0));
        if (!to_host) continue;
        PADDLE_KV_RETURN_IF_ERROR(launch(fills[i]));
        PADDLE_KV_RETURN_IF_ERROR(Order(scatter_stream_.get(), filled_[slot(i)].get(), streams[i]));
      }
      PADDLE_KV_RETURN_IF_ERROR(CopyToOrFromHost(packed, fills, count, to_host, streams));
      for (std::size_t i = 0; i < count; ++i) {
        if (to_host) {
          PADDLE_KV_RETURN_IF_ERROR(RecordEmptied(slot(i), streams[i], stream));
        } else {
          PADDLE_KV_RETURN_IF_ERROR(Order(streams[i], filled_[slot(i)].get(), scatter_stream_.get()));
          PADDLE_KV_RETURN_IF_ERROR(launch(fills[i]));
          PADDLE_KV_CUDA(cudaEventRecord(emptied_[slot(i)].get(), scatter_stream_.get()));
        }
        // The groups before those that the next fill begins with.
        if (fills[i].end_part < packed.parts.size()) {
          PADDLE_KV_RETURN_IF_ERROR(record_until(packed.rows[packed.parts[fills[i].end_part].row].group));
        }
      }
      next_fill_ += count;
      f += count;
    }
    return record_until(groups);
  }

  // One fill, or two by two threads.
  Status CopyToOrFromHost(const Packed& packed, const Fill* fills, std::size_t count, bool to_host,
                          const cudaStream_t* streams) {
    const auto enqueue = [&](int i) {
      return copies_[i].Enqueue(packed, fills[i], Slot(next_fill_ + i), to_host, device_, streams[i]);
    };
    if (count == 1) return enqueue(0);
    return ByTwoThreads(&helper_, device_, [&] { return enqueue(0); }, [&] { return enqueue(1); });
  }

  // Blocks that were saved have arrived behind this on `stream`, whichever one has copied them.
  Status RecordEmptied(std::size_t slot, cudaStream_t copied_on, cudaStream_t stream) {
    PADDLE_KV_CUDA(cudaEventRecord(emptied_[slot].get(), copied_on));
    if (copied_on != stream) PADDLE_KV_CUDA(cudaStreamWaitEvent(stream, emptied_[slot].get(), 0));
    return {};
  }

  // False: there is no second stream, on a full GPU. Else that comes behind what was on `stream` before this call.
  bool ProvideHelper(cudaStream_t stream) {
    if (is_helped_) return true;
    if (!copies_stream_) {
      const cudaError_t made = cudaStreamCreateWithFlags(copies_stream_.Receive(), cudaStreamNonBlocking);
      if (!ToStatus(made, "cudaStreamCreateWithFlags").ok()) return false;
    }
    is_helped_ = Order(stream, joined_, copies_stream_.get()).ok();
    return is_helped_;
  }

  std::uint8_t* Slot(std::size_t fill) const {
    return static_cast<std::uint8_t*>(ring_.get()) + fill % kStagingSlots * kSlotBytes;
  }

  // Later work on `after` waits for what is on `before` now.
  static Status Order(cudaStream_t before, cudaEvent_t event, cudaStream_t after) {
    PADDLE_KV_CUDA(cudaEventRecord(event, before));
    PADDLE_KV_CUDA(cudaStreamWaitEvent(after, event, 0));
    return {};
  }

  Status SetUp(Direction direction) {
    if (direction == Direction::kHostToDevice && !tables_stream_) {
      PADDLE_KV_CUDA(cudaStreamCreateWithFlags(tables_stream_.Receive(), cudaStreamNonBlocking));
    }
    if (ring_) return {};
    PADDLE_KV_RETURN_IF_ERROR(HasBulkCopies(device_, &has_bulk_copies_));
    if (!scatter_stream_) {
      int lowest = 0;
      int highest = 0;
      PADDLE_KV_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
      PADDLE_KV_CUDA(cudaStreamCreateWithPriority(scatter_stream_.Receive(), cudaStreamNonBlocking, highest));
    }
    events_.reserve(2 * kStagingSlots + 4);
    while (events_.size() < 2 * kStagingSlots + 4) {
      CudaEvent event;
      PADDLE_KV_CUDA(MakeEvent(&event));
      events_.push_back(std::move(event));
    }
    start_ = events_[0].get();
    end_ = events_[1].get();
    uploaded_ = events_[2].get();
    joined_ = events_[3].get();
    filled_ = &events_[4];
    emptied_ = &events_[4 + kStagingSlots];
    PADDLE_KV_CUDA(cudaMalloc(ring_.Receive(), kStagingSlots * kSlotBytes));
    return {};
  }

  int device_;
  bool has_bulk_copies_ = false;
  CudaStream scatter_stream_;  // scatters and gathers, before other kernels that wait
  CudaStream tables_stream_;   // tables of loads
  CudaStream copies_stream_;   // of the helper
  bool is_helped_ = false;     // in this call
  std::vector<CudaEvent> events_;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
  cudaEvent_t uploaded_ = nullptr;
  cudaEvent_t joined_ = nullptr;
  const CudaEvent* filled_ = nullptr;   // one a slot
  const CudaEvent* emptied_ = nullptr;  // one a slot
  DeviceMemory ring_;
  std::size_t next_fill_ = 0;  // counts over all calls; fill f lies in slot f modulo kStagingSlots
  bool open_ = false;          // the last call said that more follows
  HostCopies copies_[2];
  HelperThread helper_;
  UploadBuffers tables_;
};

}  // namespace

std::unique_ptr<Engine> MakeStagingEngine(int device) { return std::make_unique<StagingEngine>(device); }

}  // namespace paddle_kv
