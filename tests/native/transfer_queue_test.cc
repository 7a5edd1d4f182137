// The queue that submits transfers, with a CUDA runtime of threads and engines that record what they are asked for.
#include "paddle_kv/transfer/queue_api.h"

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "paddle_kv/swap/transfer_blocks.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/engine_choice.h"
#include "paddle_kv/transfer/transfer_plan.h"
#include "queue_rig.h"
#include "recording_engine.h"

namespace paddle_kv {
namespace {

using std::chrono::milliseconds;

// ---- tests ----
// Before all others, which start the thread. A process that may have no more threads is told so, and goes on.
void WithoutAThreadThereIsNoQueue() {
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // which would want memory themselves
  rlimit before{};
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  rlimit none = before;
  none.rlim_cur = 1;  // no room for a stack
  CHECK(setrlimit(RLIMIT_AS, &none) == 0);
  const int opened = paddle_kv_queue_open(0, 5, 0);
  const std::int64_t enqueued = paddle_kv_queue_enqueued(), submitted = paddle_kv_queue_submitted();
  CHECK(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(opened == -1 && enqueued == 0 && submitted == 0);
#endif
  OpenStream stream;
  CHECK(paddle_kv_queue_flush(stream.handle(), 0) == 0);
}

void AllBytesArriveInBothDirections() {
  Plan plan(5, 300, true);
  OpenStream stream;
  Submission load;
  load.device_ids = {3, 0, 9, 4};
  load.host_ids = {1, 2, 3, 8};
  load.layers_per_event = 2;
  const auto before = plan.device;
  Transfer transfer(plan, stream.handle(), load);
  CHECK(transfer.result == 0);
  CHECK(transfer.Wait() == 0);
  for (std::int64_t layer = 0; layer < plan.layers; ++layer) {
    auto expected = before[layer];
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&expected[load.device_ids[i] * 300], &plan.host[layer][load.host_ids[i] * 300], 300);
    }
    CHECK(plan.device[layer] == expected);
  }
  Submission save = load;
  save.direction = Direction::kDeviceToHost;
  save.host_ids = {9, 7, 5, 6};
  Transfer back(plan, stream.handle(), save);
  CHECK(back.Wait() == 0);
  for (std::int64_t layer = 0; layer < plan.layers; ++layer) {
    for (int i = 0; i < 4; ++i) {
      CHECK(std::memcmp(&plan.host[layer][save.host_ids[i] * 300], &plan.device[layer][save.device_ids[i] * 300],
                        300) == 0);
    }
  }
}

void OneEventForAllLayers() {
  for (const std::int64_t layers_per_event : {std::int64_t{5}, std::int64_t{1} << 31, INT64_MAX}) {
    Plan plan(5, 300, true);
    OpenStream stream;
    Submission load;
    load.layers_per_event = layers_per_event;
    Transfer transfer(plan, stream.handle(), load);
    CHECK(transfer.result == 0 && transfer.records.size() == 1);
    CHECK(transfer.Wait() == 0);
    for (std::int64_t layer = 0; layer < plan.layers; ++layer) {
      CHECK(std::memcmp(plan.device[layer].data(), plan.host[layer].data(), 300) == 0);
    }
  }
}

void AGroupIsHeldBackUntilWhatItWaitsForIsRecorded() {
  Plan first(1, 16 << 20, false), second(1, 100, false), third(1, 100, false);
  OpenStream one, two, other;
  ClearLog();
  Gate gate(one.stream);
  // As much as may be in flight, so that the next one is not submitted while the gate is closed.
  Transfer a(first, one.handle(), {}), b(first, one.handle(), {}), held(first, one.handle(), {});
  Submission behind;
  behind.waits = {{held.last()}};
  Transfer waiting(second, two.handle(), behind);
  Transfer free(third, other.handle(), {});
  CHECK(free.Wait() == 0);                      // one that waits holds no other stream
  WaitUntil([] { return Log().size() >= 3; });  // the streams take turns: b may come later
  CHECK(Query(waiting.last()) == 1);
  CHECK(paddle_kv_queue_flush(two.handle(), 1000) == 1);
  CHECK(Log().size() == 3);
  gate.Open();
  CHECK(waiting.Wait() == 0);
  const auto log = Log();
  CHECK(log.size() == 5);
  CHECK(log[3].plan_blocks == first.blocks && log[4].plan_blocks == second.blocks);
}

void AWaitOfALaterGroupSplitsTheTransfer() {
  Plan plan(4, 100, true);
  OpenStream stream;
  cudaStream_t compute = MakeFakeStream();
  Event mark;
  {
    Gate gate(compute);
    cudaEventRecord(mark.event, compute);
    Submission late;
    late.waits = {{}, {}, {mark.handle()}, {}};
    ClearLog();
    Transfer transfer(plan, stream.handle(), late);
    CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);  // a recorded event is the stream's to wait for
    const auto log = Log();
    CHECK(log.size() == 2 && log[0].end_layer == 2 && log[1].first_layer == 2 && log[1].end_layer == 4);
    WaitFor(transfer.records[1]->event);
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(Query(transfer.records[2]->handle()) == 1);
    gate.Open();
    CHECK(transfer.Wait() == 0);
  }
  DestroyFakeStream(compute);
}

