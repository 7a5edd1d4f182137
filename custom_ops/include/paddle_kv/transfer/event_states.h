// What the queue knows of events that CUDA does not: which are still to be recorded, and which stand for a failure.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "paddle_kv/common/status.h"

namespace paddle_kv {

// Used under the queue's lock.
class EventStates {
 public:
  // The entries for events that will be pending. To make them takes memory, to add them none.
  using Entries = std::multimap<std::int64_t, Status>;
  static Entries EntriesOf(const std::vector<std::int64_t>& events);

  // They are pending; a failure of a transfer that had one of them before is forgotten.
  void Add(Entries entries);
  bool IsPending(std::int64_t event) const { return pending_.count(event) != 0; }
  // The event was recorded, behind a copy or a failure.
  void Record(std::int64_t event, const Status& status);
  // Null: none that is known of.
  const Status* Failure(std::int64_t event) const;
  // Whether there was a failure.
  bool Forget(std::int64_t event) { return failed_.erase(event) != 0; }

 private:
  // An entry moves from one to the other: to note a failure takes no memory.
  Entries pending_;
  std::map<std::int64_t, Status> failed_;
};

}  // namespace paddle_kv
