#include "paddle_kv/transfer/gate_work.h"

#include <algorithm>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/transfer/engine_events.cuh"

namespace paddle_kv {

// References into the deques stay valid where others append, and the thread alone removes.
bool GateWork::Advance(Lock& lock, const EventStates& events, bool asks, const MakeCurrent& make_current,
                       const std::function<void(std::int64_t, const Status&)>& recorded) {
  at_work_ = true;
  bool any = false;
  while (!let_through_.empty()) {
    LetThrough& work = let_through_.front();
    any |= Submit(lock, events, work, make_current);
    if (asks) any |= See(lock, work, make_current);
    if (work.seen < work.layer_count()) break;
    let_through_.pop_front();
  }
  while (!marks_.empty()) {
    MarkWait& work = marks_.front();
    any |= Record(lock, work, make_current, recorded);
    if (work.next_layer * work.events_per_layer < static_cast<std::int64_t>(work.events.size())) break;
    marks_.pop_front();
  }
  at_work_ = false;
  return any;
}

bool GateWork::Submit(Lock& lock, const EventStates& events, LetThrough& work, const MakeCurrent& make_current) {
  const std::int64_t before = work.submitted;
  for (; work.submitted < work.layer_count(); ++work.submitted) {
    const auto first = work.wait_events.begin() + work.first_wait[work.submitted];
    const auto end = work.wait_events.begin() + work.first_wait[work.submitted + 1];
    if (std::any_of(first, end, [&](std::int64_t event) { return events.IsPending(event); })) break;
    lock.unlock();
    const DeviceStream where = words_->let_through_stream();
    Status status = make_current(where.device);
    for (auto event = first; event != end && status.ok(); ++event) {
      status = ToStatus(cudaStreamWaitEvent(StreamOf(where), EventOf(*event), 0), "cudaStreamWaitEvent");
    }
    // Behind an error the stream writes nothing: the host does, when it has seen the events.
    if (status.ok()) words_->WriteThrough(work.first_layer + work.submitted, work.turn);
    lock.lock();
  }
  return work.submitted != before;
}

bool GateWork::See(Lock& lock, LetThrough& work, const MakeCurrent& make_current) {
  const std::int64_t before = work.seen;
  lock.unlock();
  const bool is_lost = !make_current(words_->let_through_stream().device).ok();
  const auto has_passed = [&](std::int64_t event) { return !IsNotReady(cudaEventQuery(EventOf(event))); };
  for (; work.seen < work.submitted; ++work.seen) {
    const auto first = work.wait_events.begin() + work.first_wait[work.seen];
    const auto end = work.wait_events.begin() + work.first_wait[work.seen + 1];
    if (!is_lost && !std::all_of(first, end, has_passed)) break;
    words_->StoreThrough(work.first_layer + work.seen, work.turn);
  }
  lock.lock();
  return work.seen != before;
}

bool GateWork::Record(Lock& lock, MarkWait& work, const MakeCurrent& make_current,
                      const std::function<void(std::int64_t, const Status&)>& recorded) {
  const std::int64_t before = work.next_layer;
  const auto layers = static_cast<std::int64_t>(work.events.size()) / work.events_per_layer;
  for (; work.next_layer < layers && words_->IsMarked(work.next_layer, work.turn); ++work.next_layer) {
    const auto first = work.events.begin() + work.next_layer * work.events_per_layer;
    const DeviceStream where = words_->marks_stream();
    lock.unlock();
    // What the replay did before the mark is over. The event is for those who wait for events.
    Status status = make_current(where.device);
    for (auto event = first; event != first + work.events_per_layer && status.ok(); ++event) {
      status = ToStatus(cudaEventRecord(EventOf(*event), StreamOf(where)), "cudaEventRecord");
    }
    lock.lock();
    for (auto event = first; event != first + work.events_per_layer; ++event) recorded(*event, status);
  }
  return work.next_layer != before;
}

}  // namespace paddle_kv
