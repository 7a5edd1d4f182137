// A mutex that nobody holds while the process is copied. A forked child has no thread but the one that forked: what
// another one had locked would stay locked there for ever.
#pragma once

#include <pthread.h>

#include <mutex>
#include <vector>

namespace paddle_kv {

// Made while the library is loaded, and never destroyed. Whoever holds one waits for nothing.
class ForkMutex {
 public:
  ForkMutex() {
    if (All().empty()) pthread_atfork(LockAll, UnlockAll, UnlockAll);
    All().push_back(this);
  }
  ForkMutex(const ForkMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static std::vector<ForkMutex*>& All() {
    static std::vector<ForkMutex*>& all = *new std::vector<ForkMutex*>;
    return all;
  }
  static void LockAll() {
    for (ForkMutex* const one : All()) one->lock();
  }
  static void UnlockAll() {
    for (ForkMutex* const one : All()) one->unlock();
  }

  std::mutex mutex_;
};

}  // namespace paddle_kv
