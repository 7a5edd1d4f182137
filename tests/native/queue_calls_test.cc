// Cancelling, watching, what each device has of its own, and calls that are wrong.
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "paddle_kv/transfer/queue_api.h"
#include "queue_rig.h"
#include "recording_engine.h"

namespace paddle_kv {
namespace {

using std::chrono::milliseconds;

struct Error {
  int code = 1;
  std::string name, text;
  Error() {
    const char* of_cuda = nullptr;
    text = paddle_kv_queue_error(&code, &of_cuda);
    name = of_cuda;
  }
};

std::int64_t Cancel(std::int64_t stream, std::int64_t token) {
  std::int64_t layer = -7;
  CHECK(paddle_kv_queue_cancel(stream, token, &layer) == 0);
  return layer;
}

void CheckCancelled(std::int64_t event) {
  WaitUntil([&] { return Query(event) != 1; });
  CHECK(Query(event) == -1);
  const Error error;
  CHECK(error.code == 0 && error.name == "cancelled" && error.text == "cancelled");
}

std::int64_t BytesOf(const std::vector<Copied>& log, std::int64_t block_bytes) {
  std::int64_t bytes = 0;
  for (const Copied& call : log) bytes += call.blocks * (call.end_layer - call.first_layer) * block_bytes;
  return bytes;
}

Submission ByCopyEngine(std::int64_t token) {
  Submission load;
  load.engine = EngineKind::kCopyEngine;
  load.token = token;
  return load;
}

// ---- cancel ----
void CancelDropsWhatNoEngineWasGiven() {
  Plan plan(16, 8 << 20, false), small(4, 100, true);
  const auto before = small.device;
  OpenStream stream, other;
  ClearLog();
  Gate gate(stream.stream);
  Transfer transfer(plan, stream.handle(), ByCopyEngine(7));
  WaitUntil([] { return Log().size() == 2; });
  std::this_thread::sleep_for(milliseconds(20));  // 32 MiB are in flight: the third call is held back
  CHECK(Cancel(stream.handle(), 8) == -1);
  CHECK(Cancel(stream.handle(), 7) == 4);
  CHECK(Cancel(stream.handle(), 7) == -1);  // all is dropped
  CHECK(paddle_kv_queue_flush(stream.handle(), 5'000'000) == 0);
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(Query(transfer.last()) == 1);  // recorded, behind what is in flight
  Transfer behind(plan, stream.handle(), ByCopyEngine(8));
  Submission load;
  load.token = 7;
  load.waits = {{}, {}, {behind.last()}, {}};  // which is held back
  Transfer half(small, other.handle(), load);
  WaitUntil([&] { return Query(half.records[1]->handle()) == 0; });
  CHECK(Cancel(other.handle(), 7) == 2);
  gate.Open();
  CheckCancelled(transfer.records[4]->handle());
  CheckCancelled(transfer.last());
  CHECK(Query(transfer.records[3]->handle()) == 0);
  CHECK(behind.Wait() == 0);
  CheckCancelled(half.records[2]->handle());
  CheckCancelled(half.last());
  for (std::int64_t layer = 0; layer < small.layers; ++layer) {
    auto expected = before[layer];
    if (layer < 2) std::memcpy(expected.data(), small.host[layer].data(), 100);
    CHECK(small.device[layer] == expected);
  }
  CHECK(half.Submit(small, other.handle(), {}) == 0);  // its events may be used anew
  CHECK(half.Wait() == 0);
}

void CancelDropsAllThatIsQueued() {
  constexpr std::int64_t kBytes = 64 << 20;
  Plan plan(32, kBytes, false);
  OpenStream stream;
  ClearLog();
  {
    Gate gate(stream.stream);
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (int i = 0; i < 8; ++i) {
      Submission load = ByCopyEngine(i);
      load.device_ids = load.host_ids = {0, 1, 2, 3};
      transfers.push_back(std::make_unique<Transfer>(plan, stream.handle(), load));
    }
    for (int i = 0; i < 8; ++i) CHECK(Cancel(stream.handle(), i) == 0);
    gate.Open();
    for (const auto& transfer : transfers) CheckCancelled(transfer->last());
    CHECK(BytesOf(Log(), kBytes) < 3 * kBytes);  // of blocks that are larger than a call
  }
  Plan small(32, 1 << 20, false);
  ClearLog();
  Gate gate(stream.stream);
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (int i = 0; i < 8; ++i) {
    Submission load = ByCopyEngine(i);
    load.device_ids.clear(), load.host_ids.clear();
    for (int block = 0; block < 64; ++block) load.device_ids.push_back(block), load.host_ids.push_back(block);
    transfers.push_back(std::make_unique<Transfer>(small, stream.handle(), load));
  }
  for (int i = 0; i < 8; ++i) CHECK(Cancel(stream.handle(), i) == 0);
  gate.Open();
  for (const auto& transfer : transfers) CheckCancelled(transfer->last());
  CHECK(BytesOf(Log(), 1 << 20) < 64 << 20);  // of 16 GiB
}

// What comes behind the event alone must not pass what the dropped transfer had to wait for.
void WhatWasCancelledKeepsItsPlaceInTheOrder() {
  Plan plan(2, 100, true), full(1, 16 << 20, false);
  OpenStream stream, other;
  cudaStream_t compute = MakeFakeStream();
  const auto before = plan.device;
  {
    Gate reading(compute), held_up(other.stream);
    Event recorded;
    cudaEventRecord(recorded.event, compute);
    Transfer a(full, other.handle(), {}), b(full, other.handle(), {}), pending(full, other.handle(), {});
    Submission behind;
    behind.token = 3;
    behind.waits = {{pending.last()}, {recorded.handle()}};
    Transfer dropped(plan, stream.handle(), behind);
    CHECK(Cancel(stream.handle(), 3) == 0);
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(Query(dropped.records[0]->handle()) == 1);
    CHECK(paddle_kv_queue_flush(stream.handle(), 1000) == 1);
    held_up.Open();
    CheckCancelled(dropped.records[0]->handle());
    CHECK(cudaEventQuery(pending.records[0]->event) == cudaSuccess);
    CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(Query(dropped.last()) == 1);
    reading.Open();
    CheckCancelled(dropped.last());
  }
  CHECK(plan.device == before);
  DestroyFakeStream(compute);
}

void SeveralPartsOfATransferAreCancelledTogether() {
  Plan plan(1, 16 << 20, false), parts(4, 100, true);
  OpenStream stream;
  Gate gate(stream.stream);
  Transfer a(plan, stream.handle(), ByCopyEngine(1)), b(plan, stream.handle(), ByCopyEngine(1));
  WaitUntil([&] { return paddle_kv_queue_flush(stream.handle(), 0) == 0; });
  Transfer first(parts, stream.handle(), ByCopyEngine(2)), second(parts, stream.handle(), ByCopyEngine(2));
  Transfer spared(parts, stream.handle(), ByCopyEngine(4));
  CHECK(Cancel(stream.handle(), 1) == -1);
  CHECK(Cancel(stream.handle(), 2) == 0);
  gate.Open();
  CheckCancelled(first.last());
  CheckCancelled(second.last());
  CHECK(a.Wait() == 0 && b.Wait() == 0 && spared.Wait() == 0);
  std::int64_t layer = 0;
  CHECK(paddle_kv_queue_cancel(12345, 2, &layer) == -1);
  CHECK(Error().text == "stream = 12345 is not open");
}

// The engine that was given the groups has no memory for them: the copy engine is given them, although the rest was
// cancelled meanwhile. Whoever cancelled was told that they are copied.
void WhatAnEngineWasGivenIsCopiedByAnother() {
  Plan plan(3, 100, true);
  OpenStream stream;
  cudaStream_t compute = MakeFakeStream();
  Event mark;
  cudaEventRecord(mark.event, compute);
  std::atomic<bool> is_in_engine{false}, goes_on{false};
  before_copy = [&](const EngineWork&, const DeviceStream&) {
    if (Log().back().engine == EngineKind::kCopyEngine) return Status{};
    is_in_engine = true;
    WaitUntil([&] { return goes_on.load(); });
    return Status{cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory", "cudaMalloc"};
  };
  ClearLog();
  Submission load;
  load.token = 5;
  load.waits = {{}, {}, {mark.handle()}};
  Transfer transfer(plan, stream.handle(), load);
  WaitUntil([&] { return is_in_engine.load(); });
  CHECK(Cancel(stream.handle(), 5) == 2);
  goes_on = true;
  CheckCancelled(transfer.last());
  CHECK(Query(transfer.records[1]->handle()) == 0);
  before_copy = nullptr;
  for (std::int64_t layer = 0; layer < plan.layers; ++layer) {
    CHECK((std::memcmp(plan.device[layer].data(), plan.host[layer].data(), 100) == 0) == (layer < 2));
  }
  const auto log = Log();
  CHECK(log.size() == 2 && log[1].engine == EngineKind::kCopyEngine && log[1].end_layer == 2);
  DestroyFakeStream(compute);
}

// Between two parts of a layer.
void ALayerOfWhichAPartIsDroppedIsNamed() {
  Plan plan(2, 5 << 20, false);  // parts of three blocks, 15 MiB
  OpenStream stream;
  ClearLog();
  Gate gate(stream.stream);
  Submission load = ByCopyEngine(6);
  load.device_ids = load.host_ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  Transfer transfer(plan, stream.handle(), load);
  WaitUntil([] { return Log().size() == 3; });
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(Cancel(stream.handle(), 6) == 0);
  gate.Open();
  CheckCancelled(transfer.records[0]->handle());
  CheckCancelled(transfer.last());
  CHECK(BytesOf(Log(), 5 << 20) == 45 << 20);
}

// ---- completions ----
std::vector<std::int64_t> Take(std::int64_t capacity = 100) {
  std::vector<std::int64_t> tokens(capacity, -99);
  const std::int64_t count = paddle_kv_completions_take(tokens.data(), capacity);
  CHECK(count >= 0 && count <= capacity);
  tokens.resize(count);
  return tokens;
}

bool IsReadable(int timeout_ms) {
  pollfd descriptor = {paddle_kv_completions_open(), POLLIN, 0};
  CHECK(descriptor.fd >= 0);
  return poll(&descriptor, 1, timeout_ms) == 1;
}

void WatchedEventsAreReported() {
  Plan plan(2, 100, true);
  OpenStream stream;
  CHECK(paddle_kv_completions_open() == paddle_kv_completions_open());
  CHECK(!IsReadable(0) && Take().empty());
  {
    Gate gate(stream.stream);
    Transfer transfer(plan, stream.handle(), {});
    const std::int64_t events[] = {transfer.records[0]->handle(), transfer.last()};
    CHECK(paddle_kv_queue_watch(0, 11, events, 2) == 0);
    CHECK(!IsReadable(30));
    gate.Open();
    CHECK(IsReadable(5000));
    CHECK(Take() == std::vector<std::int64_t>{11});
    CHECK(!IsReadable(0));
    CHECK(paddle_kv_queue_watch(0, 12, events, 2) == 0);  // passed already
    CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{12});
    CHECK(paddle_kv_queue_watch(0, 13, nullptr, 0) == 0);
    CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{13});
  }
  CHECK(paddle_kv_queue_watch(0, 1, nullptr, 1) == -1);
  CHECK(paddle_kv_queue_watch(0, 1, nullptr, -1) == -1);
}

// The first of the events is passed long before the second is enqueued by the thread.
void AWatchOutlivesWhatIsHeldBack() {
  Plan full(1, 16 << 20, false);
  OpenStream stream;
  std::vector<std::unique_ptr<Transfer>> transfers;
  Gate gate(stream.stream);
  for (int i = 0; i < 4; ++i) transfers.push_back(std::make_unique<Transfer>(full, stream.handle(), Submission{}));
  Event passed;
  for (const int last : {3, 0, 2}) {
    const std::int64_t events[] = {passed.handle(), transfers[0]->last(), transfers[last]->last()};
    CHECK(paddle_kv_queue_watch(0, last, events, 3) == 0);
  }
  CHECK(!IsReadable(20));
  gate.Open();
  std::vector<std::int64_t> taken;
  while (taken.size() < 3) {
    CHECK(IsReadable(5000));
    const auto more = Take(1);  // what is left keeps the descriptor readable
    taken.insert(taken.end(), more.begin(), more.end());
  }
  CHECK(std::is_permutation(taken.begin(), taken.end(), std::begin({0, 2, 3})));
  for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
}

void FailuresAreReportedToo() {
  Plan plan(1, 100, true);
  OpenStream stream;
  before_copy = [](const EngineWork&, const DeviceStream&) {
    return Status{cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "it broke", "a launch"};
  };
  Transfer transfer(plan, stream.handle(), {});
  std::int64_t event = transfer.last();
  CHECK(paddle_kv_queue_watch(0, 21, &event, 1) == 0);
  CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{21});
  CHECK(Query(event) == -1 && Error().code == cudaErrorLaunchFailure);
  before_copy = nullptr;

