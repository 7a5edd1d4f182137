// Transfers whose groups are enqueued as their layers are marked.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "paddle_kv/transfer/queue_api.h"
#include "queue_rig.h"
#include "recording_engine.h"

namespace {

// Of a group of so many layers: nothing else allocates so many bytes.
constexpr std::int64_t kEvents = 9;
constexpr std::size_t kEventBytes = kEvents * sizeof(std::int64_t);
std::atomic<int> left_for_events{-1};  // allocations of so many events until one fails; -1: none does

void* Allocate(std::size_t bytes) {
  if (bytes == kEventBytes && left_for_events >= 0 && left_for_events-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// Inlined, the compiler would take some for those of another pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return Allocate(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace paddle_kv {
namespace {

using std::chrono::milliseconds;

enum { kHere, kBefore, kNotKnown, kNotEnqueued };

// A save of some blocks, and the compute stream of its marks.
struct Save {
  Plan& plan;
  const std::vector<std::vector<std::uint8_t>> before;
  std::vector<std::int64_t> ids;
  OpenStream stream;
  cudaStream_t compute = MakeFakeStream();
  std::vector<std::unique_ptr<Event>> marks, starts, records;
  std::int64_t token, layers_per_event;
  std::vector<std::int64_t> handles_of_marks, handles_of_starts, handles_of_records, groups;

  Save(Plan& of, std::int64_t own_token, std::int64_t per_event = 1, std::vector<std::int64_t> blocks = {4, 0, 7})
      : plan(of), before(of.host), ids(std::move(blocks)), token(own_token), layers_per_event(per_event) {
    Fill(&marks, &handles_of_marks, plan.layers);
    Fill(&starts, &handles_of_starts, (plan.layers - 1) / per_event + 1);
    Fill(&records, &handles_of_records, (plan.layers - 1) / per_event + 1);
    groups.resize(records.size());
  }
  ~Save() {
    Take(0, true);
    CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
    DestroyFakeStream(compute);
  }
  static void Fill(std::vector<std::unique_ptr<Event>>* events, std::vector<std::int64_t>* handles,
                   std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      events->push_back(std::make_unique<Event>());
      handles->push_back(events->back()->handle());
    }
  }
  PaddleKvTransfer Given() const {
    PaddleKvTransfer given{};
    given.plan = plan.number;
    given.direction = static_cast<std::int64_t>(Direction::kDeviceToHost);
    given.engine = static_cast<std::int64_t>(EngineKind::kAuto);
    given.device_ids = given.host_ids = ids.data();
    given.block_count = static_cast<std::int64_t>(ids.size());
    given.end_layer = plan.layers;
    given.layers_per_event = layers_per_event;
    given.wait_events = handles_of_marks.data();
    given.record_events = handles_of_records.data();
    given.stream = stream.handle();
    given.token = token;
    return given;
  }
  int Submit() const {
    const PaddleKvTransfer given = Given();
    return paddle_kv_queue_submit_by_marks(&given, handles_of_starts.data());
  }
  int Mark(std::int64_t layer) const { return paddle_kv_queue_mark(token, layer, Handle(compute)); }
  std::vector<std::int64_t> Take(std::int64_t first, bool ends = false) {
    const std::int64_t count = paddle_kv_queue_take_enqueued(token, first, ends, groups.data());
    return {groups.begin(), groups.begin() + count};
  }
  void WaitForGroup(std::int64_t group) const {
    WaitUntil([&] { return Query(records[group]->handle()) == 0; });
    WaitFor(records[group]->event);
  }
  // Layers that are saved, and those that are not.
  void CheckSaved(const std::vector<bool>& is_saved) const {
    for (std::int64_t layer = 0; layer < plan.layers; ++layer) {
      auto expected = before[layer];
      for (const std::int64_t id : is_saved[layer] ? ids : std::vector<std::int64_t>()) {
        std::memcpy(&expected[id * plan.block_bytes], &plan.device[layer][id * plan.block_bytes], plan.block_bytes);
      }
      CHECK(plan.host[layer] == expected);
    }
  }
};

using Groups = std::vector<std::int64_t>;

void AGroupIsEnqueuedWhenItsLayersAreMarked() {
  Plan plan(5, 100, true);
  Save save(plan, 3, 2);
  const std::int64_t enqueued = paddle_kv_queue_enqueued();
  CHECK(save.Submit() == 0);
  CHECK(save.Mark(3) == kHere && save.Take(0) == Groups{});
  CHECK(paddle_kv_queue_enqueued() == enqueued);  // nothing waits for it
  CHECK(save.Mark(2) == kHere && save.Take(0) == Groups{1});
  CHECK(paddle_kv_queue_enqueued() == enqueued + 1);
  save.WaitForGroup(1);
  CHECK(Query(save.starts[1]->handle(), save.marks[2]->handle(), save.marks[3]->handle()) == 0);
  save.CheckSaved({false, false, true, true, false});
  CHECK(save.Mark(4) == kHere && save.Take(1) == Groups{2});  // a group of one layer
  CHECK(save.Mark(0) == kHere && save.Mark(1) == kHere);
  CHECK((save.Take(0) == Groups{1, 2, 0}));
  CHECK(save.Take(0) == Groups{});  // of which nothing more is to come it knows nothing
  CHECK(save.Mark(0) == kNotKnown);
  for (std::int64_t group = 0; group < 3; ++group) save.WaitForGroup(group);
  save.CheckSaved({true, true, true, true, true});
}

void TheCopyComesBehindTheMark() {
  Plan plan(2, 100, true);
  Save save(plan, 4);
  CHECK(save.Submit() == 0);
  Gate gate(save.compute);
  CHECK(save.Mark(1) == kHere);  // behind the gate
  CHECK(paddle_kv_queue_flush(save.stream.handle(), -1) == 0);
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(Query(save.records[1]->handle()) == 1);
  save.CheckSaved({false, false});
  plan.device[1][4 * 100] = 77;  // what runs in front of the mark may still write
  gate.Open();
  save.WaitForGroup(1);
  save.CheckSaved({false, true});
}

// The layers of a group are marked on two streams, and the one that is marked first comes last.
void AGroupComesBehindAllOfItsMarks() {
  Plan plan(3, 100, true);
  Save save(plan, 20, 2);
  cudaStream_t other = MakeFakeStream();
  CHECK(save.Submit() == 0);
  Gate gate(other);
  CHECK(paddle_kv_queue_mark(save.token, 1, Handle(other)) == kHere);
  CHECK(save.Mark(0) == kHere && save.Take(0) == Groups{0});
  CHECK(paddle_kv_queue_flush(save.stream.handle(), -1) == 0);
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(Query(save.records[0]->handle()) == 1);
  save.CheckSaved({false, false, false});
  gate.Open();
  save.WaitForGroup(0);
  save.CheckSaved({true, true, false});
  DestroyFakeStream(other);
}

// It begins with a later layer, blocks go elsewhere, and what the caller gave is gone when its layers are marked.
void WhatIsGivenIsCopied() {
  Plan plan(5, 100, true);
  Save save(plan, 21, 2);
  {
    const std::vector<std::int64_t> device_ids{5, 2}, host_ids{1, 8};
    std::vector<std::int64_t> marks(save.handles_of_marks.begin() + 2, save.handles_of_marks.end());
    std::vector<std::int64_t> starts = save.handles_of_starts, records = save.handles_of_records;
    PaddleKvTransfer given = save.Given();
    given.first_layer = 2;
    given.device_ids = device_ids.data();
    given.host_ids = host_ids.data();
    given.block_count = 2;
    given.wait_events = marks.data();
    given.record_events = records.data();
    CHECK(paddle_kv_queue_submit_by_marks(&given, starts.data()) == 0);
    for (auto* list : {&marks, &starts, &records}) std::fill(list->begin(), list->end(), 0);
  }
  CHECK(save.Mark(1) == kNotKnown && save.Mark(4) == kHere && save.Mark(2) == kHere);
  CHECK(save.Take(0) == Groups{1});
  CHECK(save.Mark(3) == kHere && save.Take(1) == Groups{0});
  save.WaitForGroup(0), save.WaitForGroup(1);
  for (const int group : {0, 1}) CHECK(Query(save.starts[group]->handle()) == 0);
  auto expected = save.before;
  for (std::int64_t layer = 2; layer < 5; ++layer) {
    std::memcpy(&expected[layer][1 * 100], &plan.device[layer][5 * 100], 100);
    std::memcpy(&expected[layer][8 * 100], &plan.device[layer][2 * 100], 100);
  }
  CHECK(plan.host == expected);
}

// While it waits for marks, others of its stream go on.
void OthersPassBy() {
  Plan plan(2, 100, true), other(2, 100, true);
  Save save(plan, 5);
  CHECK(save.Submit() == 0 && save.Mark(0) == kHere);
  Transfer transfer(other, save.stream.handle(), {});
  CHECK(transfer.Wait() == 0);
  save.WaitForGroup(0);
  CHECK(Query(save.records[1]->handle()) == 0);  // never recorded, not pending
  CHECK(save.Mark(1) == kHere);
  save.WaitForGroup(1);
}

void EachLayerIsMarkedOnce() {
  Plan plan(3, 100, true);
  Save save(plan, 6, 3);
  CHECK(save.Mark(0) == kNotKnown);  // before it is there
  CHECK(save.Submit() == 0);
  CHECK(save.Mark(0) == kHere && save.Mark(0) == kBefore);
  for (const std::int64_t layer : {-1, 3, 99}) CHECK(save.Mark(layer) == kNotKnown);
  CHECK(paddle_kv_queue_mark(7, 1, Handle(save.compute)) == kNotKnown);
  CHECK(save.Take(0) == Groups{});
}

void BehindItsEndNothingIsEnqueued() {
  Plan plan(4, 100, true);
  Save save(plan, 8, 2);
  CHECK(save.Submit() == 0);
  CHECK(save.Mark(0) == kHere && save.Mark(2) == kHere && save.Mark(3) == kHere);
  CHECK(save.Take(0, true) == Groups{1});
  CHECK(save.Mark(1) == kNotKnown && save.Take(0) == Groups{});
  save.WaitForGroup(1);
  save.CheckSaved({false, false, true, true});
  CHECK(save.Submit() == 0);  // the token may be used again
  for (std::int64_t layer = 0; layer < 4; ++layer) CHECK(save.Mark(layer) == kHere);
  save.WaitForGroup(0), save.WaitForGroup(1);
}

void AStreamThatIsClosedTakesItAlong() {
  Plan plan(2, 100, true), other(2, 100, true);
  Save save(plan, 9);
  CHECK(save.Submit() == 0);
  Save beside(other, 19);  // on a stream of its own
  CHECK(beside.Submit() == 0);
  CHECK(paddle_kv_queue_close(save.stream.handle()) == 0);
  CHECK(save.Mark(0) == kNotKnown && beside.Mark(1) == kHere);
  CHECK(save.Submit() == -1);
  CHECK(paddle_kv_queue_open(0, save.stream.handle(), 0) == 0);
  CHECK(save.Submit() == 0 && save.Mark(0) == kHere && save.Mark(1) == kHere);
  save.WaitForGroup(1);
}

// An event that is not recorded is no mark: the layer can be marked again.
void AMarkThatFailsIsNone() {
  Plan plan(1, 100, true);
  Save save(plan, 10);
  CHECK(save.Submit() == 0);
  std::thread([&] {
    FailCall(0, cudaErrorInvalidValue);
    CHECK(save.Mark(0) == -1);
    FailCall(-1, cudaSuccess);
  }).join();
  CHECK(save.Take(0) == Groups{});
  CHECK(save.Mark(0) == kHere);
  save.WaitForGroup(0);
  save.CheckSaved({true});
}

void WithoutMemoryItsMarksEnd() {
  constexpr std::int64_t kLayers = 3 * kEvents;
  Plan plan(kLayers, 8, true);
  Save save(plan, 11, kEvents, {4, 0});
  const auto mark_group = [&](std::int64_t group) {
    for (std::int64_t layer = group * kEvents; layer < (group + 1) * kEvents - 1; ++layer) {
      CHECK(save.Mark(layer) == kHere);
    }
    return save.Mark((group + 1) * kEvents - 1);
  };
  CHECK(save.Submit() == 0 && mark_group(2) == kHere);
  save.WaitForGroup(2);  // the queue's thread allocates nothing more
  left_for_events = 0;
  CHECK(mark_group(0) == kNotEnqueued);
  CHECK(save.Mark(kEvents) == kNotKnown);  // as the queue refuses the rest
  CHECK(save.Take(0, true) == Groups{2});
  std::vector<bool> saved(kLayers);
  std::fill(saved.begin() + 2 * kEvents, saved.end(), true);
  save.CheckSaved(saved);
}

// A model that stands still must not cost a core.
void NobodyLooksForMarksForLong() {
  Plan plan(3, 100, true);
  Save save(plan, 14);
  CHECK(save.Submit() == 0 && save.Mark(0) == kHere);
  save.WaitForGroup(0);
  CHECK(RestsFor(milliseconds(200)));
  CHECK(save.Mark(1) == kHere);  // wakes it
  save.WaitForGroup(1);
  CHECK(save.Mark(2) == kHere);
  save.WaitForGroup(2);
  CHECK(save.Take(0).size() == 3);
  save.CheckSaved({true, true, true});
}

void WhatCannotBeRightIsRefused() {
  Plan plan(3, 100, true);
  Save save(plan, 12);
  const auto check = [&](const std::string& expected, auto change) {
    PaddleKvTransfer wrong = save.Given();
    const std::int64_t* starts = save.handles_of_starts.data();
    change(wrong, starts);
    CHECK(paddle_kv_queue_submit_by_marks(&wrong, starts) == -1);
    int code = 1;
    const char* name = nullptr;
    const std::string text = paddle_kv_queue_error(&code, &name);
    if (text.find(expected) == std::string::npos) {
      std::fprintf(stderr, "%s, not %s\n", text.c_str(), expected.c_str());
      CHECK(false);
    }
    CHECK(save.Mark(0) == kNotKnown);
  };
  const std::int64_t one_missing[] = {save.handles_of_marks[0], 0, save.handles_of_marks[2]};
  const std::int64_t last_missing[] = {save.handles_of_marks[0], save.handles_of_marks[1], 0};
  check("plan = 99999 is not registered", [](auto& t, auto&) { t.plan = 99999; });
  check("direction = 5 is not in [0, 1]", [](auto& t, auto&) { t.direction = 5; });
  check("end_layer = 4 is not in [1, 3]", [](auto& t, auto&) { t.end_layer = 4; });
  check("end_layer = 0 is not in [1, 3]", [](auto& t, auto&) { t.end_layer = 0; });
  check("first_layer = -1 is not in [0, 3]", [](auto& t, auto&) { t.first_layer = -1; });
  check("layers_per_event = 0 is", [](auto& t, auto&) { t.layers_per_event = 0; });
  check("device_ids is null", [](auto& t, auto&) { t.device_ids = nullptr; });
  check("wait_events is null", [](auto& t, auto&) { t.wait_events = nullptr; });
  check("wait_events[1] is no event", [&](auto& t, auto&) { t.wait_events = one_missing; });
  check("wait_events[2] is no event", [&](auto& t, auto&) {
    t.wait_events = last_missing;
    t.layers_per_event = 2;
  });
  check("record_events[1] is no event", [&](auto& t, auto&) { t.record_events = one_missing; });
  check("start_events[1] is no event", [&](auto&, auto& starts) { starts = one_missing; });
  check("start_events is null", [&](auto&, auto& starts) { starts = nullptr; });
  check("is not open", [](auto& t, auto&) { t.stream = 77; });
  CHECK(paddle_kv_queue_submit_by_marks(nullptr, save.handles_of_starts.data()) == -1);
  CHECK(save.Submit() == 0);
}

// Marks of several threads, beside one that ends the whole: each group is enqueued once or not at all, and whoever ends
// it knows which.
void ThreadsMarkWhileAnotherEndsIt() {
  constexpr std::int64_t kLayers = 12;
  for (int round = 0; round < 60; ++round) {
    Plan plan(kLayers, 16, true);
    Save save(plan, 100 + round, round % 3 + 1);
    CHECK(save.Submit() == 0);
    std::vector<std::thread> threads;
    std::atomic<int> marked{0};
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (std::int64_t layer = 0; layer < kLayers; ++layer) {
          const int result = save.Mark((layer * 5 + t * 4) % kLayers);
          CHECK(result == kHere || result == kBefore || result == kNotKnown);
          marked += result == kHere;
        }
      });
    }
    Groups taken;
    const std::int64_t ends_after = round % 2 == 0 ? round % kLayers : 2 * kLayers;
    threads.emplace_back([&] {
      for (int i = 0; i < 2000 && marked < ends_after; ++i) std::this_thread::yield();
      taken = save.Take(0, true);
    });
    for (std::thread& thread : threads) thread.join();
    CHECK(save.Take(0) == Groups{});
    std::vector<bool> is_saved(kLayers);
    for (const std::int64_t group : taken) {
      save.WaitForGroup(group);
      for (std::int64_t layer = group * save.layers_per_event;
           layer < std::min(kLayers, (group + 1) * save.layers_per_event); ++layer) {
        CHECK(!is_saved[layer]);
        is_saved[layer] = true;
      }
    }
    CHECK(paddle_kv_queue_flush(save.stream.handle(), -1) == 0);
    std::this_thread::sleep_for(milliseconds(1));
    save.CheckSaved(is_saved);
  }
}

const Test kTests[] = {
    {"a_group_is_enqueued_when_its_layers_are_marked", AGroupIsEnqueuedWhenItsLayersAreMarked},
    {"the_copy_comes_behind_the_mark", TheCopyComesBehindTheMark},
    {"a_group_comes_behind_all_of_its_marks", AGroupComesBehindAllOfItsMarks},
    {"what_is_given_is_copied", WhatIsGivenIsCopied},
    {"others_pass_by", OthersPassBy},
    {"each_layer_is_marked_once", EachLayerIsMarkedOnce},
    {"behind_its_end_nothing_is_enqueued", BehindItsEndNothingIsEnqueued},
    {"a_stream_that_is_closed_takes_it_along", AStreamThatIsClosedTakesItAlong},
    {"a_mark_that_fails_is_none", AMarkThatFailsIsNone},
    {"without_memory_its_marks_end", WithoutMemoryItsMarksEnd},
    {"nobody_looks_for_marks_for_long", NobodyLooksForMarksForLong},
    {"what_cannot_be_right_is_refused", WhatCannotBeRightIsRefused},
    {"threads_mark_while_another_ends_it", ThreadsMarkWhileAnotherEndsIt},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