void BytesInFlightAreBounded() {
  Plan plan(16, 8 << 20, false);  // 16 MiB in a call of the copy engine are two of its layers
  OpenStream stream;
  ClearLog();
  {
    Gate gate(stream.stream);
    Transfer transfer(plan, stream.handle(), {});
    WaitUntil([] { return Log().size() >= 2; });
    std::this_thread::sleep_for(milliseconds(50));
    CHECK(Log().size() == 2);  // 32 MiB
    CHECK(Query(transfer.records[3]->handle()) == 1);
    CHECK(paddle_kv_queue_wait_stream(0, stream.handle(), transfer.last(), 20000) == 1);
    gate.Open();
    CHECK(transfer.Wait() == 0);
    CHECK(Log().size() == 8);
  }
}

void AnUrgentTransferIsSubmittedNext() {
  Plan bulk(1, 1000, false), load(1, 1000, false);
  OpenStream slow, slow_too, urgent(true);  // if they took turns, the other slow one would be next
  ClearLog();
  BusyEngine busy;
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (int i = 0; i < 20; ++i) {
    const std::int64_t stream = (i % 2 == 0 ? slow : slow_too).handle();
    transfers.push_back(std::make_unique<Transfer>(bulk, stream, Submission{}));
  }
  WaitUntil([] { return !Log().empty(); });
  Transfer now(load, urgent.handle(), {});
  CHECK(Log().size() == 1);
  busy.Open();
  CHECK(now.Wait() == 0);
  for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
  const auto log = Log();
  CHECK(log.size() == 21 && log[1].plan_blocks == load.blocks);
}

void AFailureIsToldByTheEventsBehindIt() {
  Plan plan(3, 100, true), later(2, 100, true);
  OpenStream stream, other;
  cudaStream_t compute = MakeFakeStream();
  Event mark;
  cudaEventRecord(mark.event, compute);
  before_copy = [&](const EngineWork& work, const DeviceStream&) {
    if (work.plan->device_blocks != plan.blocks || work.first_layer == 0) return Status{};
    return Status{cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "it broke", "a launch"};
  };
  Submission split;
  split.waits = {{}, {mark.handle()}, {}};
  Transfer transfer(plan, stream.handle(), split);
  CHECK(transfer.Wait() == -1);
  int code = 0;
  const char* name = nullptr;
  const std::string text = paddle_kv_queue_error(&code, &name);
  CHECK(code == cudaErrorLaunchFailure && std::string(name) == "cudaErrorLaunchFailure");
  CHECK(text.find("it broke") != std::string::npos && text.find("a launch") != std::string::npos);
  CHECK(Query(transfer.records[0]->handle()) == 0);
  CHECK(Query(transfer.records[1]->handle()) == -1);
  CHECK(Query(mark.handle(), transfer.records[0]->handle()) == 0);
  CHECK(Query(transfer.records[0]->handle(), transfer.records[1]->handle(), mark.handle()) == -1);
  Submission behind;
  behind.waits = {{transfer.last()}, {}};
  behind.device_ids = {1};
  Transfer next(later, stream.handle(), {}), follower(later, other.handle(), behind);
  CHECK(next.Wait() == 0 && follower.Wait() == 0);
  CHECK(paddle_kv_queue_forget(transfer.last()) == 1);
  CHECK(paddle_kv_queue_forget(transfer.last()) == 0);
  CHECK(Query(transfer.last()) == 0);
  CHECK(paddle_kv_queue_forget(transfer.records[1]->handle()) == 1);
  before_copy = nullptr;
  DestroyFakeStream(compute);
}

// A layer of 11 blocks, 33 MiB: three parts, of four, four and three blocks.
struct LargeLayers {
  static constexpr std::int64_t kLayers = 3, kBytes = 3 << 20;
  Plan plan{kLayers, kBytes, true};
  Submission load;

  explicit LargeLayers(EngineKind engine) {
    load.engine = engine;
    load.device_ids = {10, 1, 2, 3, 0, 5, 6, 7, 8, 9, 4};  // runs of several blocks, which parts cut
    load.host_ids = {0, 2, 3, 4, 1, 6, 7, 8, 9, 10, 5};
  }
  std::vector<std::vector<std::uint8_t>> Expected() const {
    auto device = plan.device;
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      for (std::size_t i = 0; i < load.device_ids.size(); ++i) {
        std::memcpy(&device[layer][load.device_ids[i] * kBytes], &plan.host[layer][load.host_ids[i] * kBytes], kBytes);
      }
    }
    return device;
  }
};