  Gate gate(stream.stream);
  Submission load;
  load.token = 22;
  load.waits = {{event}};
  Transfer held(plan, stream.handle(), load);
  CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
  event = held.last();
  CHECK(paddle_kv_queue_watch(0, 22, &event, 1) == 0);
  CHECK(!IsReadable(20));
  SetQueriesFail(cudaErrorLaunchFailure);  // the device is lost
  CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{22});
  CHECK(Query(event) == -1 && Error().code == cudaErrorLaunchFailure);
  CHECK(paddle_kv_queue_watch(99, 23, &event, 1) == 0);
  CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{23});
  SetQueriesFail(cudaSuccess);
  gate.Open();
  CHECK(held.Wait() == 0);
}

// ---- hearing ----
constexpr int kTold = 0, kNotInTime = 1, kInterrupted = 2, kElsewhere = 3;
using Clock = std::chrono::steady_clock;

// Whether so little time has gone by since it was made that whoever heard of something since was not too late.
class Prompt {
 public:
  bool Is() const { return Clock::now() - began_ < milliseconds(9); }

 private:
  Clock::time_point began_ = Clock::now();
};

void WhoHearsOfATokenTakesIt() {
  Plan plan(1, 100, true);
  OpenStream stream;
  CHECK(paddle_kv_queue_hear(31, 0) == kElsewhere);  // nobody watches for it
  Gate gate(stream.stream);
  Transfer transfer(plan, stream.handle(), {});
  const std::int64_t event = transfer.last();
  for (const std::int64_t token : {31, 32, 33}) CHECK(paddle_kv_queue_watch(0, token, &event, 1) == 0);
  const auto began = Clock::now();
  CHECK(paddle_kv_queue_hear(31, 1'030'000) == kNotInTime);
  CHECK(Clock::now() - began >= milliseconds(1030));
  CHECK(paddle_kv_queue_hear(31, 0) == kNotInTime && Clock::now() - began < milliseconds(5000));
  std::atomic<int> heard{-1};
  std::thread hearer([&] {
    int answer = kElsewhere;  // as the other one asks at the same moment
    while (answer == kElsewhere) answer = paddle_kv_queue_hear(32, -1);
    heard = answer;
  });
  WaitUntil([] { return paddle_kv_queue_hear(32, 0) == kElsewhere; });  // one at a time
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(heard == -1 && !IsReadable(0));
  const Prompt prompt;
  gate.Open();
  hearer.join();
  CHECK(heard == kTold);
  CHECK(paddle_kv_queue_end_hearing(32, 1) == 0);
  const bool is_prompt = prompt.Is();
  CHECK(paddle_kv_queue_hear(32, -1) == kElsewhere);  // told once
  std::vector<std::int64_t> taken;
  while (taken.size() < 2) {
    CHECK(IsReadable(5000));
    for (const std::int64_t token : Take()) {
      if (token != 32 || is_prompt) taken.push_back(token);
    }
  }
  CHECK(std::is_permutation(taken.begin(), taken.end(), std::begin({31, 33})));  // whose time was over, and nobody's
  CHECK(!IsReadable(20));
  CHECK(paddle_kv_queue_hear(33, -1) == kElsewhere);  // taken
}

