// What the queue's thread does for gates: it lets layers through behind events, and records events behind marks.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/transfer/event_states.h"

namespace paddle_kv {

// Layer `first_layer` + l comes to the turn behind its events.
struct LetThrough {
  std::uint32_t turn = 0;
  std::int64_t first_layer = 0;
  std::vector<std::int64_t> first_wait;  // of each layer, and the end
  std::vector<std::int64_t> wait_events;
  std::int64_t number = 0;     // in the order of the queue's calls
  std::int64_t submitted = 0;  // layers of which the stream writes the word
  std::int64_t seen = 0;       // layers of which the host has seen the events pass

  std::int64_t layer_count() const { return static_cast<std::int64_t>(first_wait.size()) - 1; }
};

// The next `events_per_layer` events are recorded when a layer has been marked in the turn; layers in ascending order.
struct MarkWait {
  std::uint32_t turn = 0;
  std::vector<std::int64_t> events;
  std::int64_t events_per_layer = 0;
  std::int64_t next_layer = 0;
};

// Words that a device and the host share, as gates.cu has them.
class GateWords {
 public:
  virtual ~GateWords() = default;
  virtual DeviceStream let_through_stream() const = 0;
  virtual DeviceStream marks_stream() const = 0;
  // In the order of the stream, and at once for a gate that looks at host memory.
  virtual Status WriteThrough(std::int64_t layer, std::uint32_t turn) = 0;
  virtual void StoreThrough(std::int64_t layer, std::uint32_t turn) = 0;
  virtual bool IsMarked(std::int64_t layer, std::uint32_t turn) const = 0;
};

// Of one set of gates. Used under the queue's lock, which is given up where CUDA is called.
//
// A gate looks at a word in device memory, which a stream writes: no host stands in between. But streams may share a
// hardware queue, and what a replay has behind a closed gate then keeps that write from running. So the host, too,
// tells the gate what it has seen, by a word in host memory, which a closed gate looks at now and then.
class GateWork {
 public:
  using Lock = std::unique_lock<std::mutex>;
  // Makes the device current; without the lock.
  using MakeCurrent = std::function<Status(int device)>;

  explicit GateWork(GateWords* words) : words_(words) {}

  void Add(LetThrough work) { let_through_.push_back(std::move(work)); }
  void Add(MarkWait work) { marks_.push_back(std::move(work)); }
  bool HasWork() const { return !let_through_.empty() || !marks_.empty(); }
  bool is_at_work() const { return at_work_; }
  // The oldest that may still have to wait for an event; `none`: there is none.
  std::int64_t OldestNumber(std::int64_t none) const {
    return let_through_.empty() ? none : let_through_.front().number;
  }

  // As far as it goes now. `asks`: CUDA may be asked which events were passed. Whether anything was done.
  bool Advance(Lock& lock, const EventStates& events, bool asks, const MakeCurrent& make_current,
               const std::function<void(std::int64_t event, const Status& status)>& recorded);

 private:
  bool Submit(Lock& lock, const EventStates& events, LetThrough& work, const MakeCurrent& make_current);
  bool See(Lock& lock, LetThrough& work, const MakeCurrent& make_current);
  bool Record(Lock& lock, MarkWait& work, const MakeCurrent& make_current,
              const std::function<void(std::int64_t, const Status&)>& recorded);

  GateWords* const words_;
  std::deque<LetThrough> let_through_;
  std::deque<MarkWait> marks_;
  bool at_work_ = false;
};

}  // namespace paddle_kv
