#include <algorithm>
#include <cstring>
#include <vector>

#include "paddle_kv/common/parallel_for.h"
#include "paddle_kv/memcpy/vectorized_copy.h"

namespace paddle_kv {

// The loop runs over bytes and not over pairs, so that one large piece among small ones is shared out too.
void VectorizedCopyCpu(const CopyPair* pairs, std::int64_t pair_count) {
  std::vector<std::int64_t> ends;
  ends.reserve(pair_count);
  std::int64_t total_bytes = 0;
  for (std::int64_t i = 0; i < pair_count; ++i) ends.push_back(total_bytes += pairs[i].bytes);
  ParallelFor(total_bytes, total_bytes, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t pair = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const std::int64_t offset = begin - (ends[pair] - pairs[pair].bytes);
      const std::int64_t bytes = std::min(end, ends[pair]) - begin;
      std::memcpy(pairs[pair].target + offset, pairs[pair].source + offset, bytes);
      begin += bytes;
      ++pair;
    }
  });
}

}  // namespace paddle_kv