// As if watch was called for the last event behind the submission.
void ASubmissionBringsItsOwnWatch() {
  Plan plan(3, 100, true);
  OpenStream stream;
  Submission load;
  load.watch = 71;
  {
    Gate gate(stream.stream);
    Transfer transfer(plan, stream.handle(), load);
    CHECK(!IsReadable(30));
    CHECK(paddle_kv_queue_hear(71, 0) == kNotInTime);
    gate.Open();
    CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{71});
    CHECK(Query(transfer.last()) == 0);
  }
  load.watch = 75;
  {
    OpenStream held;
    Gate held_gate(held.stream);
    Transfer awaited(plan, held.handle(), {});
    load.waits = {{}, {awaited.last()}, {}};
    Transfer half(plan, stream.handle(), load);  // its first layer comes at once
    WaitFor(half.records[0]->event);
    WaitUntil([&] { return Query(half.records[0]->handle()) == 0; });
    CHECK(!IsReadable(30));
    held_gate.Open();
    CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{75});
    CHECK(Query(half.last()) == 0 && awaited.Wait() == 0);
  }
  load.waits.clear();
  load.watch = 72;
  before_copy = [](const EngineWork&, const DeviceStream&) {
    return Status{cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "it broke", "a launch"};
  };
  Transfer failed(plan, stream.handle(), load);
  CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{72});
  CHECK(Query(failed.last()) == -1);
  before_copy = nullptr;
  load.watch = 73;
  Transfer refused(plan, 12345, load);  // no such stream
  CHECK(refused.result == -1 && paddle_kv_queue_hear(73, 0) == kElsewhere && !IsReadable(20));
  PaddleKvTransfer nothing{};
  nothing.plan = plan.number;
  nothing.direction = nothing.layers_per_event = 1;
  nothing.watch = 74;
  CHECK(paddle_kv_queue_submit(&nothing) == 0);
  CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{74});
}

