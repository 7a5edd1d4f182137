// What tests of the queue have: events, streams that it feeds, transfers. A plan is anything with a `number` and
// `layers`.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "paddle_kv/transfer/engine_choice.h"
#include "paddle_kv/transfer/queue_api.h"

namespace paddle_kv {

template <class Condition>
void WaitUntil(Condition condition) {
  for (int i = 0; i < 20000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(condition());
}

// Whether this process takes less than a hundredth of a core in `length`. In one of five such times, as the thread of a
// sanitizer and a loaded host add to some of them.
inline bool RestsFor(std::chrono::milliseconds length) {
  const auto cpu_us = [] {
    timespec used{};
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) == 0);
    return used.tv_sec * 1'000'000 + used.tv_nsec / 1000;
  };
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::int64_t before = cpu_us();
    std::this_thread::sleep_for(length);
    if (cpu_us() - before < length.count() * 10) return true;
  }
  return false;
}

inline std::int64_t Handle(const void* pointer) { return reinterpret_cast<std::int64_t>(pointer); }

struct Event {
  cudaEvent_t event = nullptr;
  Event() { cudaEventCreateWithFlags(&event, 0); }
  ~Event() {
    paddle_kv_queue_forget(handle());
    cudaEventDestroy(event);
  }
  Event(const Event&) = delete;
  std::int64_t handle() const { return Handle(event); }
};

// 0 or -1 as paddle_kv_queue_query, 1: one of them was not passed.
template <class... Events>
int Query(Events... events) {
  const std::int64_t all[] = {events...};
  return paddle_kv_queue_query(0, all, sizeof...(events));
}

struct OpenStream {
  cudaStream_t stream = MakeFakeStream();
  explicit OpenStream(bool urgent = false, int device = 0) {
    CHECK(paddle_kv_queue_open(device, handle(), urgent) == 0);
  }
  ~OpenStream() {
    CHECK(paddle_kv_queue_close(handle()) == 0);
    DestroyFakeStream(stream);
  }
  OpenStream(const OpenStream&) = delete;
  std::int64_t handle() const { return Handle(stream); }
};

// Holds a stream: what is enqueued behind it does not run before Open().
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    Enqueue(stream, [state = state_] {
      while (!*state) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  void Open() { *state_ = true; }
  ~Gate() { Open(); }

 private:
  std::shared_ptr<std::atomic<bool>> state_ = std::make_shared<std::atomic<bool>>(false);
};

struct Submission {
  Direction direction = Direction::kHostToDevice;
  std::vector<std::int64_t> device_ids{0}, host_ids{0};
  std::int64_t layers_per_event = 1;
  EngineKind engine = EngineKind::kAuto;
  std::vector<std::vector<std::int64_t>> waits;  // of each group; none at all if empty
  std::int64_t token = 0;
  std::int64_t watch = -1;
};

// The events of a transfer, one a group.
struct Transfer {
  Event start;
  std::vector<std::unique_ptr<Event>> records;
  int result;

  template <class Plan>
  Transfer(const Plan& plan, std::int64_t stream, const Submission& given) {
    const std::int64_t groups = (plan.layers - 1) / given.layers_per_event + 1;
    for (std::int64_t g = 0; g < groups; ++g) records.push_back(std::make_unique<Event>());
    result = Submit(plan, stream, given);
  }
  // Once more, with the same events.
  template <class Plan>
  int Submit(const Plan& plan, std::int64_t stream, const Submission& given) {
    std::vector<std::int64_t> handles, waits, counts(records.size(), 0);
    for (std::size_t g = 0; g < records.size(); ++g) {
      handles.push_back(records[g]->handle());
      if (given.waits.empty()) continue;
      waits.insert(waits.end(), given.waits[g].begin(), given.waits[g].end());
      counts[g] = static_cast<std::int64_t>(given.waits[g].size());
    }
    const PaddleKvTransfer transfer = {plan.number,
                                       static_cast<std::int64_t>(given.direction),
                                       static_cast<std::int64_t>(given.engine),
                                       given.device_ids.data(),
                                       given.host_ids.data(),
                                       static_cast<std::int64_t>(given.host_ids.size()),
                                       0,
                                       plan.layers,
                                       given.layers_per_event,
                                       waits.data(),
                                       counts.data(),
                                       start.handle(),
                                       handles.data(),
                                       stream,
                                       given.token,
                                       given.watch};
    return paddle_kv_queue_submit(&transfer);
  }
  std::int64_t last() const { return records.back()->handle(); }
  // Blocks until the last group is copied; 0 or -1 as Query.
  int Wait() const {
    int state = 1;
    WaitUntil([&] { return (state = Query(last())) != 1; });
    return state;
  }
};

}  // namespace paddle_kv
