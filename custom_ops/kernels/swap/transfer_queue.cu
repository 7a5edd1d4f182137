#include "paddle_kv/swap/transfer_queue.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/nvtx_range.h"
#include "paddle_kv/swap/engine.h"
#include "paddle_kv/swap/engine_choice.h"
#include "paddle_kv/swap/transfer_plans.h"

namespace paddle_kv {
namespace {

using Clock = std::chrono::steady_clock;

struct Tuning {
  // What an urgent transfer may find before it is what the copy engine has been given: 0.3 ms of the link a call. The
  // others are kernels, which run beside each other, and their calls are worth more when they are long.
  static constexpr std::int64_t kCopyEngineBytes = 16 << 20;
  static constexpr std::int64_t kKernelBytes = 64 << 20;
  static constexpr int kCallsInFlight = 3;
  static constexpr std::size_t kFewestInFlight = 2;      // of whatever size: the link never waits for the next call
  static constexpr std::chrono::microseconds kPoll{50};  // for the end of what is in flight
  static constexpr std::chrono::milliseconds kComputeSeen{20};  // how long a busy compute stream counts as busy
  static constexpr std::chrono::hours kLongestWait{24 * 365};   // more would overflow the clock
};

// Asked in vain: the runtime would report that as the error of the next launch.
bool IsNotReady(cudaError_t result) {
  if (result != cudaSuccess) cudaGetLastError();
  return result == cudaErrorNotReady;
}

cudaEvent_t EventOf(std::int64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }

struct QueuedTransfer {
  std::int64_t number;  // in the order of the calls
  std::shared_ptr<const TransferPlan> plan;
  Direction direction;
  EngineKind engine;
  std::vector<Run> runs;  // sorted by host block
  PieceSizes sizes;
  std::int64_t first_layer;
  std::int64_t end_layer;
  std::int64_t layers_per_event;
  std::vector<std::int64_t> wait_events;
  std::vector<std::int64_t> first_wait;  // of each group, and the end
  std::int64_t start_event;
  std::vector<std::int64_t> record_events;
  std::int64_t layer_bytes = 0;
  std::int64_t block_count;
  std::int64_t next_group = 0;
  std::int64_t submitted_blocks = 0;  // of the next group
  std::size_t next_run = 0;           // with the first block of it that is not
  std::int64_t next_in_run = 0;
  bool more_follows = false;  // as the last step has told its engine
  EngineKind last_engine{};
  std::int64_t end_without_memory = 0;  // of the groups for which another engine than the copy engine found no memory
  Status failure;                       // of a step: no later group is copied

  std::int64_t group_count() const { return static_cast<std::int64_t>(record_events.size()); }
  std::int64_t FirstLayer(std::int64_t group) const {
    return std::min(first_layer + group * layers_per_event, end_layer);
  }
  std::int64_t GroupBytes(std::int64_t group) const {
    return (FirstLayer(group + 1) - FirstLayer(group)) * layer_bytes;
  }

  // How many blocks of a group are the next part of at most `largest` bytes (but one block at least); parts are about
  // equal.
  std::int64_t BlocksOfPart(std::int64_t largest) const {
    const std::int64_t most = std::max<std::int64_t>(1, largest / (GroupBytes(next_group) / block_count));
    const std::int64_t parts = (block_count + most - 1) / most;
    return std::min((block_count + parts - 1) / parts, block_count - submitted_blocks);
  }

  // The next so many blocks of the next group.
  std::vector<Run> TakePart(std::int64_t wanted) {
    std::vector<Run> part;
    while (wanted > 0) {
      const Run& run = runs[next_run];
      const std::int64_t length = std::min(wanted, run.length - next_in_run);
      part.push_back({run.source + next_in_run, run.target + next_in_run, length});
      wanted -= length;
      next_in_run += length;
      if (next_in_run == run.length) {
        next_in_run = 0;
        next_run = (next_run + 1) % runs.size();  // the next group has the same blocks
      }
    }
    return part;
  }
};

// Groups of the first transfer of a stream that are submitted next, or a part of one.
struct Step {
  QueuedTransfer* transfer;
  std::int64_t first_group;
  std::int64_t end_group;
  std::int64_t bytes = 0;
  EngineKind engine;
  std::int64_t blocks = 0;    // of the one group: a part; 0: all of them
  bool begins = true;         // nothing of the groups has been submitted before
  bool ends = true;           // nothing of them is left: their events can be recorded
  bool more_follows = false;  // the next step on the stream is of the same transfer and engine, and waits for nothing