void LargeLayersGoToTheCopyEngineInParts() {
  LargeLayers large(EngineKind::kCopyEngine);
  const auto expected = large.Expected();
  OpenStream stream;
  cudaStream_t compute = MakeFakeStream();
  ClearLog();
  Gate gate(compute);
  Event mark;
  cudaEventRecord(mark.event, compute);
  Submission& load = large.load;
  load.waits = {{}, {mark.handle()}, {}};  // also in front of a layer that is cut
  Transfer transfer(large.plan, stream.handle(), load);
  WaitUntil([&] { return Query(transfer.records[0]->handle()) == 0; });
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(Query(transfer.records[1]->handle()) == 1);
  CHECK(large.plan.device[0] == expected[0] && large.plan.device[1] != expected[1]);
  gate.Open();
  CHECK(transfer.Wait() == 0);
  CHECK(large.plan.device == expected);
  const auto log = Log();
  CHECK(log.size() == 3 * 3);
  for (std::size_t i = 0; i < log.size(); ++i) {
    CHECK(log[i].first_layer == static_cast<std::int64_t>(i / 3) && log[i].end_layer == log[i].first_layer + 1);
    CHECK(log[i].blocks == (i % 3 == 2 ? 3 : 4));
    CHECK(log[i].records == (i % 3 == 2));
  }
  DestroyFakeStream(compute);
}

void ATransferBeginsWithItsFirstPart() {
  LargeLayers large(EngineKind::kCopyEngine);
  OpenStream stream;
  std::unique_ptr<Gate> gate;
  std::atomic<int> calls{0};
  before_copy = [&](const EngineWork&, const DeviceStream&) {
    if (calls++ == 0) gate = std::make_unique<Gate>(stream.stream);
    return Status{};
  };
  Transfer transfer(large.plan, stream.handle(), large.load);
  WaitUntil([&] { return calls == 3; });
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(cudaEventQuery(transfer.start.event) == cudaSuccess);
  gate->Open();
  CHECK(transfer.Wait() == 0);
  before_copy = nullptr;
}

