#include "host_swap.h"

#include <algorithm>
#include <utility>

#include "../common/host_range.h"
#include "../common/launch.h"
#include "../common/validate.h"
#include "paddle_kv/common/cuda_device.h"
#include "paddle_kv/swap/transfer_blocks.h"

namespace paddle_kv {
namespace {

constexpr int64_t kDeviceToHostMode = 0;
constexpr int64_t kHostToDeviceMode = 1;

std::string Indexed(const std::string& name, std::size_t i, std::size_t count) {
  return count == 1 ? name : name + "[" + std::to_string(i) + "]";
}

}  // namespace

bool CheckMode(int64_t mode) {
  if (mode != kDeviceToHostMode && mode != kHostToDeviceMode) {
    ThrowValueError("mode = " + std::to_string(mode) + " must be 0 (device to host) or 1 (host to device)");
  }
  return mode == kDeviceToHostMode;
}

int CheckPlaces(const std::vector<paddle::Tensor>& caches, const std::string& name) {
  const int place = DeviceOf(caches.front());
  for (std::size_t i = 0; i < caches.size(); ++i) {
    if (DeviceOf(caches[i]) != place) {
      ThrowValueError(Indexed(name, i, caches.size()) + " is on another device than " + name +
                      "[0]; all must be on one");
    }
    if (place == kPinned) {
      ThrowValueError(Indexed(name, i, caches.size()) +
                      " is in pinned memory; a cache on the GPU (or, without one, on the CPU) is expected");
    }
  }
  return place;
}

void CheckApart(std::vector<MemoryRange> ranges, const HostSwapNames& names, bool to_host) {
  std::sort(ranges.begin(), ranges.end(), [](const MemoryRange& a, const MemoryRange& b) { return a.first < b.first; });
  const std::uint8_t* end_of_written = nullptr;
  const std::uint8_t* end_of_read = nullptr;
  for (const MemoryRange& range : ranges) {
    if (range.first == range.end) continue;
    if (range.written && range.first < end_of_written) {
      ThrowValueError((to_host ? names.pointers : names.caches) +
                      ": two of the memories to be written overlap; each must be named once");
    }
    if (range.first < (range.written ? end_of_read : end_of_written)) {
      ThrowValueError("the host memory at " + names.pointers + " overlaps the memory of " + names.caches +
                      "; both must be apart");
    }
    const std::uint8_t*& end = range.written ? end_of_written : end_of_read;
    end = std::max(end, range.end);
  }
}

void MoveRows(const std::vector<BlockRows>& rows, const std::vector<int64_t>& device_ids,
              const std::vector<int64_t>& host_ids, bool to_host, const paddle::Tensor& cache, int64_t stream) {
  const Ids& source_ids = to_host ? device_ids : host_ids;
  const Ids& target_ids = to_host ? host_ids : device_ids;
  const auto tensor_count = static_cast<int64_t>(rows.size());
  const auto block_count = static_cast<int64_t>(source_ids.size());
  if (DeviceOf(cache) >= 0) {
    const DeviceStream where = WhereOf(cache, stream);
    LAUNCH_CUDA(where.device, TransferBlocksCuda(rows.data(), tensor_count,
                                                 MergeRuns(source_ids.data(), target_ids.data(), block_count),
                                                 to_host ? Direction::kDeviceToHost : Direction::kHostToDevice, where));
  } else {
    TransferBlocksCpu(rows.data(), tensor_count, source_ids.data(), target_ids.data(), block_count);
  }
}

void SwapWithHost(const std::vector<paddle::Tensor>& caches, const std::vector<int64_t>& host_pointers,
                  int64_t max_block_num_cpu, const std::vector<int64_t>& device_ids,
                  const std::vector<int64_t>& host_ids, int64_t mode, int64_t stream, const HostSwapNames& names) {
  const bool to_host = CheckMode(mode);
  if (max_block_num_cpu < 0) {
    ThrowValueError("max_block_num_cpu = " + std::to_string(max_block_num_cpu) + " must not be negative");
  }
  if (caches.size() != host_pointers.size()) {
    ThrowValueError(names.caches + " has " + std::to_string(caches.size()) + " tensors, " + names.pointers + " has " +
                    std::to_string(host_pointers.size()) + " addresses; both must have the same number");
  }
  CheckSameLength(device_ids, "swap_block_ids_gpu", host_ids, "swap_block_ids_cpu");
  CheckIds(host_ids, "swap_block_ids_cpu", max_block_num_cpu);

  const int place = CheckPlaces(caches, names.caches);
  std::vector<BlockRows> rows;
  std::vector<MemoryRange> ranges;
  MappedMemory memory;
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const paddle::Tensor& cache = caches[i];
    const std::string cache_name = Indexed(names.caches, i, caches.size());
    const std::string pointer_name = Indexed(names.pointers, i, caches.size());
    const int64_t block_bytes = CheckCache(cache, cache_name);
    CheckIds(device_ids, "swap_block_ids_gpu", cache.shape()[0]);
    if (device_ids.empty()) continue;  // nothing moves, whatever is at the address
    const int64_t host_bytes = CheckedProduct(max_block_num_cpu, block_bytes, "max_block_num_cpu x bytes of one block");
    CheckHostRange(host_pointers[i], host_bytes, pointer_name,
                   "max_block_num_cpu = " + std::to_string(max_block_num_cpu) + " blocks", place,
                   to_host ? Access::kWrite : Access::kRead, &memory);
    auto* host = reinterpret_cast<std::uint8_t*>(host_pointers[i]);
    std::uint8_t* device = BytesOf(cache);
    rows.push_back({to_host ? device : host, to_host ? host : device, block_bytes, block_bytes, block_bytes});
    ranges.push_back({device, device + cache.shape()[0] * block_bytes, !to_host});
    ranges.push_back({host, host + host_bytes, to_host});
  }
  CheckApart(std::move(ranges), names, to_host);
  CheckDistinct(to_host ? host_ids : device_ids, to_host ? "swap_block_ids_cpu" : "swap_block_ids_gpu");
  MoveRows(rows, device_ids, host_ids, to_host, caches.front(), stream);
}

void RefuseCapture(const paddle::Tensor& cache, int64_t stream) {
  if (!OnGpu(cache)) return;
  bool capturing = false;
  const DeviceStream where = WhereOf(cache, stream);
  LAUNCH_CUDA(where.device, StreamIsCapturing(where, &capturing));
  if (capturing) {
    ThrowValueError("stream = " + std::to_string(stream) +
                    " is being captured into a CUDA graph, where nothing can be waited for; use the operator's _async "
                    "form");
  }
}

void WaitForSwap(const paddle::Tensor& cache, int64_t stream) {
  if (!OnGpu(cache)) return;
  LAUNCH_CUDA(WhereOf(cache, stream).device, SynchronizeStream(WhereOf(cache, stream)));
}

}  // namespace paddle_kv