// What a thread has heard before does not tell it of the next token.
void EachTokenIsHeardOfAnew() {
  Plan plan(1, 100, true);
  OpenStream stream;
  for (std::int64_t token = 40; token < 60; ++token) {
    Gate gate(stream.stream);
    Transfer transfer(plan, stream.handle(), {});
    const std::int64_t event = transfer.last();
    CHECK(paddle_kv_queue_watch(0, token, &event, 1) == 0);
    CHECK(paddle_kv_queue_hear(token, 1000) == kNotInTime);
    const Prompt prompt;
    gate.Open();
    const bool is_told = paddle_kv_queue_hear(token, -1) == kTold;
    CHECK(paddle_kv_queue_end_hearing(token, 1) == 0);
    const bool is_prompt = prompt.Is();
    const std::vector<std::int64_t> taken = Take();
    CHECK(taken == std::vector<std::int64_t>{token} ? !is_told || !is_prompt : is_told && taken.empty());
    CHECK(!IsReadable(0));
  }
}

// A handler of a signal keeps it from what there is to do, or it fails.
void WhoDoesNothingAboutItIsNoLongerAlone() {
  Event passed;
  const std::int64_t event = passed.handle();
  for (std::int64_t token = 81; token < 84;) {
    Prompt prompt;
    int heard = kElsewhere;
    while (heard != kTold) {  // the thread may be quicker
      if (heard == kElsewhere) {
        Take();
        prompt = {};
        CHECK(paddle_kv_queue_watch(0, token, &event, 1) == 0);
      }
      heard = paddle_kv_queue_hear(token, -1);
    }
    if (token == 82) CHECK(paddle_kv_queue_end_hearing(token, 0) == 0);
    if (token == 83) CHECK(paddle_kv_queue_end_hearing(token, 1) == 0);
    if (token == 83 && !prompt.Is()) continue;  // this thread was held up: once more
    CHECK(IsReadable(token == 83 ? 50 : 5000) == (token != 83));
    CHECK(Take() == (token == 83 ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{token}));
    CHECK(paddle_kv_queue_end_hearing(token, 0) == 0 && !IsReadable(20));  // once
    ++token;
  }
}