  // The end of the groups whose events are recorded behind this step.
  std::int64_t RecordedEnd() const { return ends ? end_group : first_group; }
};

struct Stream {
  DeviceStream where;
  bool urgent;
  std::deque<QueuedTransfer> transfers;
  bool submitting = false;
  std::array<std::unique_ptr<Engine>, kEngineKinds> engines;
  struct Flight {
    cudaEvent_t end;
    std::int64_t bytes;
  };
  std::deque<Flight> flights;
  std::vector<cudaEvent_t> idle_events;
  std::int64_t bytes_in_flight = 0;
};

thread_local Status last_error;
thread_local std::string last_error_text;

int Fail(const Status& status) {
  last_error = status;
  last_error_text = std::string("CUDA error ") + status.name + " (" + std::to_string(status.code) + ") in " +
                    status.call + ": " + status.text;
  return -1;
}

int Fail(const std::string& text) {
  last_error = {};
  last_error_text = text;
  return -1;
}

class TransferQueue {
 public:
  // Lives to the end of the process, as its thread does.
  static TransferQueue& Get() {
    static TransferQueue* const queue = new TransferQueue;
    return *queue;
  }

  void Open(const DeviceStream& where, bool urgent) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto stream = std::make_shared<Stream>();
    stream->where = where;
    stream->urgent = urgent;
    streams_[where.stream] = stream;
    PutLast(std::move(stream));
  }

  Status Close(std::int64_t handle) {
    std::shared_ptr<Stream> stream;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto found = streams_.find(handle);
      if (found == streams_.end()) return {};
      stream = found->second;
      changed_.wait(lock, [&] { return stream->transfers.empty() && !stream->submitting; });
      const auto place = std::find(order_.begin(), order_.end(), stream);
      if (place == order_.end()) return {};  // another thread has closed it meanwhile
      order_.erase(place);
      streams_.erase(handle);
    }
    DeviceGuard guard(stream->where.device);
    PADDLE_KV_RETURN_IF_ERROR(guard.status());
    const CaptureTolerance tolerance;  // CUDA would refuse to free memory, and end the capture
    const Status status = ToStatus(cudaStreamSynchronize(StreamOf(stream->where)), "cudaStreamSynchronize");
    for (const auto& flight : stream->flights) cudaEventDestroy(flight.end);
    for (const cudaEvent_t event : stream->idle_events) cudaEventDestroy(event);
    for (auto& engine : stream->engines) engine.reset();
    return status;
  }

  bool Submit(std::int64_t handle, QueuedTransfer transfer) {
    std::multimap<std::int64_t, Status> events;
    for (const std::int64_t event : transfer.record_events) events.emplace(event, Status{});
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return false;
    transfer.number = enqueued_;
    found->second->transfers.push_back(std::move(transfer));
    // Nothing is thrown from here on: an event that is pending without a transfer would stay so.
    ++enqueued_;
    for (const auto& event : events) failed_.erase(event.first);  // of a transfer that had it before
    pending_.merge(events);
    work_.notify_one();
    return true;
  }

