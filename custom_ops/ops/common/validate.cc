#include "validate.h"

#include <algorithm>
#include <cstdlib>

#include "errors.h"

namespace paddle_kv {

Ids IdsAt(const std::vector<int64_t>& address_and_count) {
  if (address_and_count.size() != 2) ThrowValueError("a list in memory is given as its address and its length");
  const auto* first = reinterpret_cast<const int64_t*>(address_and_count[0]);
  return Ids(first, first + address_and_count[1]);
}

int64_t CheckCache(const paddle::Tensor& cache, const std::string& name) {
  if (!cache.is_dense_tensor()) ThrowValueError(name + " is not a dense tensor; a cache must be dense");
  if (!cache.initialized()) ThrowValueError(name + " holds no memory; a cache that was allocated is expected");
  const auto shape = cache.shape();
  if (shape.size() < 3 || shape.size() > 5) {
    ThrowValueError(name + " has rank " + std::to_string(shape.size()) +
                    "; a cache has rank 3, 4 or (packed keys) 5, blocks first");
  }
  int64_t block_elements = 1;
  for (std::size_t d = 1; d < shape.size(); ++d) block_elements = CheckedProduct(block_elements, shape[d], name);
  return CheckedProduct(block_elements, static_cast<int64_t>(phi::SizeOf(cache.dtype())), name);
}

void CheckSameLength(const Ids& first, const std::string& first_name, const Ids& second,
                     const std::string& second_name) {
  if (first.size() != second.size()) {
    ThrowValueError(first_name + " has " + std::to_string(first.size()) + " ids, " + second_name + " has " +
                    std::to_string(second.size()) + "; both must have the same number");
  }
}

void CheckIds(const Ids& ids, const std::string& name, int64_t block_count) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= block_count) {
      ThrowIndexError(name + "[" + std::to_string(i) + "] = " + std::to_string(ids[i]) + " must be in [0, " +
                      std::to_string(block_count) + ")");
    }
  }
}

namespace {
Ids Sorted(const Ids& ids) {
  Ids sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}
}  // namespace

void CheckDistinct(const Ids& ids, const std::string& name) {
  const Ids sorted = Sorted(ids);
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    ThrowValueError(name + " names block " + std::to_string(*twice) +
                    " more than once; each target may occur only once");
  }
}

void CheckDisjoint(const Ids& sources, const std::string& source_name, const Ids& targets,
                   const std::string& target_name) {
  const Ids sorted = Sorted(sources);
  for (const int64_t target : targets) {
    if (std::binary_search(sorted.begin(), sorted.end(), target)) {
      ThrowValueError("block " + std::to_string(target) + " is in " + source_name + " and in " + target_name +
                      " of one cache; a block must not be both source and target of one copy");
    }
  }
}

void CheckApart(std::vector<std::pair<const std::uint8_t*, int64_t>> ranges, const std::string& name) {
  const auto before = [](const auto& a, const auto& b) { return a.first < b.first; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) std::sort(ranges.begin(), ranges.end(), before);
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i - 1].first + ranges[i - 1].second > ranges[i].first && ranges[i].second > 0) {
      ThrowValueError(name + ": two of the memories to be written overlap; each must be named once");
    }
  }
}

void CheckAligned(const void* data, int64_t item_bytes, const std::string& name) {
  const auto address = static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(data));
  if (address % item_bytes != 0) {
    ThrowValueError(name + " lies at address " + std::to_string(address) + "; a multiple of " +
                    std::to_string(item_bytes) + ", the bytes of an element, is expected");
  }
}

bool CheckRequested() {
  const char* value = std::getenv("PADDLE_KV_CHECK");
  return value != nullptr && std::string(value) == "1";
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

int64_t CheckedProduct(int64_t a, int64_t b, const std::string& what) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    ThrowValueError(what + ": " + std::to_string(a) + " x " + std::to_string(b) + " does not fit in 64 bits");
  }
  return product;
}

}  // namespace paddle_kv
