// Splits an index range over the cores of the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace paddle_kv {

// Starting a thread costs about 50 us, in which one core copies roughly this much.
constexpr std::int64_t kMinimumBytesPerThread = std::int64_t{1} << 20;

// Calls body(begin, end) on disjoint ranges that cover [0, count); returns when all are done. `total_bytes` is what
// the whole loop moves. Plain threads and not OpenMP: an OpenMP team hangs in a forked child.
template <class Body>
void ParallelFor(std::int64_t count, std::int64_t total_bytes, const Body& body) {
  if (count <= 0) return;
  const std::int64_t cores = std::max<std::int64_t>(1, std::thread::hardware_concurrency());
  const std::int64_t useful = std::max<std::int64_t>(1, total_bytes / kMinimumBytesPerThread);
  const std::int64_t threads = std::min({cores, useful, count});
  std::vector<std::thread> helpers;
  helpers.reserve(threads - 1);
  std::int64_t started = 1;  // range 0 belongs to the caller
  try {
    for (; started < threads; ++started) {
      const std::int64_t t = started;
      helpers.emplace_back([&body, count, threads, t] { body(count * t / threads, count * (t + 1) / threads); });
    }
  } catch (const std::system_error&) {
    // No more threads to be had: the caller does the rest.
  }
  body(0, count / threads);
  if (started < threads) body(count * started / threads, count);
  for (auto& helper : helpers) helper.join();
}

}  // namespace paddle_kv
