// What a thread sleeps on that waits for another one, and that signals wake as well.
#pragma once

#include <cstdint>

namespace paddle_kv {

enum class Heard { kTold, kNotInTime, kInterrupted, kElsewhere };

class ThreadSignal {
 public:
  ThreadSignal();
  ThreadSignal(const ThreadSignal&) = delete;
  ~ThreadSignal();

  // An eventfd; -1: there was none to be had.
  int descriptor() const { return descriptor_; }
  // Until it is readable, or for so long; a negative time has no end. A signal's handler of this thread ends it too.
  Heard Wait(std::int64_t timeout_us) const;
  void Clear() const;

 private:
  int descriptor_;
};

}  // namespace paddle_kv