  std::int64_t Enqueued() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return enqueued_;
  }

  std::int64_t Submitted() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::int64_t submitted = enqueued_;
    for (const auto& entry : streams_) {
      const auto& transfers = entry.second->transfers;
      if (!transfers.empty()) submitted = std::min(submitted, transfers.front().number);
    }
    return submitted;
  }

  bool Flush(std::int64_t handle, std::int64_t timeout_us) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return true;
    const std::shared_ptr<Stream> stream = found->second;
    const std::int64_t end = enqueued_;  // others may go on enqueuing
    return WaitFor(lock, timeout_us,
                   [&] { return stream->transfers.empty() || stream->transfers.front().number >= end; });
  }

  bool WaitRecorded(std::int64_t event, std::int64_t timeout_us) {
    std::unique_lock<std::mutex> lock(mutex_);
    return WaitFor(lock, timeout_us, [&] { return pending_.count(event) == 0; });
  }

  bool IsPending(std::int64_t event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pending_.count(event) != 0;
  }

  bool Failure(std::int64_t event, Status* status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = failed_.find(event);
    if (found == failed_.end()) return false;
    *status = found->second;
    return true;
  }

  bool Forget(std::int64_t event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failed_.erase(event) != 0;
  }

  void SetThresholds(const EngineThresholds& thresholds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    thresholds_ = thresholds;
  }

  void ComputeIsBusy() { compute_seen_ = Clock::now().time_since_epoch().count(); }

 private:
  TransferQueue() { std::thread(&TransferQueue::SubmitForever, this).detach(); }

  template <class Condition>
  bool WaitFor(std::unique_lock<std::mutex>& lock, std::int64_t timeout_us, Condition condition) {
    if (timeout_us < 0) {
      changed_.wait(lock, condition);
      return true;
    }
    const std::chrono::microseconds timeout(timeout_us);
    return changed_.wait_for(lock, std::min<std::chrono::microseconds>(timeout, Tuning::kLongestWait), condition);
  }

  // Behind the others that are as urgent.
  void PutLast(std::shared_ptr<Stream> stream) {
    const auto less_urgent = [&](const auto& other) { return stream->urgent && !other->urgent; };
    order_.insert(std::find_if(order_.begin(), order_.end(), less_urgent), std::move(stream));
  }

  void SubmitForever() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      bool queued = false;
      bool submitted = false;
      for (std::size_t i = 0; i < order_.size(); ++i) {
        const std::shared_ptr<Stream> candidate = order_[i];
        Step step;
        if (candidate->transfers.empty()) continue;
        queued = true;
        if (!NextStep(*candidate, &step)) continue;
        // The others are next: small transfers that come as fast as they are submitted must not hold them up for ever.
        order_.erase(order_.begin() + static_cast<std::ptrdiff_t>(i));
        PutLast(candidate);
        SubmitStep(lock, *candidate, step);
        submitted = true;
        break;  // an urgent one may have come meanwhile, or a stream gone
      }
      if (submitted) continue;
      if (queued) {
        work_.wait_for(lock, Tuning::kPoll);
      } else {
        work_.wait(lock);
      }
    }
  }

  bool ComputeWasBusy() const {
    return Clock::now().time_since_epoch() - Clock::duration(compute_seen_.load()) < Tuning::kComputeSeen;
  }

  // Under the lock. False: nothing that may be submitted yet.
  bool NextStep(Stream& stream, Step* step) {
    QueuedTransfer& transfer = stream.transfers.front();
    std::int64_t group = transfer.next_group;
    for (std::int64_t w = transfer.first_wait[group]; w < transfer.first_wait[group + 1]; ++w) {
      if (pending_.count(transfer.wait_events[w]) != 0) return false;
    }
    step->transfer = &transfer;
    step->first_group = group;
    if (!transfer.failure.ok()) {
      step->engine = transfer.last_engine;
      step->end_group = group + 1;
      return true;
    }
    while (!stream.flights.empty() && !IsNotReady(cudaEventQuery(stream.flights.front().end))) {
      stream.bytes_in_flight -= stream.flights.front().bytes;
      stream.idle_events.push_back(stream.flights.front().end);
      stream.flights.pop_front();
    }
    step->engine = transfer.engine;
    if (transfer.more_follows) {
      step->engine = transfer.last_engine;
    } else if (group < transfer.end_without_memory) {
      step->engine = EngineKind::kCopyEngine;
    } else if (step->engine == EngineKind::kAuto) {
      step->engine = ChooseEngine(transfer.sizes, transfer.direction, ComputeWasBusy(), thresholds_);
    }
    const std::int64_t largest =
        step->engine == EngineKind::kCopyEngine ? Tuning::kCopyEngineBytes : Tuning::kKernelBytes;
    if (stream.flights.size() >= Tuning::kFewestInFlight &&
        stream.bytes_in_flight >= largest * (Tuning::kCallsInFlight - 1)) {
      return false;
    }
    const auto follows_at_once = [&](std::int64_t next) {
      return next < transfer.group_count() && transfer.first_wait[next] == transfer.first_wait[next + 1];
    };
    if (step->engine == EngineKind::kCopyEngine && transfer.GroupBytes(group) > largest) {
      step->blocks = transfer.BlocksOfPart(largest);
      step->begins = transfer.submitted_blocks == 0;
      step->ends = transfer.submitted_blocks + step->blocks == transfer.block_count;
      step->bytes = transfer.GroupBytes(group) / transfer.block_count * step->blocks;
      step->end_group = group + 1;
      step->more_follows = !step->ends || follows_at_once(group + 1);
      return true;
    }
    // Calls of kernels are worth more when they are long; what the copy engine is given has a bound.
    const auto room = [&] {
      return step->engine == EngineKind::kCopyEngine ? step->bytes + transfer.GroupBytes(group) <= largest
                                                     : step->bytes < largest;
    };
    do {
      step->bytes += transfer.GroupBytes(group);
      ++group;
      step->more_follows = follows_at_once(group);
    } while (step->more_follows && room());
    step->end_group = group;
    return true;
  }

  void SubmitStep(std::unique_lock<std::mutex>& lock, Stream& stream, Step step) {
    QueuedTransfer& transfer = *step.transfer;  // others append behind it, this thread alone removes it
    stream.submitting = true;
    lock.unlock();
    Status status = transfer.failure;
    if (status.ok()) status = MakeCurrent(stream.where.device);
    try {
      if (status.ok()) status = Enqueue(stream, &step);
    } catch (const std::bad_alloc&) {
      status = ToStatus(cudaErrorMemoryAllocation, "host memory for a transfer");
    }
    if (!status.ok()) PassOver(stream, step);
    lock.lock();
    stream.submitting = false;
    for (std::int64_t g = step.first_group; g < step.RecordedEnd(); ++g) {
      auto recorded = pending_.extract(pending_.find(transfer.record_events[g]));
      if (status.ok()) continue;
      recorded.mapped() = status;
      failed_.insert(std::move(recorded));
    }
    transfer.failure = status;
    transfer.next_group = step.RecordedEnd();
    transfer.submitted_blocks = step.ends ? 0 : transfer.submitted_blocks + step.blocks;
    transfer.more_follows = step.more_follows;
    transfer.last_engine = step.engine;
    if (transfer.next_group == transfer.group_count()) stream.transfers.pop_front();
    changed_.notify_all();
  }

  // The thread's device is never put back, and nothing is asked of CUDA before the first one is made current: a thread
  // begins on device 0, and any call there would make a context, half a gigabyte that a process which works on another
  // GPU has no use for.
  Status MakeCurrent(int device) {
    if (device == current_device_) return {};
    PADDLE_KV_CUDA(cudaSetDevice(device));
    current_device_ = device;
    if (!tolerance_) tolerance_.emplace();
    return {};
  }

  // Copies nothing, but the events keep the order: they come behind what was submitted of the transfer, part of which
  // may run, and behind what the groups had to wait for. A later transfer of the same blocks waits for them alone.
  static void PassOver(Stream& stream, const Step& step) {
    const QueuedTransfer& transfer = *step.transfer;
    const cudaStream_t handle = StreamOf(stream.where);
    for (auto& engine : stream.engines) {
      if (engine != nullptr) engine->Join(stream.where);
    }
    for (std::int64_t w = transfer.first_wait[step.first_group]; w < transfer.first_wait[step.first_group + 1]; ++w) {
      ToStatus(cudaStreamWaitEvent(handle, EventOf(transfer.wait_events[w]), 0), "cudaStreamWaitEvent");
    }
    for (std::int64_t g = step.first_group; g < step.RecordedEnd(); ++g) {
      ToStatus(cudaEventRecord(EventOf(transfer.record_events[g]), handle), "cudaEventRecord");
    }
  }

  static Engine& EngineOf(Stream& stream, EngineKind kind) {
    std::unique_ptr<Engine>& engine = stream.engines[static_cast<int>(kind)];
    if (engine == nullptr) {
      engine = kind == EngineKind::kKernel    ? MakeKernelEngine(stream.where.device)
               : kind == EngineKind::kStaging ? MakeStagingEngine(stream.where.device)
                                              : MakeCopyEngine(stream.where.device);
    }
    return *engine;
  }

  static Status Copy(Stream& stream, Step* step) {
    QueuedTransfer& transfer = *step->transfer;
    const std::vector<Run> part = transfer.TakePart(step->blocks);
    const EngineWork work = {transfer.plan.get(),
                             transfer.direction,
                             step->blocks == 0 ? &transfer.runs : &part,
                             transfer.FirstLayer(step->first_group),
                             transfer.FirstLayer(step->end_group),
                             transfer.layers_per_event,
                             step->ends ? &transfer.record_events[step->first_group] : nullptr,
                             step->more_follows};
    Engine& engine = EngineOf(stream, step->engine);
    const Status status = engine.Copy(work, stream.where);
    if (status.code != cudaErrorMemoryAllocation || transfer.engine != EngineKind::kAuto ||
        step->engine == EngineKind::kCopyEngine) {
      return status;
    }
    // A server fills the memory of its GPU, and the copy engine needs none: it is given these groups, in calls of its
    // own size. What has been enqueued is copied once more.
    PADDLE_KV_RETURN_IF_ERROR(engine.Join(stream.where));
    transfer.end_without_memory = step->end_group;
    step->bytes = 0;
    step->ends = step->more_follows = false;
    return {};
  }

  Status Enqueue(Stream& stream, Step* step) {
    QueuedTransfer& transfer = *step->transfer;
    static const NvtxName names[] = {NvtxName("submit offload, first layer"), NvtxName("submit onload, first layer")};
    const NvtxRange range(names[static_cast<int>(transfer.direction)], transfer.FirstLayer(step->first_group));
    const cudaStream_t handle = StreamOf(stream.where);
    const std::int64_t first_wait = transfer.first_wait[step->first_group];
    const std::int64_t end_wait = step->begins ? transfer.first_wait[step->first_group + 1] : first_wait;
    for (std::int64_t w = first_wait; w < end_wait; ++w) {
      const cudaEvent_t event = EventOf(transfer.wait_events[w]);
      // What a transfer has to wait for is the model's work, most of the time.
      if (IsNotReady(cudaEventQuery(event))) ComputeIsBusy();
      PADDLE_KV_CUDA(cudaStreamWaitEvent(handle, event, 0));
    }
    if (step->begins && step->first_group == 0) PADDLE_KV_CUDA(cudaEventRecord(EventOf(transfer.start_event), handle));
    PADDLE_KV_RETURN_IF_ERROR(Copy(stream, step));
    if (stream.idle_events.empty()) {
      // Room for all that there are: they come back under the lock, where an exception would end the process.
      stream.idle_events.reserve(stream.flights.size() + 1);
      cudaEvent_t made = nullptr;
      PADDLE_KV_CUDA(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
      stream.idle_events.push_back(made);
    }
    PADDLE_KV_CUDA(cudaEventRecord(stream.idle_events.back(), handle));
    stream.flights.push_back({stream.idle_events.back(), step->bytes});
    stream.idle_events.pop_back();
    stream.bytes_in_flight += step->bytes;
    return {};
  }

  std::mutex mutex_;
  std::condition_variable work_;     // for the thread: there is more to submit
  std::condition_variable changed_;  // for callers: something was submitted
  std::int64_t enqueued_ = 0;
  std::map<std::int64_t, std::shared_ptr<Stream>> streams_;
  std::vector<std::shared_ptr<Stream>> order_;  // urgent ones first, the last served last
  // Events that are still to be recorded, and those that failed. An entry moves over: to note a failure takes no
  // memory.
  std::multimap<std::int64_t, Status> pending_;
  std::map<std::int64_t, Status> failed_;
  EngineThresholds thresholds_;
  int current_device_ = -1;                    // of the thread
  std::optional<CaptureTolerance> tolerance_;  // of the thread
  std::atomic<Clock::rep> compute_seen_{Clock::duration::min().count() / 2};
};