// Those that can be read when something has ended. The queue's thread opens /proc/self/task now and then.
std::size_t CountDescriptors() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed_meanwhile;
    count += std::filesystem::read_symlink(entry.path(), closed_meanwhile) == "anon_inode:[eventfd]" ? 1 : 0;
  }
  return count;
}

void AThreadHasADescriptorUntilItEnds() {
  Plan plan(1, 100, true);
  OpenStream stream;
  CHECK(!IsReadable(0));
  const std::size_t before = CountDescriptors();
  Gate gate(stream.stream);
  Transfer transfer(plan, stream.handle(), {});
  const std::int64_t event = transfer.last();
  CHECK(paddle_kv_queue_watch(0, 91, &event, 1) == 0);
  for (int i = 0; i < 3; ++i) {
    std::thread([&] {
      CHECK(paddle_kv_queue_hear(91, 100) == kNotInTime);
      CHECK(paddle_kv_queue_hear(91, 100) == kNotInTime);
      CHECK(CountDescriptors() == before + 1);
    }).join();
  }
  CHECK(CountDescriptors() == before);
  rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit none = {0, limit.rlim_max};
  std::thread([&] {
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK(paddle_kv_queue_hear(91, 100) == kElsewhere);  // there is none to be had
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(paddle_kv_queue_hear(91, 100) == kNotInTime);
  }).join();
  gate.Open();
  CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{91});
}

void ASignalEndsHearing() {
  Plan plan(1, 100, true);
  OpenStream stream;
  struct sigaction action = {}, before;
  action.sa_handler = [](int) {};
  CHECK(sigaction(SIGUSR1, &action, &before) == 0);
  Gate gate(stream.stream);
  Transfer transfer(plan, stream.handle(), {});
  const std::int64_t event = transfer.last();
  CHECK(paddle_kv_queue_watch(0, 61, &event, 1) == 0);
  std::atomic<int> heard{-1};
  std::thread hearer([&] { heard = paddle_kv_queue_hear(61, -1); });
  WaitUntil([&] {
    pthread_kill(hearer.native_handle(), SIGUSR1);
    std::this_thread::sleep_for(milliseconds(1));
    return heard != -1;
  });
  CHECK(heard == kInterrupted);
  hearer.join();
  gate.Open();
  CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{61});
  CHECK(sigaction(SIGUSR1, &before, nullptr) == 0);
}

