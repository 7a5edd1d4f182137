// A thread that does a part of another one's work, while that does the rest.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace paddle_kv {

// Used by one thread at a time. It is started when it is first needed.
class HelperThread {
 public:
  HelperThread() = default;
  ~HelperThread() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;

  // False: no thread is to be had, and nothing happens. Else `work`, which throws nothing, lives until Wait() returns.
  bool Start(const std::function<void()>& work) {
    try {
      if (!thread_.joinable()) thread_ = std::thread(&HelperThread::Run, this);
    } catch (const std::exception&) {
      return false;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
    }
    changed_.notify_all();
    return true;
  }

  // Until what was started is done.
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return work_ == nullptr; });
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return work_ != nullptr || ends_; });
      if (work_ == nullptr) return;
      const std::function<void()>& work = *work_;
      lock.unlock();
      work();
      lock.lock();
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace paddle_kv