// A C++ exception must not reach the caller's C.
template <class Function>
int Guarded(Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    return Fail(error.what());
  }
}

// The same for a number. A queue whose thread could not be started is none, and nothing is in it.
template <class Function>
std::int64_t Counted(Function function) {
  try {
    return function();
  } catch (const std::exception&) {
    return 0;
  }
}

}  // namespace
}  // namespace paddle_kv

using namespace paddle_kv;

const char* paddle_kv_queue_error(int* code, const char** name) {
  *code = last_error.code;
  *name = last_error.ok() ? "" : last_error.name;
  return last_error_text.c_str();
}

int paddle_kv_queue_open(int device, std::int64_t stream, int urgent) {
  return Guarded([&] {
    TransferQueue::Get().Open({device, stream}, urgent != 0);
    return 0;
  });
}

int paddle_kv_queue_close(std::int64_t stream) {
  return Guarded([&] {
    const Status status = TransferQueue::Get().Close(stream);
    return status.ok() ? 0 : Fail(status);
  });
}

int paddle_kv_queue_submit(const PaddleKvTransfer* given) {
  return Guarded([&] {
    static const NvtxName name("enqueue a transfer, blocks");
    const NvtxRange range(name, given->block_count);
    QueuedTransfer transfer;
    transfer.plan = FindTransferPlan(given->plan);
    if (transfer.plan == nullptr) return Fail("plan = " + std::to_string(given->plan) + " is not registered");
    transfer.direction = static_cast<Direction>(given->direction);
    transfer.engine = static_cast<EngineKind>(given->engine);
    transfer.runs = MergeRuns(given->host_ids, given->device_ids, given->block_count);
    if (transfer.direction == Direction::kDeviceToHost) {
      for (Run& run : transfer.runs) std::swap(run.source, run.target);
    }
    transfer.sizes = SizesOfPieces(*transfer.plan, transfer.direction, transfer.runs);
    transfer.first_layer = given->first_layer;
    transfer.end_layer = given->end_layer;
    const std::int64_t layers = given->end_layer - given->first_layer;
    if (layers <= 0) return 0;
    transfer.block_count = given->block_count;
    // Whoever wants one event for all may name any number: arithmetic with that would overflow.
    transfer.layers_per_event = std::clamp<std::int64_t>(given->layers_per_event, 1, layers);
    const std::int64_t groups = (layers + transfer.layers_per_event - 1) / transfer.layers_per_event;
    transfer.first_wait.assign(groups + 1, 0);
    std::partial_sum(given->waits_per_group, given->waits_per_group + groups, transfer.first_wait.begin() + 1);
    transfer.wait_events.assign(given->wait_events, given->wait_events + transfer.first_wait.back());
    transfer.start_event = given->start_event;
    transfer.record_events.assign(given->record_events, given->record_events + groups);
    for (std::int64_t t = 0; t < transfer.plan->tensors_per_layer; ++t) {
      transfer.layer_bytes += transfer.plan->tensors[t].block_bytes * given->block_count;
    }
    if (!TransferQueue::Get().Submit(given->stream, std::move(transfer))) return Fail("the stream is not open");
    return 0;
  });
}

