#include "block_pairs.h"

#include <algorithm>

#include "paddle_kv/common/cuda_device.h"

namespace paddle_kv {
namespace {

std::string CacheName(std::size_t i, std::size_t key_count, std::size_t count) {
  const bool is_key = i < key_count;
  const std::size_t in_list = is_key ? key_count : count - key_count;
  const std::string position = in_list == 1 ? "" : "[" + std::to_string(is_key ? i : i - key_count) + "]";
  return (is_key ? "key_caches" : "value_caches") + position;
}

void CheckPairTensor(const paddle::Tensor& block_mapping) {
  const auto shape = block_mapping.shape();
  if (shape.size() != 2 || shape[1] != 2) {
    std::string text;
    for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    ThrowValueError("block_mapping has shape [" + text + "]; pairs (source, target), shape [n, 2], are expected");
  }
  if (block_mapping.dtype() != phi::DataType::INT32 && block_mapping.dtype() != phi::DataType::INT64) {
    ThrowValueError("block_mapping must have dtype int32 or int64");
  }
  CheckAligned(BytesOf(block_mapping), static_cast<int64_t>(phi::SizeOf(block_mapping.dtype())), "block_mapping");
}

template <class Integer>
void SplitPairs(const void* pairs, int64_t count, Ids* source_ids, Ids* target_ids) {
  const auto* ids = static_cast<const Integer*>(pairs);
  source_ids->resize(count);
  target_ids->resize(count);
  for (int64_t i = 0; i < count; ++i) {
    (*source_ids)[i] = ids[2 * i];
    (*target_ids)[i] = ids[2 * i + 1];
  }
}

// One pass with a bit per block: the lists are long, and sorting them would take longer than the copy.
void CheckRoles(const Ids& source_ids, const Ids& target_ids, int64_t block_count, PairRule rule,
                const PairNames& names) {
  std::vector<bool> is_target(block_count);
  for (const int64_t target : target_ids) {
    if (is_target[target]) {
      ThrowValueError(names.targets + " name block " + std::to_string(target) +
                      " more than once; each target may occur only once");
    }
    is_target[target] = true;
  }
  for (const int64_t source : source_ids) {
    if (is_target[source]) {
      ThrowValueError("block " + std::to_string(source) + " is in " + names.sources + " and in " + names.targets +
                      (rule == PairRule::kCopy ? "; a block must not be both source and target of one copy"
                                               : "; each block may be exchanged only once"));
    }
  }
  if (rule == PairRule::kCopy) return;
  std::vector<bool> is_source(block_count);
  for (const int64_t source : source_ids) {
    if (is_source[source]) {
      ThrowValueError(names.sources + " name block " + std::to_string(source) +
                      " more than once; each block may be exchanged only once");
    }
    is_source[source] = true;
  }
}

}  // namespace

std::vector<CacheBlocks> CheckCaches(const std::vector<paddle::Tensor>& caches, int64_t key_count) {
  std::vector<CacheBlocks> blocks;
  std::vector<std::pair<const std::uint8_t*, int64_t>> ranges;
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const paddle::Tensor& cache = caches[i];
    const std::string name = CacheName(i, static_cast<std::size_t>(key_count), caches.size());
    const int64_t block_bytes = CheckCache(cache, name);
    if (DeviceOf(cache) != DeviceOf(caches.front())) {
      ThrowValueError(name + " is on another device than the first cache; all must be on one");
    }
    if (DeviceOf(cache) == kPinned) {
      ThrowValueError(name + " is in pinned memory; a cache on the GPU (or, without one, on the CPU) is expected");
    }
    const int64_t block_count = cache.shape()[0];
    if (block_count > kLargestBlockCount) {
      ThrowValueError(name + " has " + std::to_string(block_count) + " blocks; at most " +
                      std::to_string(kLargestBlockCount) + " are supported");
    }
    blocks.push_back({BytesOf(cache), block_bytes, block_count});
    ranges.emplace_back(BytesOf(cache), CheckedProduct(block_count, block_bytes, name));
  }
  CheckApart(ranges, "key_caches and value_caches");
  return blocks;
}

void CheckPairs(const std::vector<CacheBlocks>& caches, const Ids& source_ids, const Ids& target_ids, PairRule rule,
                const PairNames& names) {
  CheckSameLength(source_ids, names.sources, target_ids, names.targets);
  int64_t block_count = caches.front().block_count;
  for (const CacheBlocks& cache : caches) block_count = std::min(block_count, cache.block_count);
  CheckIds(source_ids, names.sources, block_count);
  CheckIds(target_ids, names.targets, block_count);
  CheckRoles(source_ids, target_ids, block_count, rule, names);
}

void ReadPairs(const int64_t* pairs, int64_t count, Ids* source_ids, Ids* target_ids) {
  SplitPairs<int64_t>(pairs, count, source_ids, target_ids);
}

void ReadPairs(const paddle::Tensor& block_mapping, Ids* source_ids, Ids* target_ids) {
  CheckPairTensor(block_mapping);
  const int64_t count = block_mapping.shape()[0];
  if (block_mapping.dtype() == phi::DataType::INT64) {
    SplitPairs<int64_t>(block_mapping.data(), count, source_ids, target_ids);
  } else {
    SplitPairs<std::int32_t>(block_mapping.data(), count, source_ids, target_ids);
  }
}

DevicePairs CheckDevicePairs(const paddle::Tensor& block_mapping, const std::vector<CacheBlocks>& caches,
                             const paddle::Tensor& cache, PairRule rule, const DeviceStream& where) {
  CheckPairTensor(block_mapping);
  if (DeviceOf(block_mapping) != DeviceOf(cache)) {
    ThrowValueError(
        "block_mapping is on another device than the caches; ids are expected on the host or on the caches' device");
  }
  const bool is_int64 = block_mapping.dtype() == phi::DataType::INT64;
  const DevicePairs pairs{block_mapping.data(), block_mapping.shape()[0], is_int64};
  if (!CheckRequested() || pairs.count == 0) return pairs;
  bool capturing = false;
  LAUNCH_CUDA(where.device, StreamIsCapturing(where, &capturing));
  if (capturing) return pairs;  // nothing may wait for a stream that is being captured

  const std::size_t id_bytes = is_int64 ? sizeof(int64_t) : sizeof(std::int32_t);
  std::vector<std::uint8_t> read(2 * pairs.count * id_bytes);
  LAUNCH_CUDA(where.device, CopyToHost(read.data(), pairs.ids, static_cast<int64_t>(read.size()), where));
  Ids all_sources;
  Ids all_targets;
  if (is_int64) {
    SplitPairs<int64_t>(read.data(), pairs.count, &all_sources, &all_targets);
  } else {
    SplitPairs<std::int32_t>(read.data(), pairs.count, &all_sources, &all_targets);
  }
  Ids sources;
  Ids targets;
  for (int64_t i = 0; i < pairs.count; ++i) {
    if (all_sources[i] < 0 || all_targets[i] < 0) continue;  // skipped on the device as well
    sources.push_back(all_sources[i]);
    targets.push_back(all_targets[i]);
  }
  CheckPairs(caches, sources, targets, rule, {});
  return pairs;
}

}  // namespace paddle_kv
