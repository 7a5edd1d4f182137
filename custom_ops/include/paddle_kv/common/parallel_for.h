// Splits an index range over the cores of the host.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "paddle_kv/common/bulk_copy.h"

namespace paddle_kv {

// Starting a thread costs about 50 us, in which one core copies roughly this much.
constexpr std::int64_t kMinimumBytesPerThread = std::int64_t{1} << 20;

// Cores that this thread, and so those that it starts, may run on: a process bound to some of the cores, as servers are
// to a NUMA node, must not start threads for all. hardware_concurrency() knows nothing of that, and reads a file.
inline std::int64_t UsableCores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  return std::thread::hardware_concurrency();  // a machine of more cores than the set can hold
}

// Calls body(begin, end) on disjoint ranges that cover [0, count); returns when all are done. `total_bytes` is what
// the whole loop moves. What a body throws is thrown here, once all have ended. Plain threads and not OpenMP: an OpenMP
// team hangs in a forked child.
template <class Body>
void ParallelFor(std::int64_t count, std::int64_t total_bytes, const Body& body) {
  if (count <= 0) return;
  const std::int64_t useful = std::min(total_bytes / kMinimumBytesPerThread, count);
  const std::int64_t threads = useful <= 1 ? 1 : std::min(useful, UsableCores());
  if (threads <= 1) {
    body(0, count);
    BulkCopy::Publish();
    return;
  }
  std::vector<std::exception_ptr> failures(threads);
  const auto run = [&](std::int64_t t, std::int64_t end) {
    try {
      body(count * t / threads, count * end / threads);
      BulkCopy::Publish();
    } catch (...) {
      failures[t] = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(threads - 1);
  std::int64_t started = 1;  // range 0 belongs to the caller
  try {
    for (; started < threads; ++started) helpers.emplace_back(run, started, started + 1);
  } catch (const std::exception&) {
    // No more threads to be had: the caller does the rest.
  }
  run(0, 1);
  if (started < threads) run(started, threads);
  for (auto& helper : helpers) helper.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
}

}  // namespace paddle_kv