// ---- the thread and the lock ----
// A call of another thread (cudaMalloc, loading a module) may hold up what the queue's thread asks of the driver.
void ASlowDriverHoldsNobodyElse() {
  Plan plan(1, 16 << 20, false);
  OpenStream stream;
  std::vector<std::unique_ptr<Transfer>> transfers;
  Gate gate(stream.stream);
  for (int i = 0; i < 4; ++i) transfers.push_back(std::make_unique<Transfer>(plan, stream.handle(), Submission{}));
  const std::int64_t last = transfers.back()->last();
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(paddle_kv_queue_watch(0, 1, &last, 1) == 0);
  SetQueryTime(500'000);
  std::this_thread::sleep_for(milliseconds(20));
  const auto began = std::chrono::steady_clock::now();
  std::int64_t layer = 0;
  for (int i = 0; i < 3; ++i) {
    transfers.push_back(std::make_unique<Transfer>(plan, stream.handle(), Submission{}));
    CHECK(Query(last) == 1);
    CHECK(paddle_kv_queue_wait_stream(0, stream.handle(), last, 0) == 1);
    CHECK(paddle_kv_queue_flush(stream.handle(), 0) == 1);
    CHECK(paddle_kv_queue_cancel(stream.handle(), 99, &layer) == 0 && layer == -1);
    CHECK(paddle_kv_queue_enqueued() >= 4 && paddle_kv_queue_submitted() >= 0);
    CHECK(Take().empty());
    std::this_thread::sleep_for(milliseconds(10));
  }
  CHECK(std::chrono::steady_clock::now() - began < milliseconds(300));
  SetQueryTime(0);
  gate.Open();
  for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
  CHECK(IsReadable(5000) && Take() == std::vector<std::int64_t>{1});
}

void EachDeviceHasItsCosts() {
  Plan zero(1, 100, true, 0), one(1, 100, true, 1);
  OpenStream stream(false, 0), other(false, 1);
  // Of the copy engine, the kernel and staging, [device to host, host to device][alone, beside compute].
  const auto set = [](int device, std::vector<std::int64_t> of_ways) {
    std::vector<std::int64_t> costs;
    for (const std::int64_t of_way : of_ways) costs.insert(costs.end(), EngineCosts::kSizes, of_way);
    CHECK(paddle_kv_queue_set_costs(device, costs.data()) == 0);
  };
  set(1, {1, 1, 9, 9, 2, 2, 1, 1, 2, 2, 2, 2});
  const auto engine_of = [](const Plan& plan, const OpenStream& stream) {
    ClearLog();
    Submission save;
    save.direction = Direction::kDeviceToHost;
    Transfer transfer(plan, stream.handle(), save);
    CHECK(transfer.Wait() == 0);
    return Log().front().engine;
  };
  CHECK(engine_of(zero, stream) == EngineKind::kKernel && engine_of(one, other) == EngineKind::kCopyEngine);

  // Beside compute, which runs on GPU 1 alone.
  for (const int device : {0, 1}) set(device, {9, 1, 9, 9, 2, 2, 2, 2, 99, 99, 99, 99});
  cudaStream_t compute = MakeFakeStream();
  Event passed;
  {
    Gate busy(compute);
    std::this_thread::sleep_for(milliseconds(30));  // what was seen before is forgotten
    CHECK(paddle_kv_queue_wait_stream(1, Handle(compute), passed.handle(), -1) == 0);
    CHECK(engine_of(zero, stream) == EngineKind::kKernel);
    CHECK(paddle_kv_queue_wait_stream(1, Handle(compute), passed.handle(), -1) == 0);
    CHECK(engine_of(one, other) == EngineKind::kCopyEngine);
  }
  DestroyFakeStream(compute);
}

void AStreamIsNotAskedAgainAtOnce() {
  cudaStream_t compute = MakeFakeStream();
  Event passed;
  const auto queries_of_a_wait = [&] {
    const int before = StreamQueries();
    CHECK(paddle_kv_queue_wait_stream(0, Handle(compute), passed.handle(), -1) == 0);
    return StreamQueries() - before;
  };
  std::this_thread::sleep_for(milliseconds(30));  // what was seen before is forgotten
  // The clock is read before the first wait: this thread may lose its core between the question and the wait's return.
  const auto check_next = [&](std::chrono::microseconds within, std::chrono::microseconds pause) {
    const auto before = std::chrono::steady_clock::now();
    CHECK(queries_of_a_wait() == 1);
    std::this_thread::sleep_for(pause);
    const int next = queries_of_a_wait();
    CHECK(next == 0 || std::chrono::steady_clock::now() - before > within);
  };
  for (int i = 0; i < 3; ++i) {
    check_next(std::chrono::microseconds(400), milliseconds(0));
    CHECK(cudaStreamSynchronize(compute) == cudaSuccess);
    std::this_thread::sleep_for(milliseconds(10));  // it counted as busy if the wait before was still on it
  }
  {
    Gate busy(compute);
    check_next(milliseconds(4), milliseconds(1));
    std::this_thread::sleep_for(milliseconds(10));
    CHECK(queries_of_a_wait() == 1);
  }
  DestroyFakeStream(compute);
}

void WhatCannotBeRightIsRefused() {
  Plan plan(2, 100, true);
  OpenStream stream, elsewhere(false, 1);
  Event start, first, second;
  const std::int64_t id = 0, no_waits[] = {0, 0}, records[] = {first.handle(), second.handle()};
  const std::int64_t bad_id = plan.blocks, negative = -1, no_event[] = {first.handle(), 0}, minus[] = {0, -2};
  const std::int64_t one_wait[] = {0, 1};
  PaddleKvTransfer right{};
  right.plan = plan.number;
  right.direction = right.engine = 1;
  right.device_ids = right.host_ids = &id;
  right.block_count = 1;
  right.end_layer = 2;
  right.layers_per_event = 1;
  right.waits_per_group = no_waits;
  right.start_event = start.handle();
  right.record_events = records;
  right.stream = stream.handle();
  right.watch = -1;  // else the events would have to live until it is reported
  const std::int64_t enqueued = paddle_kv_queue_enqueued();
  const auto check = [&](const std::string& expected, const std::function<void(PaddleKvTransfer&)>& change) {
    PaddleKvTransfer wrong = right;
    change(wrong);
    CHECK(paddle_kv_queue_submit(&wrong) == -1);
    if (Error().text.find(expected) == std::string::npos) {
      std::fprintf(stderr, "%s, not %s\n", Error().text.c_str(), expected.c_str());
      CHECK(false);
    }
  };
  const std::string last_block = std::to_string(plan.blocks - 1) + "]", blocks = std::to_string(plan.blocks);
  check("plan = 99999 is not registered", [](auto& t) { t.plan = 99999; });
  check("direction = 5 is not in [0, 1]", [](auto& t) { t.direction = 5; });
  check("direction = -1 is not in [0, 1]", [](auto& t) { t.direction = -1; });
  check("engine = 9 is not in [0, 3]", [](auto& t) { t.engine = 9; });
  check("engine = -1 is not in [0, 3]", [](auto& t) { t.engine = -1; });
  check("first_layer = -1 is not in [0, 2]", [](auto& t) { t.first_layer = -1; });
  check("end_layer = 3 is not in [0, 2]", [](auto& t) { t.end_layer = 3; });
  check("end_layer = 0 is not in [1, 2]", [](auto& t) { t.first_layer = 1, t.end_layer = 0; });
  check("layers_per_event = 0 is", [](auto& t) { t.layers_per_event = 0; });
  check("block_count = -1 is not in [0, " + blocks, [](auto& t) { t.block_count = -1; });
  check("block_count = 1000000 is", [](auto& t) { t.block_count = 1000000; });
  check("device_ids is null", [](auto& t) { t.device_ids = nullptr; });
  check("host_ids is null", [](auto& t) { t.host_ids = nullptr; });
  check("device_ids[0] = " + blocks + " is not in [0, " + last_block, [&](auto& t) { t.device_ids = &bad_id; });
  check("host_ids[0] = -1 is not in [0, " + last_block, [&](auto& t) { t.host_ids = &negative; });
  check("waits_per_group is null", [](auto& t) { t.waits_per_group = nullptr; });
  check("waits_per_group[1] = -2 is", [&](auto& t) { t.waits_per_group = minus; });
  check("wait_events is null", [&](auto& t) { t.waits_per_group = one_wait; });
  check("record_events is null", [](auto& t) { t.record_events = nullptr; });
  check("record_events[1] is no event", [&](auto& t) { t.record_events = no_event; });
  check("start_event[0] is no event", [](auto& t) { t.start_event = 0; });
  check("is not open on GPU 0", [&](auto& t) { t.stream = elsewhere.handle(); });
  check("is not open", [](auto& t) { t.stream = 77; });
  CHECK(paddle_kv_queue_submit(nullptr) == -1 && Error().text == "transfer is null");
  CHECK(paddle_kv_queue_enqueued() == enqueued);
  CHECK(Query(records[0], records[1]) == 0);  // not pending
  CHECK(paddle_kv_queue_submit(&right) == 0);
  CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
  WaitFor(second.event);
}

void AMissingArchitectureIsNamed() {
  Plan plan(1, 100, true);
  OpenStream stream;
  before_copy = [](const EngineWork&, const DeviceStream&) {
    return Status{cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel", "a launch"};
  };
  Transfer transfer(plan, stream.handle(), {});
  CHECK(transfer.Wait() == -1);
  const Error error;
  CHECK(error.code == cudaErrorNoKernelImageForDevice);
  CHECK(error.text.rfind("GPU 0 has architecture 90, the operators were built for 80", 0) == 0);
  CHECK(error.text.find("PADDLE_KV_CUDA_ARCHS=\"90\"") != std::string::npos);
  before_copy = [](const EngineWork&, const DeviceStream&) -> Status { throw std::bad_alloc(); };
  Transfer without(plan, stream.handle(), {});
  CHECK(without.Wait() == -1);
  const Error of_host;
  CHECK(of_host.code == 0 && of_host.name == "out of host memory");
  before_copy = nullptr;
}

// The last of all: two transfers stay in the queue for ever.
void NothingIsAskedWhileNothingCanHappen() {
  CHECK(RestsFor(milliseconds(300)));
  Plan& plan = *new Plan(1, 100, true);
  const auto* stream = new OpenStream;
  auto* second = new Transfer(plan, stream->handle(), {});
  CHECK(second->Wait() == 0);
  std::atomic<bool> goes_on{false};
  before_copy = [&](const EngineWork&, const DeviceStream&) {
    WaitUntil([&] { return goes_on.load(); });
    return Status{};
  };
  // Each waits for the other: the event of the second, which is behind the first, is pending when that is looked at.
  Transfer busy(plan, stream->handle(), {});
  Submission behind;
  behind.waits = {{second->last()}};
  const auto* first = new Transfer(plan, stream->handle(), behind);
  CHECK(second->Submit(plan, stream->handle(), {}) == 0);
  const std::int64_t event = first->last();
  CHECK(paddle_kv_queue_watch(0, 1, &event, 1) == 0);
  goes_on = true;
  CHECK(busy.Wait() == 0);
  CHECK(RestsFor(milliseconds(300)));
  CHECK(Query(event) == 1);
  before_copy = nullptr;
}

const Test kTests[] = {
    {"cancel_drops_what_no_engine_was_given", CancelDropsWhatNoEngineWasGiven},
    {"cancel_drops_all_that_is_queued", CancelDropsAllThatIsQueued},
    {"what_was_cancelled_keeps_its_place_in_the_order", WhatWasCancelledKeepsItsPlaceInTheOrder},
    {"several_parts_of_a_transfer_are_cancelled_together", SeveralPartsOfATransferAreCancelledTogether},
    {"what_an_engine_was_given_is_copied_by_another", WhatAnEngineWasGivenIsCopiedByAnother},
    {"a_layer_of_which_a_part_is_dropped_is_named", ALayerOfWhichAPartIsDroppedIsNamed},
    {"watched_events_are_reported", WatchedEventsAreReported},
    {"a_watch_outlives_what_is_held_back", AWatchOutlivesWhatIsHeldBack},
    {"who_hears_of_a_token_takes_it", WhoHearsOfATokenTakesIt},
    {"a_submission_brings_its_own_watch", ASubmissionBringsItsOwnWatch},
    {"each_token_is_heard_of_anew", EachTokenIsHeardOfAnew},
    {"a_signal_ends_hearing", ASignalEndsHearing},
    {"who_does_nothing_about_it_is_no_longer_alone", WhoDoesNothingAboutItIsNoLongerAlone},
    {"a_thread_has_a_descriptor_until_it_ends", AThreadHasADescriptorUntilItEnds},
    {"failures_are_reported_too", FailuresAreReportedToo},
    {"a_slow_driver_holds_nobody_else", ASlowDriverHoldsNobodyElse},
    {"each_device_has_its_costs", EachDeviceHasItsCosts},
    {"a_stream_is_not_asked_again_at_once", AStreamIsNotAskedAgainAtOnce},
    {"what_cannot_be_right_is_refused", WhatCannotBeRightIsRefused},
    {"a_missing_architecture_is_named", AMissingArchitectureIsNamed},
    {"nothing_is_asked_while_nothing_can_happen", NothingIsAskedWhileNothingCanHappen},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
