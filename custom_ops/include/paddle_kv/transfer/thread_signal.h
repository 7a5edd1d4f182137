// What a thread sleeps on that waits for another one, and that signals wake as well.
#pragma once

#include <cstdint>

namespace paddle_kv {

enum class Heard { kTold, kNotInTime, kInterrupted, kElsewhere };

class ThreadSignal {
 public:
  ThreadSignal() = default;
  ThreadSignal(const ThreadSignal&) = delete;
  ~ThreadSignal();

  // An eventfd, the same one each time; -1: there is none to be had.
  int Open();
  // Until it is readable (kTold), or for so long; a negative time has no end. A signal's handler of this thread ends it
  // too. kElsewhere: it cannot be waited for.
  Heard Wait(std::int64_t timeout_us) const;
  void Clear() const;

 private:
  int descriptor_ = -1;
};

}  // namespace paddle_kv
