#include "paddle_kv/transfer/event_states.h"

#include <utility>

namespace paddle_kv {

EventStates::Entries EventStates::EntriesOf(const std::vector<std::int64_t>& events) {
  Entries entries;
  for (const std::int64_t event : events) entries.emplace(event, Status{});
  return entries;
}

void EventStates::Add(Entries entries) {
  for (const auto& entry : entries) failed_.erase(entry.first);
  pending_.merge(entries);
}

void EventStates::Record(std::int64_t event, const Status& status) {
  auto entry = pending_.extract(pending_.find(event));
  if (status.ok()) return;
  entry.mapped() = status;
  failed_.insert(std::move(entry));
}

const Status* EventStates::Failure(std::int64_t event) const {
  const auto found = failed_.find(event);
  return found == failed_.end() ? nullptr : &found->second;
}

}  // namespace paddle_kv
