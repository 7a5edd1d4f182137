// The queue with the engines themselves, on a CUDA runtime of threads (fake_cuda): what moves and what is left behind
// when any one call or allocation fails.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_rig.h"
#include "fake_cuda.h"
#include "queue_rig.h"

namespace {

// The nth allocation of the library in threads other than the first throws, or all from that one on; -1: none.
std::atomic<int> failing_allocation{-1};
std::atomic<bool> all_fail_then{false};
std::atomic<int> allocations{0};
const std::thread::id main_thread = std::this_thread::get_id();

// Returns how many there were before.
int FailAllocation(int nth, bool and_all_others = false) {
  const int before = allocations;
  allocations = 0;
  all_fail_then = and_all_others;
  failing_allocation = nth;
  return before;
}

}  // namespace

// Out of line: the compiler would miss the pair of malloc and free.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  if (failing_allocation >= 0 && InsideFakeCuda::depth == 0 && std::this_thread::get_id() != main_thread) {
    const int number = allocations++;
    if (number == failing_allocation || (all_fail_then && number > failing_allocation)) throw std::bad_alloc();
  }
  if (void* memory = std::malloc(std::max<std::size_t>(bytes, 1))) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace paddle_kv {
namespace {

using std::chrono::milliseconds;

bool AllAre(std::uint8_t byte, const std::vector<std::uint8_t>& bytes) {
  return bytes.front() == byte && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

// Two transfers of five blocks, held up until both are submitted, of which the first has a failure in wait. Who has
// seen its last event may use its blocks. Everything else is as without it.
template <class Fail>
void AFailureLeavesTheRestAlone(EngineKind engine, Direction direction, Order order, Fail fail) {
  const int events_before = EventsAlive();
  {
    Pools pools({272, 48}, 4, 12, 12, order);
    Submission first, second;
    first.engine = second.engine = engine;
    first.direction = second.direction = direction;
    first.device_ids = {0, 1, 2, 3, 7}, first.host_ids = {4, 5, 6, 7, 2};
    second.device_ids = {9, 4, 6, 5, 8}, second.host_ids = {0, 8, 1, 11, 9};
    Event mark;
    cudaStream_t compute = MakeFakeStream();
    const Pools::Memory before = pools.Now();
    Pools::Memory with_second = before, with_both = before;
    pools.Apply(second, &with_second);
    with_both = with_second;
    pools.Apply(first, &with_both);
    int result = 1;
    {
      OpenStream stream;
      {
        Gate computing(compute);
        cudaEventRecord(mark.event, compute);
        first.waits = {{}, {}, {mark.handle()}, {}};
        Gate gate(stream.stream);
        fail(true);
        Transfer one(pools, stream.handle(), first);
        CHECK(paddle_kv_queue_flush(stream.handle(), 20'000'000) == 0);
        fail(false);
        Transfer two(pools, stream.handle(), second);
        CHECK(paddle_kv_queue_flush(stream.handle(), 20'000'000) == 0);
        std::this_thread::sleep_for(milliseconds(1));
        CHECK(Query(one.last()) == 1);
        gate.Open();
        std::this_thread::sleep_for(milliseconds(1));
        CHECK(Query(one.last()) == 1);  // a failure or not: behind what it had to wait for
        computing.Open();
        result = one.Wait();
        // Nothing of the first moves any more.
        Pools::Memory then = before;
        pools.TakeTargets(first, &then);
        CHECK(two.Wait() == 0);
        Pools::Memory now = pools.Now();
        for (auto* memory : {&now.device, &now.host}) {
          const bool on_host = memory == &now.host;
          const auto& with = on_host ? with_second.host : with_second.device;
          const auto& all = on_host ? with_both.host : with_both.device;
          const auto& at_end_of_first = on_host ? then.host : then.device;
          for (std::size_t i = 0; i < memory->size(); ++i) {
            if (with[i] == all[i]) CHECK((*memory)[i] == with[i]);             // not of the first
            if (with[i] != all[i]) CHECK((*memory)[i] == at_end_of_first[i]);  // of the first alone
            CHECK((*memory)[i] == with[i] || (*memory)[i] == all[i]);
          }
        }
        if (result == 0) CHECK(now == with_both);
      }
    }
    DestroyFakeStream(compute);
  }
  CHECK(EventsAlive() == events_before && StreamsAlive() == 0 && BytesAlive() == 0);
}

template <class Test>
void ForEachKind(Test test) {
  for (const EngineKind engine : kEngines) {
    for (const Direction direction : kDirections) {
      for (const Order order : {Order::kLayerFirst, Order::kBlockFirst}) test(engine, direction, order);
    }
  }
}

int FailNthCall(int nth, cudaError_t error) {
  const int before = CallsSinceFailCall();
  FailCall(nth, error);
  return before;
}

// Here and below fail(n) lets the nth of them fail, -1 none, and returns how many there were before.
template <class Fail>
void EachMayFail(EngineKind engine, Direction direction, Order order, Fail fail) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    AFailureLeavesTheRestAlone(engine, direction, order, [&](bool begin) {
      const int before = fail(begin ? nth : -1);
      if (!begin) failed = before > nth;
    });
  }
}

void AnyCallMayFail() {
  ForEachKind([](EngineKind engine, Direction direction, Order order) {
    for (const cudaError_t error : {cudaErrorLaunchFailure, cudaErrorMemoryAllocation}) {
      EachMayFail(engine, direction, order, [&](int nth) { return FailNthCall(nth, error); });
    }
  });
}

void AnyAllocationMayFail() {
  ForEachKind([](EngineKind engine, Direction direction, Order order) {
    for (const bool and_all_others : {false, true}) {
      EachMayFail(engine, direction, order, [&](int nth) { return FailAllocation(nth, and_all_others); });
    }
  });
}

template <class Fail>
void NothingMovesBehindTheEventOfAFailure(Fail fail) {
  struct Case {
    std::vector<std::int64_t> sizes;
    std::int64_t layers, device_blocks, host_blocks;
    Order order;
    std::function<Submission(Direction)> given;
    int delay_us, step;  // the latter where calls are copies, most of them
  };
  const std::vector<Case> cases = {
      {{kPartBytes}, 1, 3, 4, Order::kLayerFirst, InParts, 3000, 1},
      {{80, 48}, 1, 300, 300, Order::kLayerFirst, InHalves, 50, 149},
      // Fills of staging, two at a time by two threads.
      {{12 << 10}, 2, 590, 1180, Order::kBlockFirst, [](Direction way) { return WithGaps(way, 590); }, 100, 197},
  };
  const int events_before = EventsAlive();
  for (const Case& one : cases) {
    SetLongestDelay(one.delay_us);
    for (const Direction direction : kDirections) {
      Pools pools(one.sizes, one.layers, one.device_blocks, one.host_blocks, one.order);
      const bool to_host = direction == Direction::kDeviceToHost;
      auto& target = to_host ? pools.host : pools.device;
      std::memset(target.data(), 0xAA, target.size());
      const Submission given = one.given(direction);
      Pools::Memory expected = pools.Now();
      pools.Apply(given, &expected);
      bool failed = true;
      for (int nth = 0; failed; nth += nth > 9 ? one.step : 1) {
        {
          OpenStream stream;
          fail(nth);
          Transfer transfer(pools, stream.handle(), given);
          const int result = transfer.Wait();
          failed = fail(-1) > nth;
          CHECK(result == 0 || failed);
          if (result == 0) CHECK(pools.Are(expected));
          std::memset(target.data(), 0xAA, target.size());
          cudaStreamSynchronize(stream.stream);
        }
        CHECK(StreamsAlive() == 0 && BytesAlive() == 0);
        CHECK(AllAre(0xAA, target));
      }
    }
  }
  SetLongestDelay(0);
  CHECK(EventsAlive() == events_before);
}

void NothingMovesBehindTheEventOfAFailedCall() {
  NothingMovesBehindTheEventOfAFailure([](int nth) { return FailNthCall(nth, cudaErrorLaunchFailure); });
}

void NothingMovesBehindTheEventOfAFailedAllocation() {
  NothingMovesBehindTheEventOfAFailure([](int nth) { return FailAllocation(nth); });
}

// The copy engine then moves all blocks of the band, those too that staging had been given.
void AFullDeviceLeavesBandsToTheCopyEngine() {
  std::vector<std::int64_t> costs(12 * EngineCosts::kSizes, 1000);
  std::fill(costs.begin() + 8 * EngineCosts::kSizes, costs.end(), 1);  // of staging
  CHECK(paddle_kv_queue_set_costs(0, costs.data()) == 0);
  for (const Direction direction : kDirections) {
    Pools pools({60 << 10}, 3, 600, 610, Order::kBlockFirst);
    Submission given = OfABand(direction);
    given.engine = EngineKind::kAuto;
    Pools::Memory after = pools.Now();
    pools.Apply(given, &after);
    bool failed = true;
    for (int nth = 0; failed; nth += nth < 9 ? 3 : 650) {  // most calls are copies
      pools.Fill();
      OpenStream stream;
      FailCall(nth, cudaErrorMemoryAllocation);
      Transfer transfer(pools, stream.handle(), given);
      CHECK(paddle_kv_queue_flush(stream.handle(), 20'000'000) == 0);
      failed = CallsSinceFailCall() > nth;
      FailCall(-1, cudaErrorMemoryAllocation);
      if (transfer.Wait() == 0) CHECK(pools.Are(after));
    }
  }
}

// Nobody would catch there what is thrown.
void WhatHasLandedNeedsNoMemory() {
  Pools pools({64}, 1, 4, 4, Order::kLayerFirst);
  OpenStream stream;
  Submission load;
  load.engine = EngineKind::kCopyEngine;
  std::vector<std::unique_ptr<Transfer>> transfers;
  {
    Gate gate(stream.stream);
    for (int i = 0; i < 5; ++i) transfers.push_back(std::make_unique<Transfer>(pools, stream.handle(), load));
    CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
  }
  cudaStreamSynchronize(stream.stream);
  FailAllocation(0);
  Transfer next(pools, stream.handle(), load);
  CHECK(next.Wait() == -1);
  FailAllocation(-1);
}

const Test kTests[] = {
    {"any_call_may_fail", AnyCallMayFail},
    {"any_allocation_may_fail", AnyAllocationMayFail},
    {"nothing_moves_behind_the_event_of_a_failed_call", NothingMovesBehindTheEventOfAFailedCall},
    {"nothing_moves_behind_the_event_of_a_failed_allocation", NothingMovesBehindTheEventOfAFailedAllocation},
    {"a_full_device_leaves_bands_to_the_copy_engine", AFullDeviceLeavesBandsToTheCopyEngine},
    {"what_has_landed_needs_no_memory", WhatHasLandedNeedsNoMemory},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
