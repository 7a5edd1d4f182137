#include "paddle_kv/transfer/thread_signal.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

namespace paddle_kv {

ThreadSignal::~ThreadSignal() {
  if (descriptor_ >= 0) close(descriptor_);
}

int ThreadSignal::Open() {
  if (descriptor_ < 0) descriptor_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return descriptor_;
}

Heard ThreadSignal::Wait(std::int64_t timeout_us) const {
  pollfd asked = {descriptor_, POLLIN, 0};
  const timespec time = {timeout_us / 1'000'000, timeout_us % 1'000'000 * 1000};
  const int ready = ppoll(&asked, 1, timeout_us < 0 ? nullptr : &time, nullptr);
  if (ready > 0) return Heard::kTold;
  if (ready == 0) return Heard::kNotInTime;
  return errno == EINTR ? Heard::kInterrupted : Heard::kElsewhere;
}

void ThreadSignal::Clear() const {
  eventfd_t ignored = 0;
  eventfd_read(descriptor_, &ignored);
}

}  // namespace paddle_kv
