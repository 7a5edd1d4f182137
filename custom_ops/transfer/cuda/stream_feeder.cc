#include "paddle_kv/transfer/stream_feeder.h"

#include <utility>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/nvtx_range.h"
#include "paddle_kv/transfer/engine_events.cuh"

namespace paddle_kv {
namespace {

constexpr std::size_t kFewestInFlight = 2;  // of whatever size: the link never waits for the next call

}  // namespace

void StreamFeeder::UpdateFlights() {
  while (!flights_.empty() && !IsNotReady(cudaEventQuery(flights_.front().end.get()))) {
    bytes_in_flight_ -= flights_.front().bytes;
    idle_events_.push_back(std::move(flights_.front().end));
    flights_.pop_front();
  }
}

bool StreamFeeder::MustWait(const QueuedTransfer& transfer) {
  const std::int64_t end = transfer.first_wait[transfer.next_group + 1];
  for (std::int64_t w = transfer.first_wait[transfer.next_group]; w < end; ++w) {
    if (IsNotReady(cudaEventQuery(EventOf(transfer.wait_events[w])))) return true;
  }
  return false;
}

bool StreamFeeder::HasRoom(std::int64_t bytes_before) const {
  return flights_.size() < kFewestInFlight || bytes_in_flight_ < bytes_before;
}

Status StreamFeeder::Submit(QueuedTransfer& transfer, Step* step, bool* was_compute_busy) {
  static const NvtxName names[] = {NvtxName("submit offload, first layer"), NvtxName("submit onload, first layer")};
  const NvtxRange range(names[static_cast<int>(transfer.direction)], transfer.FirstLayer(step->first_group));
  const cudaStream_t handle = StreamOf(where_);
  const std::int64_t first_wait = transfer.first_wait[step->first_group];
  const std::int64_t end_wait = step->begins ? transfer.first_wait[step->first_group + 1] : first_wait;
  for (std::int64_t w = first_wait; w < end_wait; ++w) {
    const cudaEvent_t event = EventOf(transfer.wait_events[w]);
    // What a transfer has to wait for is the model's work, most of the time.
    if (IsNotReady(cudaEventQuery(event))) *was_compute_busy = true;
    PADDLE_KV_CUDA(cudaStreamWaitEvent(handle, event, 0));
  }
  if (!transfer.plan->inside_device) step->beside_compute |= *was_compute_busy;
  PADDLE_KV_RETURN_IF_ERROR(Copy(transfer, step));
  if (idle_events_.empty()) {
    idle_events_.reserve(flights_.size() + 1);  // room for all that there are: they come back where nothing may throw
    CudaEvent made;
    PADDLE_KV_CUDA(MakeEvent(&made));
    idle_events_.push_back(std::move(made));
  }
  CudaEvent end = std::move(idle_events_.back());
  idle_events_.pop_back();
  PADDLE_KV_CUDA(cudaEventRecord(end.get(), handle));
  flights_.push_back({std::move(end), transfer.BytesInFlight(*step)});
  bytes_in_flight_ += flights_.back().bytes;
  return {};
}

Status StreamFeeder::Copy(QueuedTransfer& transfer, Step* step) {
  const std::vector<Run> part = transfer.TakePart(step->blocks);
  const EngineWork work = {transfer.plan.get(),
                           transfer.direction,
                           step->blocks == 0 ? &transfer.runs() : &part,
                           transfer.FirstLayer(step->first_group),
                           transfer.FirstLayer(step->end_group),
                           transfer.layers_per_event,
                           transfer.layers_per_band(),
                           step->ends ? &transfer.record_events[step->first_group] : nullptr,
                           step->more_follows,
                           step->beside_compute,
                           step->begins && step->first_group == 0 ? transfer.start_event : 0};
  Engine& engine = EngineOf(step->engine);
  const Status status = engine.Copy(work, where_);
  if (status.code != cudaErrorMemoryAllocation || transfer.engine != EngineKind::kAuto ||
      step->engine == EngineKind::kCopyEngine) {
    return status;
  }
  // A server fills the memory of its GPU, and the copy engine needs none: it is given these groups, in calls of its own
  // size. What has been enqueued is copied once more.
  PADDLE_KV_RETURN_IF_ERROR(engine.Join(where_));
  transfer.end_without_memory = step->end_group;
  transfer.TakeAllAgain();
  step->blocks = 0;
  step->bytes = 0;
  step->ends = step->more_follows = false;
  return {};
}

Engine& StreamFeeder::EngineOf(EngineKind kind) {
  std::unique_ptr<Engine>& engine = engines_[static_cast<int>(kind)];
  if (engine == nullptr) {
    engine = kind == EngineKind::kKernel    ? MakeKernelEngine(where_.device)
             : kind == EngineKind::kStaging ? MakeStagingEngine(where_.device)
                                            : MakeCopyEngine(where_.device);
  }
  return *engine;
}

void StreamFeeder::PassOver(const QueuedTransfer& transfer, const Step& step) {
  const cudaStream_t handle = StreamOf(where_);
  for (auto& engine : engines_) {
    if (engine != nullptr) engine->Join(where_);
  }
  for (std::int64_t w = transfer.first_wait[step.first_group]; w < transfer.first_wait[step.first_group + 1]; ++w) {
    ToStatus(cudaStreamWaitEvent(handle, EventOf(transfer.wait_events[w]), 0), "cudaStreamWaitEvent");
  }
  if (step.begins && step.first_group == 0) {
    ToStatus(cudaEventRecord(EventOf(transfer.start_event), handle), "cudaEventRecord");
  }
  for (std::int64_t g = step.first_group; g < step.RecordedEnd(); ++g) {
    ToStatus(cudaEventRecord(EventOf(transfer.record_events[g]), handle), "cudaEventRecord");
  }
}

Status StreamFeeder::Close() {
  const DeviceGuard guard(where_.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  const CaptureTolerance tolerance;  // CUDA would refuse to free memory, and end the capture
  const Status status = ToStatus(cudaStreamSynchronize(StreamOf(where_)), "cudaStreamSynchronize");
  flights_.clear();
  idle_events_.clear();
  for (auto& engine : engines_) engine.reset();
  return status;
}

}  // namespace paddle_kv
