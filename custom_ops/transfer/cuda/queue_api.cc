// The C interface of the queue: checks what it is given, and keeps exceptions from the caller's C.
#include "paddle_kv/transfer/queue_api.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/cuda_device.h"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/nvtx_range.h"
#include "paddle_kv/transfer/c_call.h"
#include "paddle_kv/transfer/check_transfer.h"
#include "paddle_kv/transfer/device_plan.h"
#include "paddle_kv/transfer/engine_events.cuh"
#include "paddle_kv/transfer/transfer_plan.h"
#include "paddle_kv/transfer/transfer_queue.h"

namespace paddle_kv {
namespace {

// As Guarded, for a number. A queue whose thread could not be started is none, and nothing is in it.
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

int paddle_kv_queue_register_device_plan(const PaddleKvDevicePlan* given) {
  return Guarded([&] {
    if (given == nullptr) return Fail("plan is null");
    std::shared_ptr<TransferPlan> plan;
    const std::string wrong = MakeDevicePlan(*given, &plan);
    if (!wrong.empty()) return Fail(wrong);
    if (AddTransferPlan(given->number, std::move(plan))) return 0;
    return Fail("plan = " + std::to_string(given->number) + " is already registered");
  });
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
    if (given == nullptr) return Fail("transfer is null");
    static const NvtxName name("enqueue a transfer, blocks");
    const NvtxRange range(name, given->block_count);
    const std::shared_ptr<const TransferPlan> plan = FindTransferPlan(given->plan);
    if (plan == nullptr) return Fail("plan = " + std::to_string(given->plan) + " is not registered");
    const std::string wrong = WhatIsWrong(*given, *plan);
    if (!wrong.empty()) return Fail(wrong);
    if (given->end_layer == given->first_layer) {
      if (given->watch >= 0) TransferQueue::Get().AddWatch(plan->device, given->watch, nullptr, 0);
      return 0;
    }
    QueuedTransfer transfer(*given, plan);
    if (!TransferQueue::Get().Submit(given->stream, std::move(transfer), given->watch)) {
      return Fail("stream = " + std::to_string(given->stream) + " is not open on GPU " + std::to_string(plan->device));
    }
    return 0;
  });
}

int paddle_kv_queue_submit_by_marks(const PaddleKvTransfer* given, const std::int64_t* start_events) {
  return Guarded([&] {
    if (given == nullptr) return Fail("transfer is null");
    const std::shared_ptr<const TransferPlan> plan = FindTransferPlan(given->plan);
    if (plan == nullptr) return Fail("plan = " + std::to_string(given->plan) + " is not registered");
    const std::string wrong = WhatIsWrongByMarks(*given, start_events, *plan);
    if (!wrong.empty()) return Fail(wrong);
    auto transfer = std::make_shared<TransferByMarks>(*given, start_events, plan);
    if (TransferQueue::Get().SubmitByMarks(given->token, std::move(transfer))) return 0;
    return Fail("stream = " + std::to_string(given->stream) + " is not open on GPU " + std::to_string(plan->device));
  });
}

int paddle_kv_queue_mark(std::int64_t token, std::int64_t layer, std::int64_t compute_stream) {
  return Guarded([&] {
    Status status;
    const Marked marked = TransferQueue::Get().Mark(token, layer, compute_stream, &status);
    return status.ok() ? static_cast<int>(marked) : Fail(status);
  });
}

std::int64_t paddle_kv_queue_take_enqueued(std::int64_t token, std::int64_t first, int ends, std::int64_t* groups) {
  return Counted([&] { return TransferQueue::Get().TakeEnqueued(token, first, ends != 0, groups); });
}

int paddle_kv_queue_cancel(std::int64_t stream, std::int64_t token, std::int64_t* first_dropped_layer) {
  return Guarded([&] {
    if (TransferQueue::Get().Cancel(stream, token, first_dropped_layer)) return 0;
    return Fail("stream = " + std::to_string(stream) + " is not open");
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

int paddle_kv_queue_is_capturing(int device, std::int64_t stream) {
  return Guarded([&] {
    DeviceGuard guard(device);
    if (!guard.status().ok()) return Fail(guard.status());
    bool is_capturing = false;
    const Status status = StreamIsCapturing({device, stream}, &is_capturing);
    return status.ok() ? static_cast<int>(is_capturing) : Fail(status);
  });
}

int paddle_kv_queue_record(int device, std::int64_t event, std::int64_t stream) {
  return Guarded([&] {
    DeviceGuard guard(device);
    if (!guard.status().ok()) return Fail(guard.status());
    const Status status =
        ToStatus(cudaEventRecord(EventOf(event), reinterpret_cast<cudaStream_t>(stream)), "cudaEventRecord");
    return status.ok() ? 0 : Fail(status);
  });
}

int paddle_kv_queue_wait_stream(int device, std::int64_t stream, std::int64_t event, std::int64_t timeout_us) {
  return Guarded([&] {
    TransferQueue& queue = TransferQueue::Get();
    if (!queue.WaitRecorded(event, timeout_us)) return 1;
    DeviceGuard guard(device);
    if (!guard.status().ok()) return Fail(guard.status());
    const auto handle = reinterpret_cast<cudaStream_t>(stream);
    if (queue.AsksForCompute(device)) {  // the driver answers slowly while another thread is in it
      const CaptureTolerance tolerance;
      if (IsNotReady(cudaStreamQuery(handle))) queue.ComputeIsBusy(device);
    }
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
      if (queue.Failure(*event, &failure)) return Fail(failure, device);
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

int paddle_kv_queue_set_costs(int device, const std::int64_t* costs) {
  return Guarded([&] {
    EngineCosts given;
    for (EngineCosts::Ways* ways : {given.copy_engine, given.kernel, given.staging}) {
      for (int direction = 0; direction < 2; ++direction) {
        for (EngineCosts::OfSizes* of : {&ways[direction].alone, &ways[direction].beside}) {
          std::copy_n(costs, EngineCosts::kSizes, of->begin());
          costs += EngineCosts::kSizes;
        }
      }
    }
    TransferQueue::Get().SetCosts(device, given);
    return 0;
  });
}

int paddle_kv_completions_open() {
  return Guarded([&] {
    const int descriptor = TransferQueue::Get().OpenCompletions();
    return descriptor >= 0 ? descriptor : Fail(std::string("eventfd: ") + std::strerror(errno));
  });
}

int paddle_kv_queue_watch(int device, std::int64_t token, const std::int64_t* events, std::int64_t count) {
  return Guarded([&] {
    if (count < 0 || (count > 0 && events == nullptr)) return Fail("count = " + std::to_string(count) + " events");
    TransferQueue::Get().AddWatch(device, token, events, count);
    return 0;
  });
}

int paddle_kv_queue_hear(std::int64_t token, std::int64_t timeout_us) {
  return Guarded([&] { return static_cast<int>(TransferQueue::Get().Hear(token, timeout_us)); });
}

int paddle_kv_queue_end_hearing(std::int64_t token, int is_done) {
  return Guarded([&] {
    TransferQueue::Get().EndHearing(token, is_done != 0);
    return 0;
  });
}

std::int64_t paddle_kv_completions_take(std::int64_t* tokens, std::int64_t capacity) {
  return Counted([&] { return TransferQueue::Get().TakeCompletions(tokens, capacity); });
}