// It was told that more follows, and may not have put the stream behind all of its work.
void WhatFollowsGoesToTheSameEngine() {
  Plan plan(3, 30'000, false);  // of that size the kernel copies alone and the copy engine beside compute
  Submission load;
  load.device_ids.clear(), load.host_ids.clear();
  for (int i = 0; i < 2300; ++i) load.device_ids.push_back(2 * i), load.host_ids.push_back(3 * i);
  OpenStream stream;
  cudaStream_t compute = MakeFakeStream();
  Event passed;
  Gate busy(compute);
  before_copy = [&](const EngineWork&, const DeviceStream&) {
    CHECK(paddle_kv_queue_wait_stream(0, Handle(compute), passed.handle(), -1) == 0);  // compute is seen
    return Status{};
  };
  std::this_thread::sleep_for(milliseconds(30));  // what was seen before is forgotten
  ClearLog();
  Transfer transfer(plan, stream.handle(), load);
  CHECK(transfer.Wait() == 0);
  before_copy = nullptr;
  const auto log = Log();
  CHECK(log.size() == 3);
  for (const auto& call : log) CHECK(call.engine == EngineKind::kKernel);
  busy.Open();
  DestroyFakeStream(compute);
}

// Megabytes take a kernel between caches as long as one piece takes the copy engine.
void BetweenCachesKernelsCopyAllButLargePieces() {
  const auto chosen = [](std::int64_t piece_bytes, bool on_other_gpu, bool beside_compute) {
    PieceSizes sizes;
    sizes.both.Add(piece_bytes, 10);
    return ChooseEngineBetweenCaches(sizes, on_other_gpu, beside_compute);
  };
  for (const std::int64_t kib : {4, 16, 32, 128, 4096}) {
    for (const bool on_other_gpu : {false, true}) CHECK(chosen(kib << 10, on_other_gpu, false) == EngineKind::kKernel);
  }
  for (const bool on_other_gpu : {false, true}) CHECK(chosen(4 << 10, on_other_gpu, true) == EngineKind::kKernel);
  CHECK(chosen(128 << 10, false, true) == EngineKind::kKernel);
  CHECK(chosen(32 << 10, true, true) == EngineKind::kCopyEngine);
  for (const bool on_other_gpu : {false, true}) {
    for (const bool beside : {false, true}) CHECK(chosen(64 << 20, on_other_gpu, beside) == EngineKind::kCopyEngine);
  }
  CHECK(chosen(4 << 20, false, true) == EngineKind::kCopyEngine);
}

// 400 MiB: one call between caches, which has a bound for other transfers' sake; as soon as compute is seen, it is
// told.
void BetweenCachesCallsAreLongAndToldOfCompute() {
  Plan plan(4, 1 << 20, false, 0, true);
  Submission save;
  save.direction = Direction::kDeviceToHost;
  save.device_ids.clear(), save.host_ids.clear();
  for (int i = 0; i < 100; ++i) save.device_ids.push_back(3 * i), save.host_ids.push_back(2 * i);
  OpenStream stream;
  std::this_thread::sleep_for(milliseconds(30));  // what was seen before is forgotten
  ClearLog();
  Transfer alone(plan, stream.handle(), save);
  CHECK(alone.Wait() == 0);
  auto log = Log();
  CHECK(log.size() == 1 && log[0].end_layer == 4 && log[0].engine == EngineKind::kKernel && !log[0].beside_compute);

  cudaStream_t compute = MakeFakeStream();
  Event computed;
  Gate busy(compute);
  CHECK(cudaEventRecord(computed.event, compute) == cudaSuccess);
  save.waits = {{}, {}, {computed.handle()}, {}};
  ClearLog();
  Transfer beside(plan, stream.handle(), save);
  WaitUntil([] { return Log().size() >= 2; });
  busy.Open();
  CHECK(beside.Wait() == 0);
  log = Log();
  CHECK(log[0].end_layer == 2 && log[0].engine == EngineKind::kKernel && !log[0].beside_compute);
  CHECK(log[1].first_layer == 2 && log[1].engine == EngineKind::kCopyEngine && log[1].beside_compute);
  ClearLog();
  Transfer behind(plan, stream.handle(), save);  // compute was seen, but all of it is there
  CHECK(behind.Wait() == 0);
  for (const auto& call : Log()) CHECK(call.engine == EngineKind::kKernel && !call.beside_compute);
  DestroyFakeStream(compute);
}

// Nothing is left to compute behind the last one.
void BetweenCachesTheLastLayerIsNotBesideCompute() {
  Plan plan(3, 1 << 20, false, 0, true);
  Submission save;
  save.direction = Direction::kDeviceToHost;
  OpenStream stream;
  cudaStream_t compute = MakeFakeStream();
  Event marks[3];
  for (Event& mark : marks) save.waits.push_back({mark.handle()});
  ClearLog();
  {
    Gate busy(compute);
    for (Event& mark : marks) CHECK(cudaEventRecord(mark.event, compute) == cudaSuccess);
    Transfer layers(plan, stream.handle(), save);
    WaitUntil([] { return Log().size() == 3; });  // while none of them is computed
    busy.Open();
    CHECK(layers.Wait() == 0);
  }
  const auto log = Log();
  for (int layer : {0, 1}) CHECK(log[layer].engine == EngineKind::kCopyEngine && log[layer].beside_compute);
  CHECK(log[2].first_layer == 2 && log[2].engine == EngineKind::kKernel && !log[2].beside_compute);
  DestroyFakeStream(compute);
}

void NoCallOfTheCopyEngineIsLargerThanItsBound() {
  const auto calls = [](std::int64_t layers, std::int64_t block_bytes, int blocks) {
    Plan plan(layers, block_bytes, false);
    OpenStream stream;
    Submission load;
    load.engine = EngineKind::kCopyEngine;
    load.device_ids.clear(), load.host_ids.clear();
    for (int i = 0; i < blocks; ++i) load.device_ids.push_back(i), load.host_ids.push_back(i);
    ClearLog();
    Transfer transfer(plan, stream.handle(), load);
    CHECK(transfer.Wait() == 0);
    std::vector<std::int64_t> bytes;
    for (const auto& call : Log()) bytes.push_back(call.blocks * (call.end_layer - call.first_layer) * block_bytes);
    return bytes;
  };
  constexpr std::int64_t kMiB = 1 << 20;
  using Bytes = std::vector<std::int64_t>;
  CHECK(calls(2, 15 * kMiB, 1) == Bytes({15 * kMiB, 15 * kMiB}));  // two would be too many
  CHECK(calls(5, 8 * kMiB, 1) == Bytes({16 * kMiB, 16 * kMiB, 8 * kMiB}));
  CHECK(calls(1, 10 * kMiB, 3) == Bytes({10 * kMiB, 10 * kMiB, 10 * kMiB}));
  CHECK(calls(2, 20 * kMiB, 1) == Bytes({20 * kMiB, 20 * kMiB}));  // a block stays whole
  CHECK(calls(2, 20 * kMiB, 2) == Bytes({20 * kMiB, 20 * kMiB, 20 * kMiB, 20 * kMiB}));
  CHECK(calls(3, kMiB, 0) == Bytes({0}));
}

void APartThatFailsFailsItsLayer() {
  for (const int failing : {0, 1, 2, 3, 5}) {
    LargeLayers large(EngineKind::kCopyEngine);
    OpenStream stream;
    int calls = 0;
    before_copy = [&](const EngineWork&, const DeviceStream&) {
      if (calls++ != failing) return Status{};
      return Status{cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "it broke", "a copy"};
    };
    Transfer transfer(large.plan, stream.handle(), large.load);
    CHECK(transfer.Wait() == -1);
    for (int layer = 0; layer < 3; ++layer) {
      CHECK(Query(transfer.records[layer]->handle()) == (layer < failing / 3 ? 0 : -1));
    }
    CHECK(calls == failing + 1);
    before_copy = nullptr;
    Transfer again(large.plan, stream.handle(), large.load);
    const auto expected = large.Expected();
    CHECK(again.Wait() == 0 && large.plan.device == expected);
  }
}

// The link would wait for the next call while that is being submitted.
void TwoCallsAreInFlightHoweverLarge() {
  for (const EngineKind engine : {EngineKind::kKernel, EngineKind::kStaging}) {
    Plan plan(4, std::int64_t{1} << 30, false);
    OpenStream stream;
    ClearLog();
    Gate gate(stream.stream);
    Submission load;
    load.engine = engine;
    Transfer transfer(plan, stream.handle(), load);
    WaitUntil([] { return Log().size() == 2; });
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(Log().size() == 2);
    gate.Open();
    CHECK(transfer.Wait() == 0);
    CHECK(Log().size() == 4);
  }
}

// Others that write the same blocks wait for the last one alone: it must not let them pass what it had to wait for.
void AFailedTransferKeepsItsPlaceInTheOrder() {
  Plan plan(2, 100, true), full(1, 16 << 20, false);
  OpenStream stream, other;
  cudaStream_t compute = MakeFakeStream();
  const auto before = plan.device;
  before_copy = [&](const EngineWork& work, const DeviceStream&) {
    if (work.plan->device_blocks != plan.blocks) return Status{};
    return Status{cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory", "cudaMalloc"};
  };
  {
    Gate reading(compute), held_up(other.stream);
    Event recorded;
    cudaEventRecord(recorded.event, compute);
    // The third is not submitted while the gate is closed: its event is pending.
    Transfer a(full, other.handle(), {}), b(full, other.handle(), {}), pending(full, other.handle(), {});
    Submission behind;
    behind.waits = {{}, {recorded.handle()}};
    Transfer first(plan, stream.handle(), behind);
    WaitUntil([&] { return Query(first.records[0]->handle()) == -1; });
    CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(Query(first.last()) == 1);
    CHECK(Query(first.last(), first.records[0]->handle()) == 1 &&
          Query(first.records[0]->handle(), first.last()) == -1);
    reading.Open();
    CHECK(first.Wait() == -1);

    behind.waits = {{}, {pending.last()}};
    Transfer second(plan, stream.handle(), behind);
    WaitUntil([&] { return Query(second.records[0]->handle()) == -1; });
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(Query(second.last()) == 1);
    CHECK(paddle_kv_queue_flush(stream.handle(), 1000) == 1);
    held_up.Open();
    CHECK(second.Wait() == -1);
    CHECK(Query(pending.last()) == 0);
  }
  CHECK(plan.device == before);
  before_copy = nullptr;
  DestroyFakeStream(compute);
}

void AnEventThatIsUsedAnewHasNotFailed() {
  Plan plan(1, 100, true);
  OpenStream stream;
  before_copy = [](const EngineWork&, const DeviceStream&) {
    return Status{cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "it broke", "a launch"};
  };
  Transfer transfer(plan, stream.handle(), {});
  CHECK(transfer.Wait() == -1);
  before_copy = nullptr;
  CHECK(transfer.Submit(plan, stream.handle(), {}) == 0);
  CHECK(transfer.Wait() == 0);
}

// Each wait of these would be over at once, had it overflown.
void TheLongestTimeOfPythonDoesNotOverflow() {
  constexpr std::int64_t kLongestUs = 9223372036000000;  // threading.TIMEOUT_MAX
  Plan plan(1, 16 << 20, false);
  OpenStream stream;
  Gate gate(stream.stream);
  Transfer a(plan, stream.handle(), {}), b(plan, stream.handle(), {}), held(plan, stream.handle(), {});
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(50));
    gate.Open();
  });
  CHECK(paddle_kv_queue_wait_stream(0, stream.handle(), held.last(), kLongestUs) == 0);
  CHECK(paddle_kv_queue_flush(stream.handle(), kLongestUs) == 0);
  opener.join();
}

