// The host code that starts threads or is called from several: ParallelFor, copies of blocks and layers on the CPU, the
// table of transfer plans. To be run under ThreadSanitizer; it checks the results too.
#include <sched.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "paddle_kv/common/parallel_for.h"
#include "paddle_kv/swap/transfer_blocks.h"
#include "paddle_kv/swap/transfer_layers.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {
namespace {

void EachIndexOnce() {
  for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 1000}) {
    for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1} << 20, std::int64_t{1} << 30}) {
      std::vector<int> visits(count, 0);
      ParallelFor(count, bytes, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++visits[i];
      });
      for (const int visit : visits) CHECK(visit == 1);
    }
  }
}

void LoopsInSeveralThreads() {
  std::vector<std::thread> callers;
  std::atomic<std::int64_t> sum{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        ParallelFor(100, std::int64_t{1} << 30, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(sum == 4 * 20 * 100);
}

// Whichever thread it is in. In a thread of its own an exception would end the process.
void WhatABodyThrowsIsThrownByTheLoop() {
  for (std::int64_t bad = 0; bad < 8; ++bad) {
    std::atomic<std::int64_t> visited{0};
    bool thrown = false;
    try {
      ParallelFor(8, std::int64_t{1} << 30, [&](std::int64_t begin, std::int64_t end) {
        visited += end - begin;
        if (begin <= bad && bad < end) throw std::runtime_error("no memory");
      });
    } catch (const std::runtime_error& error) {
      thrown = std::string(error.what()) == "no memory";
    }
    CHECK(thrown && visited == 8);
  }
}

void NoMoreThreadsThanTheProcessHasCores() {
  cpu_set_t before, one;
  CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
  CPU_ZERO(&one);
  for (int core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  const auto threads = [] {
    std::mutex mutex;
    std::set<std::thread::id> seen;
    ParallelFor(100, std::int64_t{1} << 30, [&](std::int64_t, std::int64_t) {
      const std::lock_guard<std::mutex> lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
    return static_cast<int>(seen.size());
  };
  CHECK(threads() == std::min(100, CPU_COUNT(&before)));
  CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
  CHECK(threads() == 1);
  CHECK(sched_setaffinity(0, sizeof(before), &before) == 0);
}

// Ranges that begin and end in the middle of blocks, blocks of no bytes, one block to several places.
void BlocksOfManySizes() {
  const std::vector<std::int64_t> sizes{3 << 20, 1, 0, (5 << 20) + 7, 4096, 0};
  constexpr std::int64_t kBlocks = 3;
  constexpr std::int64_t kGap = 5;  // between the blocks of a target: must stay as it is
  const std::vector<std::int64_t> source_ids{2, 0, 2}, target_ids{0, 2, 1};
  std::vector<std::vector<std::uint8_t>> sources, targets, expected;
  std::vector<BlockRows> rows;
  for (const std::int64_t size : sizes) {
    sources.emplace_back(kBlocks * size);
    for (std::size_t i = 0; i < sources.back().size(); ++i) sources.back()[i] = static_cast<std::uint8_t>(i % 251 + 1);
    targets.emplace_back(kBlocks * (size + kGap), 0);
    expected.push_back(targets.back());
    for (std::size_t i = 0; i < source_ids.size() && size > 0; ++i) {
      std::memcpy(&expected.back()[target_ids[i] * (size + kGap)], &sources.back()[source_ids[i] * size], size);
    }
  }
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    rows.push_back({sources[t].data(), targets[t].data(), sizes[t], sizes[t] + kGap, sizes[t]});
  }
  TransferBlocksCpu(rows.data(), static_cast<std::int64_t>(rows.size()), source_ids.data(), target_ids.data(), 3);
  CHECK(targets == expected);
}

// Two tensors a layer, blocks of another size each, enough bytes for several threads.
struct Pools {
  static constexpr std::int64_t kLayers = 3;
  static constexpr std::int64_t kBlocks = 64;
  static constexpr std::int64_t kBytes[2] = {60000, 33333};
  std::vector<std::vector<std::uint8_t>> device, host;
  TransferPlan plan;

  explicit Pools(int seed) {
    plan.layer_count = kLayers;
    plan.tensors_per_layer = 2;
    plan.device_blocks = plan.host_blocks = kBlocks;
    for (std::int64_t t = 0; t < kLayers * 2; ++t) {
      const std::int64_t bytes = kBytes[t % 2];
      device.emplace_back(kBlocks * bytes);
      host.emplace_back(kBlocks * bytes, 0);
      for (std::int64_t block = 0; block < kBlocks; ++block) {
        std::memset(&device.back()[block * bytes], static_cast<int>((seed + t * 37 + block) % 255 + 1), bytes);
      }
    }
    for (std::int64_t t = 0; t < kLayers * 2; ++t) {
      const std::int64_t bytes = kBytes[t % 2];
      plan.tensors.push_back({device[t].data(), host[t].data(), bytes, bytes, bytes});
    }
  }
};

constexpr std::int64_t Pools::kBytes[2];

void CopiesOfLayersInSeveralThreads() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([caller] {
      Pools pools(caller);
      std::vector<std::int64_t> from, to;
      for (std::int64_t i = 0; i < Pools::kBlocks; i += 2) {
        from.push_back(i);
        to.push_back(Pools::kBlocks - 1 - i);
      }
      const auto count = static_cast<std::int64_t>(from.size());
      TransferLayersCpu(pools.plan, Direction::kDeviceToHost, from.data(), to.data(), count, 0, Pools::kLayers);
      for (std::int64_t t = 0; t < Pools::kLayers * 2; ++t) {
        const std::int64_t bytes = Pools::kBytes[t % 2];
        for (std::int64_t block = 0; block < Pools::kBlocks; ++block) {
          const std::int64_t source = Pools::kBlocks - 1 - block;
          const bool moved = source % 2 == 0;
          const std::vector<std::uint8_t> zeros(bytes, 0);
          const std::uint8_t* expected = moved ? &pools.device[t][source * bytes] : zeros.data();
          CHECK(std::memcmp(&pools.host[t][block * bytes], expected, bytes) == 0);
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void PlansAreAddedFoundAndRemovedInSeveralThreads() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([caller] {
      for (std::int64_t round = 0; round < 500; ++round) {
        const std::int64_t number = 1'000'000 + caller * 1000 + round;
        auto plan = std::make_shared<TransferPlan>();
        plan->layer_count = number;
        CHECK(AddTransferPlan(number, plan));
        CHECK(!AddTransferPlan(number, plan));
        CHECK(FindTransferPlan(number)->layer_count == number);
        FindTransferPlan(1'000'000 + (caller + 1) % 4 * 1000 + round);  // perhaps there
        RemoveTransferPlan(number);
        CHECK(FindTransferPlan(number) == nullptr);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

const Test kTests[] = {
    {"each_index_once", EachIndexOnce},
    {"loops_in_several_threads", LoopsInSeveralThreads},
    {"what_a_body_throws_is_thrown_by_the_loop", WhatABodyThrowsIsThrownByTheLoop},
    {"no_more_threads_than_the_process_has_cores", NoMoreThreadsThanTheProcessHasCores},
    {"blocks_of_many_sizes", BlocksOfManySizes},
    {"copies_of_layers_in_several_threads", CopiesOfLayersInSeveralThreads},
    {"plans_are_added_found_and_removed_in_several_threads", PlansAreAddedFoundAndRemovedInSeveralThreads},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
