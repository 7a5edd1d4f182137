// One launch for all layers of a call. A launch of its own for each layer has to wait every time until a multiprocessor
// is free, which beside matrix products takes longer than the copy, and drains the pipeline in between.
//
// An event in the middle of the kernel: the kernel counts, per group, the warps that are through with it; a stream of
// the engine waits for the count and records the event behind that. Counters only grow, so that the waits of one call
// cannot be met by another one. The kernel is enqueued before the waits: should the two streams share a hardware queue,
// the waits do not keep the kernel from starting.
#include <algorithm>
#include <utility>
#include <vector>

#include "paddle_kv/common/cuda_owners.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/stream_waits.cuh"
#include "paddle_kv/common/upload_buffers.cuh"
#include "paddle_kv/transfer/copy_segments.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/engine_events.cuh"

namespace paddle_kv {
namespace {

class KernelEngine : public Engine {
 public:
  explicit KernelEngine(int device) : device_(device) {}
  ~KernelEngine() override {
    if (events_stream_) cudaStreamSynchronize(events_stream_.get());
    tables_.clear();  // waits for the kernels, which write the counters
  }

  Status Copy(const EngineWork& work, const DeviceStream& where) override {
    const DeviceGuard guard(device_);
    PADDLE_KV_RETURN_IF_ERROR(guard.status());
    PADDLE_KV_RETURN_IF_ERROR(SetUp());
    const std::int64_t layers = work.end_layer - work.first_layer;
    const auto groups = static_cast<int>((layers + work.layers_per_event - 1) / work.layers_per_event);
    if (groups == 0) return {};
    if (can_wait_) PADDLE_KV_RETURN_IF_ERROR(ProvideCounters(groups - 1));

    std::vector<BlockRows> rows;
    for (std::int64_t layer = work.first_layer; layer < work.end_layer; ++layer) {
      const std::vector<BlockRows> of_layer = RowsOfLayer(*work.plan, layer, work.direction);
      rows.insert(rows.end(), of_layer.begin(), of_layer.end());
    }
    const Direction direction = work.plan->inside_device ? Direction::kCacheToCache : work.direction;
    const bool bulk = has_bulk_copies_ && std::all_of(rows.begin(), rows.end(), BulkCopyable);

    std::int64_t pairs = 0;
    for (const Run& run : *work.runs) pairs += run.length;
    const std::size_t id_bytes = pairs * sizeof(std::int64_t);
    const std::size_t table_bytes = rows.size() * sizeof(Segment) + 2 * id_bytes;
    UploadBuffer* table = nullptr;
    PADDLE_KV_RETURN_IF_ERROR(tables_.Take(table_bytes, &table));
    auto* sources = reinterpret_cast<std::int64_t*>(table->host());
    std::int64_t* targets = sources + pairs;
    for (const Run& run : *work.runs) {
      for (std::int64_t i = 0; i < run.length; ++i) {
        *sources++ = run.source + i;
        *targets++ = run.target + i;
      }
    }
    auto* segments = reinterpret_cast<Segment*>(targets);
    for (std::size_t i = 0; i < rows.size(); ++i) segments[i] = CutSegment(rows[i], 0, pairs, bulk, direction);

    SegmentCopy copy{};
    copy.source_ids = reinterpret_cast<const std::int64_t*>(table->device());
    copy.target_ids = copy.source_ids + pairs;
    copy.segments = reinterpret_cast<const Segment*>(copy.target_ids + pairs);
    copy.segment_count = static_cast<int>(rows.size());
    copy.segments_per_group = static_cast<int>(work.layers_per_event * work.plan->tensors_per_layer);
    if (work.plan->inside_device) copy.ctas = CtasBetweenCaches(work);
    const cudaStream_t stream = StreamOf(where);
    Status status = table->Upload(table_bytes, stream);
    if (status.ok()) status = RecordStart(work, stream);
    if (status.ok()) {
      status = can_wait_ ? LaunchOnce(copy, groups, bulk, direction, work.record_events, where)
                         : LaunchGroups(copy, groups, bulk, direction, work.record_events, where);
    }
    const Status released = table->ReleaseBehind(stream);
    return status.ok() ? released : status;
  }

