// Neighbouring blocks on both sides form one run: a single contiguous copy instead of many.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace paddle_kv {

struct Run {
  std::int64_t source;  // first block id
  std::int64_t target;
  std::int64_t length;  // blocks
};

// The pairs in the order of their sources, neighbours merged. Order does not matter to the result of a copy: targets
// are distinct, and no block is both source and target.
inline std::vector<Run> MergeRuns(const std::int64_t* source_ids, const std::int64_t* target_ids, std::int64_t count) {
  std::vector<Run> pairs;
  pairs.reserve(count);
  for (std::int64_t i = 0; i < count; ++i) pairs.push_back({source_ids[i], target_ids[i], 1});
  const auto before = [](const Run& a, const Run& b) {
    return a.source != b.source ? a.source < b.source : a.target < b.target;
  };
  if (!std::is_sorted(pairs.begin(), pairs.end(), before)) std::sort(pairs.begin(), pairs.end(), before);
  std::vector<Run> runs;
  for (const Run& pair : pairs) {
    if (!runs.empty() && pair.source == runs.back().source + runs.back().length &&
        pair.target == runs.back().target + runs.back().length) {
      ++runs.back().length;
    } else {
      runs.push_back(pair);
    }
  }
  return runs;
}

}  // namespace paddle_kv