std::int64_t paddle_kv_queue_enqueued() {
  return Counted([] { return TransferQueue::Get().Enqueued(); });
}

std::int64_t paddle_kv_queue_submitted() {
  return Counted([] { return TransferQueue::Get().Submitted(); });
}

int paddle_kv_queue_flush(std::int64_t stream, std::int64_t timeout_us) {
  return Guarded([&] { return TransferQueue::Get().Flush(stream, timeout_us) ? 0 : 1; });
}

int paddle_kv_queue_wait_stream(int device, std::int64_t stream, std::int64_t event, std::int64_t timeout_us) {
  return Guarded([&] {
    TransferQueue& queue = TransferQueue::Get();
    if (!queue.WaitRecorded(event, timeout_us)) return 1;
    DeviceGuard guard(device);
    if (!guard.status().ok()) return Fail(guard.status());
    const auto handle = reinterpret_cast<cudaStream_t>(stream);
    const CaptureTolerance tolerance;
    if (IsNotReady(cudaStreamQuery(handle))) queue.ComputeIsBusy();
    const Status status = ToStatus(cudaStreamWaitEvent(handle, EventOf(event), 0), "cudaStreamWaitEvent");
    return status.ok() ? 0 : Fail(status);
  });
}

int paddle_kv_queue_query(int device, const std::int64_t* events, std::int64_t event_count) {
  return Guarded([&] {
    TransferQueue& queue = TransferQueue::Get();
    DeviceGuard guard(device);
    if (!guard.status().ok()) return Fail(guard.status());
    const CaptureTolerance tolerance;
    for (const std::int64_t* event = events; event != events + event_count; ++event) {
      if (queue.IsPending(*event)) return 1;
      const cudaError_t result = cudaEventQuery(EventOf(*event));
      if (IsNotReady(result)) return 1;
      if (result != cudaSuccess) return Fail(ToStatus(result, "cudaEventQuery"));
      Status failure;
      if (queue.Failure(*event, &failure)) return Fail(failure);
    }
    return 0;
  });
}

int paddle_kv_queue_push_device(int device) {
  return Guarded([&] {
    const Status status = ToStatus(PushDevice(device), "cuCtxPushCurrent");
    return status.ok() ? 0 : Fail(status);
  });
}

void paddle_kv_queue_pop_device() { PopDevice(); }

int paddle_kv_queue_forget(std::int64_t event) {
  return Guarded([&] { return TransferQueue::Get().Forget(event) ? 1 : 0; });
}

int paddle_kv_queue_set_thresholds(const std::int64_t* nine) {
  return Guarded([&] {
    EngineThresholds thresholds;
    for (int i = 0; i < 4; ++i) thresholds.copy_engine[i / 2][i % 2] = nine[i];
    for (int i = 0; i < 4; ++i) thresholds.staging[i / 2][i % 2] = nine[4 + i];
    thresholds.staging_block = nine[8];
    TransferQueue::Get().SetThresholds(thresholds);
    return 0;
  });
}
