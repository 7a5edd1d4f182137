#include "paddle_kv/transfer/completions.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

namespace paddle_kv {

void Completions::Add(std::list<Watch> watch, Hearers nobody) {
  hearers_.merge(nobody);
  polled_.splice(polled_.end(), watch);
}

bool Completions::Divert(std::int64_t token, Hearer* hearer) {
  const auto found = hearers_.find(token);
  if (found == hearers_.end() || (hearer != nullptr && found->second != nullptr)) return false;
  found->second = hearer;
  return true;
}

std::list<Watch>::iterator Completions::FindTold(std::int64_t token) {
  return std::find_if(told_.begin(), told_.end(), [token](const Watch& watch) { return watch.token == token; });
}

void Completions::Confirm(std::int64_t token) {
  const auto found = FindTold(token);
  if (found != told_.end()) told_.erase(found);
}

bool Completions::PassOn(std::int64_t token) {
  const auto found = FindTold(token);
  if (found == told_.end()) return false;
  reported_.splice(reported_.end(), told_, found);
  return true;
}

bool Completions::PassOnBefore(std::chrono::steady_clock::time_point told) {
  bool any = false;
  while (!told_.empty() && told_.front().told < told) {
    reported_.splice(reported_.end(), told_, told_.begin());
    any = true;
  }
  return any;
}

void Completions::OnRecorded(std::int64_t event) {
  const auto found = held_.find(event);
  if (found == held_.end()) return;
  polled_.splice(polled_.end(), found->second);
  held_.erase(found);
}

std::list<Watch> Completions::TakePolled() {
  for (Watch& watch : polled_) {
    watch.end_recorded = watch.next;
    while (watch.end_recorded < watch.events.size() && !events_.IsPending(watch.events[watch.end_recorded])) {
      ++watch.end_recorded;
    }
  }
  return std::exchange(polled_, {});
}

bool Completions::GiveBack(std::list<Watch> asked) {
  bool has_reported = false;
  while (!asked.empty()) has_reported |= Place(asked);
  return has_reported;
}

bool Completions::Place(std::list<Watch>& from) {
  const Watch& watch = from.front();
  if (watch.next == watch.events.size()) {
    const auto found = hearers_.extract(watch.token);
    Hearer* const hearer = found ? found.mapped() : nullptr;
    if (hearer == nullptr) {
      reported_.splice(reported_.end(), from, from.begin());
      return true;
    }
    from.front().told = std::chrono::steady_clock::now();
    told_.splice(told_.end(), from, from.begin());
    hearer->is_told = true;
    eventfd_write(hearer->descriptor, 1);  // under the lock: without it the thread may have ended
    return false;
  }
  std::list<Watch>* place = &polled_;
  if (events_.IsPending(watch.events[watch.next])) {
    try {
      place = &held_[watch.events[watch.next]];
    } catch (const std::bad_alloc&) {
      // Asked for again and again, and reported all the same.
    }
  }
  place->splice(place->end(), from, from.begin());
  return false;
}

int Completions::Open() {
  if (descriptor_ < 0) descriptor_ = eventfd(reported_.empty() ? 0 : 1, EFD_CLOEXEC | EFD_NONBLOCK);
  return descriptor_;
}

std::int64_t Completions::Take(std::int64_t* tokens, std::int64_t capacity) {
  std::int64_t count = 0;
  for (; count < capacity && !reported_.empty(); ++count) {
    tokens[count] = reported_.front().token;
    reported_.pop_front();
  }
  return count;
}

void Completions::Signal() const {
  if (descriptor_ >= 0) eventfd_write(descriptor_, 1);  // that fails only while it is readable anyway
}

void Completions::ClearSignal() const {
  eventfd_t ignored = 0;
  if (descriptor_ >= 0) eventfd_read(descriptor_, &ignored);
}

}  // namespace paddle_kv
