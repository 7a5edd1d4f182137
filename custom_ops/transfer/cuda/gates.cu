#include "paddle_kv/transfer/gates.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/cuda_owners.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/stream_waits.cuh"
#include "paddle_kv/transfer/c_call.h"
#include "paddle_kv/transfer/copy_rows.h"
#include "paddle_kv/transfer/copy_segments.h"
#include "paddle_kv/transfer/transfer_queue.h"

namespace paddle_kv {
namespace {

constexpr int kRemembered = 64;    // turns that were given up
constexpr unsigned kPollNs = 100;  // between two looks at a closed gate
constexpr int kHostLook = 16;      // so many looks at device memory to one at host memory
constexpr int kMostLayers = 1 << 16;
constexpr std::uint32_t kRenewed = 1 << 20;  // turns

// In device memory, followed by `through`: the turn to which each layer has come.
struct Turns {
  std::uint32_t load;
  std::uint32_t save;
  std::uint32_t given_up;
};

// In host memory: entry turn % kRemembered. Behind them `seen_through`, as `through` and told by the host, and
// `marked`: the turn of each layer's last mark.
struct GivenUp {
  std::uint32_t turn;
  std::uint32_t layer_and_one;  // written first; 0: nothing was given up
};

struct GateView {
  Turns* turns;
  std::uint32_t* through;
  GivenUp* given_up;
  std::uint32_t* seen_through;
  std::uint32_t* marked;
};

__host__ __device__ bool HasReached(std::uint32_t turn, std::uint32_t wanted) {
  return static_cast<std::int32_t>(turn - wanted) >= 0;
}

__device__ std::uint32_t Load(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// What was written before the word is seen behind this.
__device__ std::uint32_t LoadAcquire(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ void StoreRelease(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ void RaiseTo(std::uint32_t* word, std::uint32_t turn) {
  std::uint32_t seen = Load(word);
  while (!HasReached(seen, turn)) {
    const std::uint32_t before = atomicCAS_system(word, seen, turn);
    if (before == seen) return;
    seen = before;
  }
}

__device__ std::uint64_t NowNs() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ void WaitAtGateOf(const GateView& gates, int layer, std::uint64_t timeout_ns) {
  const std::uint32_t turn = Load(&gates.turns->load);
  if (HasReached(LoadAcquire(gates.through + layer), turn)) return;
  const std::uint64_t end_ns = NowNs() + timeout_ns;
  for (int look = 0; !HasReached(LoadAcquire(gates.through + layer), turn); ++look) {
    if (HasReached(Load(&gates.turns->given_up), turn)) return;
    if (look % kHostLook == 0 && HasReached(LoadAcquire(gates.seen_through + layer), turn)) return;
    if (NowNs() >= end_ns) {
      GivenUp* const entry = gates.given_up + turn % kRemembered;
      entry->layer_and_one = layer + 1;
      __threadfence_system();
      StoreRelease(&entry->turn, turn);
      RaiseTo(&gates.turns->given_up, turn);
      return;
    }
    __nanosleep(kPollNs);
  }
}

__global__ void WaitAtGate(const GateView gates, int layer, std::uint64_t timeout_ns) {
  WaitAtGateOf(gates, layer, timeout_ns);
}

__global__ void MarkLayer(const GateView gates, int layer) {
  StoreRelease(gates.marked + layer, Load(&gates.turns->save));
}

// Two threads: the mark does not hold up the wait.
__global__ void MarkLayerAndWait(const GateView gates, int layer, std::uint64_t timeout_ns) {
  if (threadIdx.x == 0) {
    StoreRelease(gates.marked + layer, Load(&gates.turns->save));
  } else if (threadIdx.x == 32) {
    WaitAtGateOf(gates, layer + 1, timeout_ns);
  }
}

cudaStream_t StreamOf(std::int64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

class Gates : public GateWords {
 public:
  Gates(int device, int num_layers, std::uint64_t timeout_ns)
      : device(device), num_layers(num_layers), timeout_ns_(timeout_ns) {}

  Status Make() {
    const CaptureTolerance tolerance;
    const std::size_t device_bytes = sizeof(Turns) + num_layers * sizeof(std::uint32_t);
    const std::size_t host_bytes = kRemembered * sizeof(GivenUp) + 2 * num_layers * sizeof(std::uint32_t);
    PADDLE_KV_CUDA(cudaMalloc(device_memory_.Receive(), device_bytes));
    PADDLE_KV_CUDA(cudaHostAlloc(host_memory_.Receive(), host_bytes, cudaHostAllocMapped));
    std::memset(host_memory_.get(), 0, host_bytes);
    void* mapped = nullptr;
    PADDLE_KV_CUDA(cudaHostGetDevicePointer(&mapped, host_memory_.get(), 0));
    view_.turns = static_cast<Turns*>(device_memory_.get());
    view_.through = reinterpret_cast<std::uint32_t*>(view_.turns + 1);
    SetHostWords(&view_, mapped);
    SetHostWords(&on_host_, host_memory_.get());
    int lowest = 0, highest = 0;
    PADDLE_KV_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    PADDLE_KV_CUDA(cudaStreamCreateWithPriority(through_stream_.Receive(), cudaStreamNonBlocking, highest));
    PADDLE_KV_CUDA(cudaStreamCreateWithFlags(marks_stream_.Receive(), cudaStreamNonBlocking));
    const cudaStream_t stream = through_stream_.get();
    PADDLE_KV_CUDA(cudaMemsetAsync(device_memory_.get(), 0, device_bytes, stream));
    // The first launch of a kernel loads it, and that may wait for the device: never beside a closed gate. That holds
    // for the kernels of the transfers that open it, too.
    PADDLE_KV_RETURN_IF_ERROR(Wait(0, stream));
    PADDLE_KV_RETURN_IF_ERROR(Mark(0, stream));
    if (num_layers > 1) PADDLE_KV_RETURN_IF_ERROR(MarkAndWait(0, stream));
    PADDLE_KV_RETURN_IF_ERROR(Arm(0, 0, stream));
    const DeviceStream where = {device, reinterpret_cast<std::int64_t>(stream)};
    PADDLE_KV_RETURN_IF_ERROR(LoadCopySegments(where));
    PADDLE_KV_RETURN_IF_ERROR(LoadCopyRows(where));
    PADDLE_KV_CUDA(cudaStreamSynchronize(stream));
    return {};
  }

  Status Wait(int layer, cudaStream_t stream) const {
    WaitAtGate<<<1, 1, 0, stream>>>(view_, layer, timeout_ns_);
    return LaunchStatus("WaitAtGate");
  }

  Status Mark(int layer, cudaStream_t stream) const {
    MarkLayer<<<1, 1, 0, stream>>>(view_, layer);
    return LaunchStatus("MarkLayer");
  }

  Status MarkAndWait(int layer, cudaStream_t stream) const {
    MarkLayerAndWait<<<1, 64, 0, stream>>>(view_, layer, timeout_ns_);
    return LaunchStatus("MarkLayerAndWait");
  }

  Status Arm(std::uint32_t load_turn, std::uint32_t save_turn, cudaStream_t stream) const {
    // Turns are compared cyclically: one that was given up long ago must not seem to lie ahead.
    if (load_turn % kRenewed == 0) {
      PADDLE_KV_RETURN_IF_ERROR(WriteWord(&view_.turns->given_up, load_turn - 1, stream));
    }
    PADDLE_KV_RETURN_IF_ERROR(WriteWord(&view_.turns->load, load_turn, stream));
    return WriteWord(&view_.turns->save, save_turn, stream);
  }

  std::int64_t GivenUpLayer(std::uint32_t turn) const {
    const volatile GivenUp* const entry = on_host_.given_up + turn % kRemembered;
    if (entry->turn != turn) return -1;
    std::atomic_thread_fence(std::memory_order_acquire);
    return static_cast<std::int64_t>(entry->layer_and_one) - 1;
  }

  void PassMarks(std::uint32_t turn) { passed_.store(turn, std::memory_order_release); }

  // ---- for the queue's thread ----
  DeviceStream let_through_stream() const override { return WhereIs(through_stream_); }
  DeviceStream marks_stream() const override { return WhereIs(marks_stream_); }
  Status WriteThrough(std::int64_t layer, std::uint32_t turn) override {
    return WriteWord(view_.through + layer, turn, through_stream_.get());
  }
  void StoreThrough(std::int64_t layer, std::uint32_t turn) override {
    std::atomic_thread_fence(std::memory_order_release);
    static_cast<volatile std::uint32_t*>(on_host_.seen_through)[layer] = turn;
  }
  bool IsMarked(std::int64_t layer, std::uint32_t turn) const override {
    const std::uint32_t marked = static_cast<const volatile std::uint32_t*>(on_host_.marked)[layer];
    std::atomic_thread_fence(std::memory_order_acquire);
    return HasReached(marked, turn) || HasReached(passed_.load(std::memory_order_acquire), turn);
  }

  const int device;
  const int num_layers;

 private:
  void SetHostWords(GateView* view, void* memory) const {
    view->given_up = static_cast<GivenUp*>(memory);
    view->seen_through = reinterpret_cast<std::uint32_t*>(view->given_up + kRemembered);
    view->marked = view->seen_through + num_layers;
  }
  DeviceStream WhereIs(const CudaStream& stream) const {
    return {device, reinterpret_cast<std::int64_t>(stream.get())};
  }

  const std::uint64_t timeout_ns_;
  DeviceMemory device_memory_;
  PinnedMemory host_memory_;
  CudaStream through_stream_;
  CudaStream marks_stream_;
  GateView view_{};     // as the device sees it
  GateView on_host_{};  // the host's own addresses, of host memory alone
  std::atomic<std::uint32_t> passed_{0};
};

Gates& GatesOf(std::int64_t handle) { return *reinterpret_cast<Gates*>(handle); }

// Calls `function` with the device of the gates current.
template <class Function>
int OnDevice(std::int64_t handle, Function function) {
  return Guarded([&] {
    const DeviceGuard guard(GatesOf(handle).device);
    return ResultOf(guard.status().ok() ? function(GatesOf(handle)) : guard.status());
  });
}

}  // namespace
}  // namespace paddle_kv

using namespace paddle_kv;

int paddle_kv_gates_open(int device, std::int64_t num_layers, std::int64_t timeout_us, std::int64_t* handle) {
  return Guarded([&] {
    if (num_layers < 1 || num_layers > kMostLayers) return Fail("num_layers = " + std::to_string(num_layers));
    if (timeout_us < 0) return Fail("timeout_us = " + std::to_string(timeout_us));
    const DeviceGuard guard(device);
    if (!guard.status().ok()) return Fail(guard.status());
    auto gates =
        std::make_unique<Gates>(device, static_cast<int>(num_layers), static_cast<std::uint64_t>(timeout_us) * 1000);
    const Status status = gates->Make();
    if (!status.ok()) return Fail(status, device);
    TransferQueue::Get().OpenGates(gates.get());
    *handle = reinterpret_cast<std::int64_t>(gates.release());
    return 0;
  });
}

int paddle_kv_gates_close(std::int64_t handle) {
  return Guarded([&] {
    const std::unique_ptr<Gates> gates(&GatesOf(handle));
    const DeviceGuard guard(gates->device);
    if (!guard.status().ok()) return Fail(guard.status());
    TransferQueue::Get().CloseGates(gates.get());
    const CaptureTolerance tolerance;
    return ResultOf(ToStatus(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
  });
}

int paddle_kv_gates_wait(std::int64_t handle, std::int64_t layer, std::int64_t stream) {
  return OnDevice(handle, [&](Gates& gates) { return gates.Wait(static_cast<int>(layer), StreamOf(stream)); });
}

int paddle_kv_gates_mark(std::int64_t handle, std::int64_t layer, std::int64_t stream) {
  return OnDevice(handle, [&](Gates& gates) { return gates.Mark(static_cast<int>(layer), StreamOf(stream)); });
}

int paddle_kv_gates_mark_and_wait(std::int64_t handle, std::int64_t layer, std::int64_t stream) {
  return OnDevice(handle, [&](Gates& gates) { return gates.MarkAndWait(static_cast<int>(layer), StreamOf(stream)); });
}

int paddle_kv_gates_arm(std::int64_t handle, std::int64_t stream, std::uint32_t load_turn, std::uint32_t save_turn) {
  return OnDevice(handle, [&](Gates& gates) { return gates.Arm(load_turn, save_turn, StreamOf(stream)); });
}

int paddle_kv_gates_let_through(std::int64_t handle, std::int64_t first_layer, std::int64_t layer_count,
                                std::uint32_t turn, const std::int64_t* wait_events,
                                const std::int64_t* waits_per_layer) {
  return Guarded([&] {
    Gates& gates = GatesOf(handle);
    if (first_layer < 0 || layer_count < 0 || first_layer + layer_count > gates.num_layers) {
      return Fail("layers " + std::to_string(first_layer) + " and " + std::to_string(layer_count) + " from there on");
    }
    if (layer_count == 0) return 0;
    LetThrough work;
    work.turn = turn;
    work.first_layer = first_layer;
    work.first_wait.assign(layer_count + 1, 0);
    std::partial_sum(waits_per_layer, waits_per_layer + layer_count, work.first_wait.begin() + 1);
    work.wait_events.assign(wait_events, wait_events + work.first_wait.back());
    TransferQueue::Get().AddToGates(&gates, std::move(work));
    return 0;
  });
}

int paddle_kv_gates_record_marks(std::int64_t handle, std::uint32_t turn, const std::int64_t* events,
                                 std::int64_t events_per_layer) {
  return Guarded([&] {
    Gates& gates = GatesOf(handle);
    if (events_per_layer < 1) return Fail("events_per_layer = " + std::to_string(events_per_layer));
    MarkWait work;
    work.turn = turn;
    work.events.assign(events, events + events_per_layer * gates.num_layers);
    work.events_per_layer = events_per_layer;
    TransferQueue::Get().AddToGates(&gates, std::move(work));
    return 0;
  });
}

int paddle_kv_gates_pass_marks(std::int64_t handle, std::uint32_t turn) {
  GatesOf(handle).PassMarks(turn);
  return 0;
}

std::int64_t paddle_kv_gates_given_up(std::int64_t handle, std::uint32_t turn) {
  return GatesOf(handle).GivenUpLayer(turn);
}
