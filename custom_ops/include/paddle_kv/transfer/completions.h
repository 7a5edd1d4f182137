// Who is told when events have passed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "paddle_kv/transfer/event_states.h"

namespace paddle_kv {

// The token is reported when all of the events are recorded and passed, or their device is lost.
struct Watch {
  int device;
  std::int64_t token;
  std::vector<std::int64_t> events;
  std::size_t next = 0;                          // the first that is not known to have passed
  std::size_t end_recorded = 0;                  // of those from there on that CUDA can be asked for
  std::chrono::steady_clock::time_point told{};  // to a hearer
};

// A thread that waits for one token.
struct Hearer {
  int descriptor;        // its own eventfd, which becomes readable when it is told
  bool is_told = false;  // then nobody else is, unless it does not confirm
};

// Used under the queue's lock. Watches move from list to list, which takes no memory in the queue's thread.
class Completions {
 public:
  explicit Completions(const EventStates& events) : events_(events) {}

  // Of one token, which nobody else uses.
  using Hearers = std::map<std::int64_t, Hearer*>;
  void Add(std::list<Watch> watch, Hearers nobody);
  // Its end is told to this one, or, with null, in the common list. False: somebody else hears of it, it was told
  // before, or nobody watches for it.
  bool Divert(std::int64_t token, Hearer* hearer);
  // Who was told has done what there is to do.
  void Confirm(std::int64_t token);
  // Or cannot, and the common list gets it too. False: it has got it, or nobody was told.
  bool PassOn(std::int64_t token);
  // Those that were told before and not confirmed, as a handler of a signal may have come between. Whether there are.
  bool PassOnBefore(std::chrono::steady_clock::time_point told);
  bool HasTold() const { return !told_.empty(); }
  // An event is not pending any more.
  void OnRecorded(std::int64_t event);
  // CUDA has to be asked from time to time.
  bool HasPolled() const { return !polled_.empty(); }
  // Those to ask CUDA for, which may be done without the lock.
  std::list<Watch> TakePolled();
  // They are reported, or stay watches. Whether the common list has got some: then Signal() is due.
  bool GiveBack(std::list<Watch> asked);

  // The descriptor, -1 and errno if there is none to be had.
  int Open();
  // At most so many tokens, the oldest first; how many.
  std::int64_t Take(std::int64_t* tokens, std::int64_t capacity);
  bool HasReported() const { return !reported_.empty(); }

  // Without the lock: system calls.
  void Signal() const;
  void ClearSignal() const;

 private:
  // Where a watch belongs that nobody asks CUDA for at the moment; true: the common list has got it.
  bool Place(std::list<Watch>& from);

  const EventStates& events_;
  std::list<Watch> polled_;
  std::map<std::int64_t, std::list<Watch>> held_;  // by the event, still pending, that comes next
  std::list<Watch>::iterator FindTold(std::int64_t token);

  std::list<Watch> told_;  // to hearers
  std::list<Watch> reported_;
  Hearers hearers_;  // of all tokens that are watched; null: nobody waits for it himself
  std::atomic<int> descriptor_{-1};
};

}  // namespace paddle_kv
