// What may happen while the thread of the queue sorts the blocks of a transfer: it holds no lock then.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "paddle_kv/transfer/queue_api.h"
#include "paddle_kv/transfer/runs.h"
#include "paddle_kv/transfer/transfer_plan.h"
#include "queue_rig.h"
#include "recording_engine.h"

namespace {

// Blocks of the transfers that are watched: nothing else allocates so many bytes.
constexpr std::int64_t kBlocks = 4321;
constexpr std::int64_t kManyBlocks = 9001;

enum class Preparation { kFree, kHeld, kFails };
std::atomic<Preparation> preparation{Preparation::kFree};
std::atomic<int> preparations{0};
std::atomic<int> own_preparations{0};  // in the thread that submits
thread_local bool is_submitting = false;

void* Allocate(std::size_t bytes) {
  if (bytes == kBlocks * sizeof(paddle_kv::Run)) {
    ++preparations;
    while (preparation == Preparation::kHeld) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (preparation == Preparation::kFails) throw std::bad_alloc();
  }
  if (bytes == kManyBlocks * sizeof(paddle_kv::Run) && is_submitting) {
    ++own_preparations;
    if (preparation == Preparation::kFails) throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// Inlined, the compiler would take some for those of another pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return Allocate(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return Allocate(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace paddle_kv {
namespace {

using std::chrono::milliseconds;

Submission Watched(std::int64_t token = 0) {
  Submission load;
  load.device_ids.clear(), load.host_ids.clear();
  for (std::int64_t i = 0; i < kBlocks; ++i) load.device_ids.push_back(2 * i), load.host_ids.push_back(3 * i);
  load.token = token;
  return load;
}

// The thread is in the midst of it from `Begun` on, until `Open` or the end.
class Held {
 public:
  Held() { preparation = Preparation::kHeld; }
  ~Held() { Open(); }
  void Begun() const {
    WaitUntil([this] { return preparations > before_; });
  }
  void Open() { preparation = Preparation::kFree; }

 private:
  const int before_ = preparations;
};

std::string NameOfError() {
  int code = 0;
  const char* name = nullptr;
  paddle_kv_queue_error(&code, &name);
  return name;
}

void CheckFailed(const Transfer& transfer, const std::string& name) {
  CHECK(transfer.Wait() == -1);
  for (const auto& record : transfer.records) {
    CHECK(Query(record->handle()) == -1);
    CHECK(NameOfError() == name);
  }
  CHECK(cudaEventQuery(transfer.start.event) == cudaSuccess);
}

// Nobody is held up by it: whoever submits, asks or cancels.
void NoLockIsHeldWhileATransferIsPrepared() {
  Plan plan(2, 100, false), small(1, 100, false);
  OpenStream stream, other;
  Held held;
  Transfer transfer(plan, stream.handle(), Watched());
  held.Begun();
  Transfer behind(small, other.handle(), {}), same_stream(small, stream.handle(), {});
  CHECK(behind.result == 0 && same_stream.result == 0);
  CHECK(Query(transfer.records[0]->handle()) == 1);
  CHECK(paddle_kv_queue_flush(stream.handle(), 1000) == 1);
  std::thread closer([&] { CHECK(paddle_kv_queue_close(stream.handle()) == 0); });
  std::this_thread::sleep_for(milliseconds(20));
  held.Open();
  closer.join();
  CHECK(transfer.Wait() == 0 && behind.Wait() == 0 && same_stream.Wait() == 0);
}

void CancelWhileATransferIsPrepared() {
  Plan plan(3, 100, false), small(1, 100, true);
  OpenStream stream;
  ClearLog();
  Held held;
  Transfer transfer(plan, stream.handle(), Watched(5));
  held.Begun();
  std::int64_t layer = -7;
  CHECK(paddle_kv_queue_cancel(stream.handle(), 5, &layer) == 0 && layer == 0);
  CHECK(paddle_kv_queue_cancel(stream.handle(), 5, &layer) == 0 && layer == -1);
  held.Open();
  CheckFailed(transfer, "cancelled");
  CHECK(Log().empty());
  Transfer next(small, stream.handle(), {});
  CHECK(next.Wait() == 0);
}

void WhatIsCancelledBeforeItsTurnIsNeverPrepared() {
  Plan plan(3, 100, false), small(1, 100, true);
  OpenStream stream;
  const int before = preparations;
  BusyEngine busy;
  ClearLog();
  Transfer first(small, stream.handle(), {});
  WaitUntil([] { return !Log().empty(); });
  Transfer transfer(plan, stream.handle(), Watched(6));
  std::int64_t layer = -7;
  CHECK(paddle_kv_queue_cancel(stream.handle(), 6, &layer) == 0 && layer == 0);
  busy.Open();
  CheckFailed(transfer, "cancelled");
  CHECK(first.Wait() == 0 && preparations == before && Log().size() == 1);
}

// In the thread of the queue they would hold up an urgent transfer.
void ManyBlocksAreSortedByWhoeverSubmitsThem() {
  Plan plan(2, 100, false), small(1, 100, false);
  OpenStream stream;
  ClearLog();
  Submission many;
  many.device_ids.clear(), many.host_ids.clear();
  for (std::int64_t i = 0; i < kManyBlocks; ++i) many.device_ids.push_back(i), many.host_ids.push_back(i);
  is_submitting = true;
  {
    preparation = Preparation::kFails;
    const Transfer refused(plan, stream.handle(), many);
    CHECK(refused.result == -1 && NameOfError() == "out of host memory");
    preparation = Preparation::kFree;
  }
  CHECK(own_preparations == 1);
  Transfer transfer(plan, stream.handle(), many), few(small, stream.handle(), {});
  is_submitting = false;
  CHECK(transfer.Wait() == 0 && few.Wait() == 0);
  CHECK(own_preparations == 2 && !Log().empty());
}

void WithoutMemoryToPrepareATransferItFails() {
  Plan plan(3, 100, false), small(1, 100, true);
  OpenStream stream, other;
  ClearLog();
  preparation = Preparation::kFails;
  Transfer transfer(plan, stream.handle(), Watched(7));
  CHECK(transfer.result == 0);
  CheckFailed(transfer, "out of host memory");
  preparation = Preparation::kFree;
  std::int64_t layer = -7;
  CHECK(paddle_kv_queue_cancel(stream.handle(), 7, &layer) == 0 && layer == -1);
  CHECK(Log().empty());
  CHECK(transfer.Submit(plan, stream.handle(), Watched()) == 0);  // the next one has memory
  Transfer next(small, stream.handle(), {});
  CHECK(transfer.Wait() == 0 && next.Wait() == 0);
}

// A failure is told in the order of the stream, behind what it had to wait for.
void WithoutMemoryATransferKeepsItsPlace() {
  Plan plan(2, 100, false), small(1, 100, true);
  OpenStream stream, other;
  cudaStream_t compute = MakeFakeStream();
  {
    Gate gate(compute);
    Event mark;
    cudaEventRecord(mark.event, compute);
    preparation = Preparation::kFails;
    Submission load = Watched();
    load.waits = {{mark.handle()}, {}};
    Transfer transfer(plan, stream.handle(), load);
    CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
    preparation = Preparation::kFree;
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(Query(transfer.records[0]->handle()) == 1);
    gate.Open();
    CheckFailed(transfer, "out of host memory");
  }
  DestroyFakeStream(compute);
}

void AnUrgentTransferThatComesMeanwhileIsSubmittedNext() {
  Plan plan(1, 100, false), load(1, 100, true);
  OpenStream slow, urgent(true);
  ClearLog();
  Held held;
  Transfer bulk(plan, slow.handle(), Watched());
  held.Begun();
  Transfer now(load, urgent.handle(), {});
  held.Open();
  CHECK(now.Wait() == 0 && bulk.Wait() == 0);
  const auto log = Log();
  CHECK(log.size() == 2 && log[0].plan_blocks == load.blocks);
}

// Blocks whose layers of 16 KiB lie side by side on the host: 16 layers are one band of a save, four of a load.
struct BlockFirstPlan {
  std::int64_t number = next_plan++;
  const std::int64_t layers;

  explicit BlockFirstPlan(std::int64_t layer_count) : layers(layer_count) {
    constexpr std::int64_t kBytes = 16 << 10;
    auto plan = std::make_shared<TransferPlan>();
    plan->device = 0;
    plan->device_blocks = plan->host_blocks = 10;
    plan->layer_count = layers;
    plan->tensors_per_layer = 1;
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      auto* const host = reinterpret_cast<std::uint8_t*>(std::int64_t{1} << 40) + layer * kBytes;
      plan->tensors.push_back({nullptr, host, kBytes, layers * kBytes, kBytes});
    }
    CHECK(AddTransferPlan(number, plan));
  }
  ~BlockFirstPlan() { RemoveTransferPlan(number); }
  BlockFirstPlan(const BlockFirstPlan&) = delete;
};

// What waits begins a band, and those before it are made no longer than all are on average.
void BandsBeginWhereATransferHasToWait() {
  BlockFirstPlan plan(16), deep(64);
  OpenStream stream;
  Event mark;
  cudaEventRecord(mark.event, stream.stream);
  const auto layers_per_band = [&](Direction direction, std::int64_t layers_per_event,
                                   const std::vector<std::int64_t>& waiting, std::size_t times) {
    Submission given;
    given.direction = direction;
    given.layers_per_event = layers_per_event;
    given.waits.resize((plan.layers + layers_per_event - 1) / layers_per_event);
    for (const std::int64_t group : waiting) given.waits[group].assign(times, mark.handle());
    std::atomic<std::int64_t> found{0};
    before_copy = [&](const EngineWork& work, const DeviceStream&) {
      found = work.layers_per_band;
      return Status{};
    };
    Transfer transfer(plan, stream.handle(), given);
    CHECK(transfer.Wait() == 0);
    before_copy = nullptr;
    return found.load();
  };
  const Direction load = Direction::kHostToDevice, save = Direction::kDeviceToHost;
  CHECK(layers_per_band(load, 1, {}, 1) == 4 && layers_per_band(save, 1, {}, 1) == 16);
  CHECK(Log().back().engine == EngineKind::kStaging);  // the rows of a band are large enough
  CHECK(layers_per_band(save, 1, {0}, 1) == 16);       // the first one begins a band anyway
  for (const std::size_t times : {1, 2}) {
    CHECK(layers_per_band(save, 1, {1}, times) == 8 && layers_per_band(save, 1, {15}, times) == 8);
    CHECK(layers_per_band(save, 1, {0, 1, 9}, times) == 6);
  }
  CHECK(layers_per_band(load, 1, {1}, 1) == 4 && layers_per_band(load, 1, {1, 3, 5, 7, 9, 11, 13, 15}, 1) == 2);
  CHECK(layers_per_band(load, 3, {}, 1) == 6 && layers_per_band(save, 3, {}, 1) == 18);  // whole groups
  before_copy = [](const EngineWork& work, const DeviceStream&) {
    CHECK(work.layers_per_band == (work.direction == Direction::kHostToDevice ? 8 : 64));
    return Status{};
  };
  for (const Direction direction : {load, save}) {
    Submission given;
    given.direction = direction;
    Transfer transfer(deep, stream.handle(), given);
    CHECK(transfer.Wait() == 0);
  }
  before_copy = nullptr;
}

// 16 MiB in a layer, of which the first tensor has one: a call of the copy engine has no more.
void TensorsOfSeveralSizesAreCounted() {
  auto plan = std::make_shared<TransferPlan>();
  plan->device = 0;
  plan->device_blocks = plan->host_blocks = 10;
  plan->layer_count = 4;
  plan->tensors_per_layer = 2;
  for (std::int64_t tensor = 0; tensor < 8; ++tensor) {
    const std::int64_t bytes = tensor % 2 == 0 ? 1 << 20 : 15 << 20;
    plan->tensors.push_back({nullptr, nullptr, bytes, bytes, bytes});
  }
  struct Named {
    std::int64_t number, layers;
  };
  const Named named = {next_plan++, plan->layer_count};
  CHECK(AddTransferPlan(named.number, plan));
  {
    OpenStream stream;
    ClearLog();
    Submission load;
    load.engine = EngineKind::kCopyEngine;
    Transfer transfer(named, stream.handle(), load);
    CHECK(transfer.Wait() == 0 && Log().size() == 4);
  }
  RemoveTransferPlan(named.number);
}

const Test kTests[] = {
    {"no_lock_is_held_while_a_transfer_is_prepared", NoLockIsHeldWhileATransferIsPrepared},
    {"cancel_while_a_transfer_is_prepared", CancelWhileATransferIsPrepared},
    {"what_is_cancelled_before_its_turn_is_never_prepared", WhatIsCancelledBeforeItsTurnIsNeverPrepared},
    {"many_blocks_are_sorted_by_whoever_submits_them", ManyBlocksAreSortedByWhoeverSubmitsThem},
    {"without_memory_to_prepare_a_transfer_it_fails", WithoutMemoryToPrepareATransferItFails},
    {"without_memory_a_transfer_keeps_its_place", WithoutMemoryATransferKeepsItsPlace},
    {"bands_begin_where_a_transfer_has_to_wait", BandsBeginWhereATransferHasToWait},
    {"tensors_of_several_sizes_are_counted", TensorsOfSeveralSizesAreCounted},
    {"an_urgent_transfer_that_comes_meanwhile_is_submitted_next", AnUrgentTransferThatComesMeanwhileIsSubmittedNext},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