void FlushDoesNotWaitForWhatIsEnqueuedLater() {
  Plan plan(1, 1000, false);
  OpenStream stream;
  before_copy = [](const EngineWork&, const DeviceStream&) {
    std::this_thread::sleep_for(milliseconds(5));
    return Status{};
  };
  std::vector<std::unique_ptr<Transfer>> transfers;
  const auto enqueue = [&] { transfers.push_back(std::make_unique<Transfer>(plan, stream.handle(), Submission{})); };
  std::atomic<bool> end{false};
  for (int i = 0; i < 3; ++i) enqueue();
  std::thread others([&] {
    while (!end) {
      enqueue();
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  CHECK(paddle_kv_queue_flush(stream.handle(), 5'000'000) == 0);
  end = true;
  others.join();
  for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
  before_copy = nullptr;
}

void StreamsThatAreEquallyUrgentTakeTurns() {
  for (const bool are_urgent : {false, true}) {
    Plan many(1, 1000, false), one(1, 1000, false);
    OpenStream first(are_urgent), second(are_urgent);
    // Neither order of the two handles may make a difference.
    for (OpenStream* full : {&first, &second}) {
      OpenStream* const other = full == &first ? &second : &first;
      ClearLog();
      BusyEngine busy;
      std::vector<std::unique_ptr<Transfer>> transfers;
      for (int i = 0; i < 20; ++i) transfers.push_back(std::make_unique<Transfer>(many, full->handle(), Submission{}));
      WaitUntil([] { return !Log().empty(); });
      Transfer single(one, other->handle(), {});
      CHECK(Log().size() == 1);
      busy.Open();
      CHECK(single.Wait() == 0);
      for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
      const auto log = Log();
      CHECK(log.size() == 21 && log[1].plan_blocks == one.blocks);
    }
  }
}

void AnotherDeviceThanTheStreamsIsNeverMadeCurrent() {
  Plan plan(2, 100, true, 1);
  const int calls_before = CallsOfThreads(0);
  OpenStream stream(false, 1);
  const int before = TimesMadeCurrent(0);
  Transfer transfer(plan, stream.handle(), {});
  CHECK(transfer.Wait() == 0);
  const std::int64_t last = transfer.last();
  CHECK(paddle_kv_queue_query(1, &last, 1) == 0);
  CHECK(paddle_kv_queue_query(99, &last, 1) == -1);
  CHECK(paddle_kv_queue_push_device(1) == 0);
  int device = -1;
  CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1);
  paddle_kv_queue_pop_device();
  CHECK(cudaGetDevice(&device) == cudaSuccess && device == 0);
  CHECK(paddle_kv_queue_push_device(99) == -1);
  CHECK(TimesMadeCurrent(0) == before && TimesMadeCurrent(1) > 0);
  CHECK(CallsOfThreads(0) == calls_before && CallsOfThreads(1) > 0);
}

void TwoThreadsCloseAStream() {
  for (int round = 0; round < 50; ++round) {
    Plan plan(1, 100, true);
    OpenStream stream;
    std::vector<std::unique_ptr<Transfer>> transfers;
    auto gate = std::make_unique<Gate>(stream.stream);
    for (int i = 0; i < 5; ++i) transfers.push_back(std::make_unique<Transfer>(plan, stream.handle(), Submission{}));
    std::thread closer([&] { CHECK(paddle_kv_queue_close(stream.handle()) == 0); });
    gate->Open();
    CHECK(paddle_kv_queue_close(stream.handle()) == 0);
    closer.join();
    for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
  }
}

void WithoutMemoryForAnotherEngineTheCopyEngineIsTaken() {
  Plan plan(3, 100, true);  // of that size the kernel would copy
  OpenStream stream;
  cudaStream_t compute = MakeFakeStream();
  Event mark;
  cudaEventRecord(mark.event, compute);
  before_copy = [&](const EngineWork& work, const DeviceStream&) {
    if (work.first_layer > 0 || Log().back().engine == EngineKind::kCopyEngine) return Status{};
    return Status{cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory", "cudaMalloc"};
  };
  ClearLog();
  Submission load;
  load.waits = {{}, {}, {mark.handle()}};
  Transfer transfer(plan, stream.handle(), load);
  CHECK(transfer.Wait() == 0);
  for (std::int64_t layer = 0; layer < plan.layers; ++layer) {
    CHECK(std::memcmp(plan.device[layer].data(), plan.host[layer].data(), 100) == 0);
  }
  const auto log = Log();
  CHECK(log.size() == 3 && log[0].engine == EngineKind::kKernel && log[1].engine == EngineKind::kCopyEngine);
  CHECK(log[0].first_layer == log[1].first_layer && log[0].end_layer == log[1].end_layer);
  CHECK(log[2].first_layer == 2 && log[2].engine == EngineKind::kKernel);  // there may be memory again

  Submission by_kernel;
  by_kernel.engine = EngineKind::kKernel;
  Transfer named(plan, stream.handle(), by_kernel);
  CHECK(named.Wait() == -1);
  before_copy = nullptr;
  DestroyFakeStream(compute);
}

// A layer of 64 MiB is one call of the kernel.
void WithoutMemoryTheCopyEngineHasItsBoundToo() {
  Plan plan(3, 16 << 10, false);
  Submission load;
  load.device_ids.clear(), load.host_ids.clear();
  for (int i = 0; i < 4096; ++i) load.device_ids.push_back(2 * i), load.host_ids.push_back(3 * i);
  OpenStream stream;
  before_copy = [](const EngineWork& work, const DeviceStream&) {
    if (work.first_layer > 0 || Log().back().engine == EngineKind::kCopyEngine) return Status{};
    return Status{cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory", "cudaMalloc"};
  };
  ClearLog();
  Transfer transfer(plan, stream.handle(), load);
  CHECK(transfer.Wait() == 0);
  before_copy = nullptr;
  const auto log = Log();
  CHECK(log.size() == 1 + 3 * 4 && log[0].engine == EngineKind::kKernel && log[0].blocks == 4096);
  for (std::size_t i = 1; i < log.size(); ++i) {
    CHECK(log[i].engine == EngineKind::kCopyEngine && log[i].blocks == 1024);
    CHECK(log[i].first_layer == static_cast<std::int64_t>(i - 1) / 4);
  }
}

void AnEngineThatThrowsIsAFailure() {
  Plan plan(1, 100, true);
  OpenStream stream;
  before_copy = [](const EngineWork&, const DeviceStream&) -> Status { throw std::bad_alloc(); };
  Transfer transfer(plan, stream.handle(), {});
  CHECK(transfer.Wait() == -1);
  CHECK(paddle_kv_queue_forget(transfer.last()) == 1);
  before_copy = nullptr;
  Transfer next(plan, stream.handle(), {});
  CHECK(next.Wait() == 0);
}

void WorkBehindWaitStreamSeesTheGroup() {
  Plan plan(3, 5000, true);
  OpenStream stream;
  cudaStream_t compute = MakeFakeStream();
  for (int round = 0; round < 50; ++round) {
    for (auto& layer : plan.device) std::fill(layer.begin(), layer.end(), 0);
    std::atomic<int> wrong{0};
    Transfer transfer(plan, stream.handle(), {});
    for (std::int64_t layer = 0; layer < plan.layers; ++layer) {
      CHECK(paddle_kv_queue_wait_stream(0, Handle(compute), transfer.records[layer]->handle(), -1) == 0);
      Enqueue(compute, [&plan, &wrong, layer] {
        wrong += std::memcmp(plan.device[layer].data(), plan.host[layer].data(), 5000) != 0;
      });
    }
    cudaStreamSynchronize(compute);
    CHECK(wrong == 0);
  }
  DestroyFakeStream(compute);
}

void WhatTheQueueDoesNotKnow() {
  Plan plan(1, 100, true);
  cudaStream_t closed = MakeFakeStream();
  Transfer transfer(plan, Handle(closed), {});
  CHECK(transfer.result == -1);
  int code = 1;
  const char* name = nullptr;
  CHECK(std::string(paddle_kv_queue_error(&code, &name)).find("not open") != std::string::npos);
  CHECK(code == 0 && std::string(name).empty());
  CHECK(paddle_kv_queue_close(Handle(closed)) == 0);
  CHECK(paddle_kv_queue_flush(Handle(closed), 0) == 0);
  DestroyFakeStream(closed);
  OpenStream stream;
  PaddleKvTransfer unknown{};
  unknown.plan = -5;
  unknown.stream = stream.handle();
  CHECK(paddle_kv_queue_submit(&unknown) == -1);
  CHECK(std::string(paddle_kv_queue_error(&code, &name)).find("plan = -5 is not registered") != std::string::npos);
}

void CloseWaitsForAllAndGivesBack() {
  Plan plan(2, 48 << 20, false);
  const int before = EventsAlive();
  {
    std::vector<std::unique_ptr<Transfer>> transfers;
    OpenStream stream;
    auto gate = std::make_unique<Gate>(stream.stream);
    for (int i = 0; i < 5; ++i) transfers.push_back(std::make_unique<Transfer>(plan, stream.handle(), Submission{}));
    std::thread opener([&] {
      std::this_thread::sleep_for(milliseconds(30));
      gate->Open();
    });
    CHECK(paddle_kv_queue_close(stream.handle()) == 0);
    for (const auto& transfer : transfers) CHECK(Query(transfer->last()) == 0);
    opener.join();
  }
  CHECK(EventsAlive() == before);
}

// Several threads, each with a stream of its own, transfers that wait for those of others, and questions in between.
void SeveralThreads() {
  constexpr int kThreads = 4;
  constexpr int kRounds = 150;
  Plan plan(3, 700, true);
  std::vector<std::unique_ptr<OpenStream>> streams;
  for (int i = 0; i < kThreads; ++i) streams.push_back(std::make_unique<OpenStream>(i == 0));
  std::mutex mutex;
  std::vector<std::int64_t> latest;  // events that others may wait for; kept to the end
  std::vector<std::unique_ptr<Transfer>> kept;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      cudaStream_t compute = MakeFakeStream();
      for (int round = 0; round < kRounds; ++round) {
        Submission load;
        load.device_ids = {t, t + kThreads};
        load.host_ids = {t, static_cast<std::int64_t>(random() % 8)};
        load.waits.assign(3, {});
        std::unique_ptr<Transfer> transfer;
        {
          const std::lock_guard<std::mutex> lock(mutex);
          if (!latest.empty()) load.waits[random() % 3] = {latest[random() % latest.size()]};
          transfer = std::make_unique<Transfer>(plan, streams[t]->handle(), load);
          latest.push_back(transfer->records[random() % 3]->handle());
          if (latest.size() > 16) latest.erase(latest.begin());
        }
        CHECK(transfer->result == 0);
        switch (random() % 4) {
          case 0:
            CHECK(paddle_kv_queue_wait_stream(0, Handle(compute), transfer->records[1]->handle(), -1) == 0);
            break;
          case 1:
            CHECK(paddle_kv_queue_flush(streams[t]->handle(), -1) == 0);
            break;
          case 2:
            CHECK(transfer->Wait() == 0);
            break;
          default:
            CHECK(Query(transfer->last()) >= 0);
        }
        const std::lock_guard<std::mutex> lock(mutex);
        kept.push_back(std::move(transfer));
      }
      cudaStreamSynchronize(compute);
      DestroyFakeStream(compute);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& transfer : kept) CHECK(transfer->Wait() == 0);
  for (std::int64_t layer = 0; layer < 3; ++layer) {
    for (int t = 0; t < kThreads; ++t)
      CHECK(std::memcmp(&plan.device[layer][t * 700], &plan.host[layer][t * 700], 700) == 0);
  }
  streams.clear();
}

const Test kTests[] = {
    {"without_a_thread_there_is_no_queue", WithoutAThreadThereIsNoQueue},
    {"all_bytes_arrive_in_both_directions", AllBytesArriveInBothDirections},
    {"one_event_for_all_layers", OneEventForAllLayers},
    {"a_group_is_held_back_until_what_it_waits_for_is_recorded", AGroupIsHeldBackUntilWhatItWaitsForIsRecorded},
    {"a_wait_of_a_later_group_splits_the_transfer", AWaitOfALaterGroupSplitsTheTransfer},
    {"bytes_in_flight_are_bounded", BytesInFlightAreBounded},
    {"large_layers_go_to_the_copy_engine_in_parts", LargeLayersGoToTheCopyEngineInParts},
    {"a_transfer_begins_with_its_first_part", ATransferBeginsWithItsFirstPart},
    {"what_follows_goes_to_the_same_engine", WhatFollowsGoesToTheSameEngine},
    {"between_caches_kernels_copy_all_but_large_pieces", BetweenCachesKernelsCopyAllButLargePieces},
    {"between_caches_calls_are_long_and_told_of_compute", BetweenCachesCallsAreLongAndToldOfCompute},
    {"between_caches_the_last_layer_is_not_beside_compute", BetweenCachesTheLastLayerIsNotBesideCompute},
    {"no_call_of_the_copy_engine_is_larger_than_its_bound", NoCallOfTheCopyEngineIsLargerThanItsBound},
    {"a_part_that_fails_fails_its_layer", APartThatFailsFailsItsLayer},
    {"two_calls_are_in_flight_however_large", TwoCallsAreInFlightHoweverLarge},
    {"an_urgent_transfer_is_submitted_next", AnUrgentTransferIsSubmittedNext},
    {"a_failure_is_told_by_the_events_behind_it", AFailureIsToldByTheEventsBehindIt},
    {"a_failed_transfer_keeps_its_place_in_the_order", AFailedTransferKeepsItsPlaceInTheOrder},
    {"an_event_that_is_used_anew_has_not_failed", AnEventThatIsUsedAnewHasNotFailed},
    {"the_longest_time_of_python_does_not_overflow", TheLongestTimeOfPythonDoesNotOverflow},
    {"flush_does_not_wait_for_what_is_enqueued_later", FlushDoesNotWaitForWhatIsEnqueuedLater},
    {"streams_that_are_equally_urgent_take_turns", StreamsThatAreEquallyUrgentTakeTurns},
    {"another_device_than_the_streams_is_never_made_current", AnotherDeviceThanTheStreamsIsNeverMadeCurrent},
    {"two_threads_close_a_stream", TwoThreadsCloseAStream},
    {"without_memory_for_another_engine_the_copy_engine_is_taken", WithoutMemoryForAnotherEngineTheCopyEngineIsTaken},
    {"without_memory_the_copy_engine_has_its_bound_too", WithoutMemoryTheCopyEngineHasItsBoundToo},
    {"an_engine_that_throws_is_a_failure", AnEngineThatThrowsIsAFailure},
    {"work_behind_wait_stream_sees_the_group", WorkBehindWaitStreamSeesTheGroup},
    {"what_the_queue_does_not_know", WhatTheQueueDoesNotKnow},
    {"close_waits_for_all_and_gives_back", CloseWaitsForAllAndGivesBack},
    {"several_threads", SeveralThreads},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