 private:
  Status LaunchOnce(SegmentCopy copy, int groups, bool bulk, Direction direction, const std::int64_t* record_events,
                    const DeviceStream& where) {
    copy.done = counters_;
    copy.signal_count = groups - 1;  // the last group ends with the kernel
    PADDLE_KV_RETURN_IF_ERROR(LaunchCopySegments(copy, bulk, direction, where));
    for (int g = 0; g < copy.signal_count; ++g) reached_[g] += WarpsOf(copy, bulk, direction);
    for (int g = 0; g < copy.signal_count; ++g) {
      PADDLE_KV_RETURN_IF_ERROR(WaitUntilReached(counters_ + g, reached_[g], events_stream_.get()));
      PADDLE_KV_CUDA(cudaEventRecord(EventOf(record_events[g]), events_stream_.get()));
    }
    PADDLE_KV_CUDA(cudaEventRecord(EventOf(record_events[groups - 1]), StreamOf(where)));
    return {};
  }

  Status LaunchGroups(const SegmentCopy& copy, int groups, bool bulk, Direction direction,
                      const std::int64_t* record_events, const DeviceStream& where) {
    for (int g = 0; g < groups; ++g) {
      SegmentCopy group = copy;
      group.segments += g * copy.segments_per_group;
      group.segment_count = std::min(copy.segments_per_group, copy.segment_count - g * copy.segments_per_group);
      PADDLE_KV_RETURN_IF_ERROR(LaunchCopySegments(group, bulk, direction, where));
      PADDLE_KV_CUDA(cudaEventRecord(EventOf(record_events[g]), StreamOf(where)));
    }
    return {};
  }

  // All multiprocessors, which take what memory and links give. Beside compute two: products of which the CTAs stay on
  // a multiprocessor wait for each that is not theirs.
  int CtasBetweenCaches(const EngineWork& work) const {
    return work.beside_compute ? kCtasBesideCompute : multiprocessors_;
  }

  Status SetUp() {
    if (counters_ != nullptr) return {};
    PADDLE_KV_CUDA(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_));
    PADDLE_KV_RETURN_IF_ERROR(HasBulkCopies(device_, &has_bulk_copies_));
    int lowest = 0;
    int highest = 0;
    PADDLE_KV_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    if (!events_stream_) {
      PADDLE_KV_CUDA(cudaStreamCreateWithPriority(events_stream_.Receive(), cudaStreamNonBlocking, highest));
    }
    PADDLE_KV_RETURN_IF_ERROR(ProvideCounters(1));
    can_wait_ = WaitUntilReached(counters_, 0, events_stream_.get()).ok();
    return {};
  }

  // A larger array begins at zero. Waits for the former one may still be pending: it stays.
  Status ProvideCounters(std::int64_t count) {
    if (count <= static_cast<std::int64_t>(reached_.size())) return {};
    const std::size_t size = std::max<std::size_t>(kSmallestCounters, count);
    DeviceMemory counters;
    PADDLE_KV_CUDA(cudaMalloc(counters.Receive(), size * sizeof(std::uint32_t)));
    all_counters_.push_back(std::move(counters));
    void* const memory = all_counters_.back().get();
    PADDLE_KV_CUDA(cudaMemsetAsync(memory, 0, size * sizeof(std::uint32_t), events_stream_.get()));
    PADDLE_KV_CUDA(cudaStreamSynchronize(events_stream_.get()));
    counters_ = static_cast<std::uint32_t*>(memory);
    reached_.assign(size, 0);
    return {};
  }

  static constexpr std::size_t kSmallestCounters = 256;
  static constexpr int kCtasBesideCompute = 2;

  int device_;
  int multiprocessors_ = 0;
  bool has_bulk_copies_ = false;
  bool can_wait_ = false;
  CudaStream events_stream_;  // where events are recorded while the kernel runs on
  std::uint32_t* counters_ = nullptr;
  std::vector<DeviceMemory> all_counters_;
  std::vector<std::uint32_t> reached_;  // the value of each counter when all that is enqueued is done
  UploadBuffers tables_;
};

}  // namespace

std::unique_ptr<Engine> MakeKernelEngine(int device) { return std::make_unique<KernelEngine>(device); }

}  // namespace paddle_kv
