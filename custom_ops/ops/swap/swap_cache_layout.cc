// swap_cache_layout: blocks of all layers <-> host memory in which the layers of a block lie together.
#include <algorithm>
#include <utility>

#include "../common/guarded_kernel.h"
#include "../common/host_range.h"
#include "../common/launch.h"
#include "../common/validate.h"
#include "host_swap.h"

namespace paddle_kv {
namespace {

const HostSwapNames kNames = {"cache_gpu_tensors", "cache_cpu_ptrs"};

int64_t BlockElements(const std::vector<int64_t>& cache_shape) {
  if (cache_shape.size() < 2) {
    ThrowValueError("cache_shape = " + ShapeText(cache_shape) + "; [num_blocks, ...] of a cache is expected");
  }
  int64_t elements = 1;
  for (std::size_t i = 1; i < cache_shape.size(); ++i) {
    if (cache_shape[i] < 1) ThrowValueError("cache_shape = " + ShapeText(cache_shape) + " must not be below 1");
    elements = CheckedProduct(elements, cache_shape[i], "the product of cache_shape");
  }
  return elements;
}

}  // namespace

// The host has [cpu block, layer, bytes of a block of one layer].
void SwapCacheLayout(const std::vector<paddle::Tensor>& caches, int64_t pointer,
                     const std::vector<int64_t>& cache_shape, const std::vector<int64_t>& device_ids,
                     const std::vector<int64_t>& host_ids, int64_t mode, int64_t stream) {
  const bool to_host = CheckMode(mode);
  CheckSameLength(device_ids, "gpu_block_ids", host_ids, "cpu_block_ids");
  const int place = CheckPlaces(caches, kNames.caches);
  const int64_t elements = BlockElements(cache_shape);
  int64_t block_bytes = 0;
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const std::string name = kNames.caches + "[" + std::to_string(i) + "]";
    const int64_t own_bytes = CheckCache(caches[i], name);
    CheckIds(device_ids, "gpu_block_ids", caches[i].shape()[0]);
    if (caches[i].dtype() != caches[0].dtype()) {
      ThrowValueError(name + " has dtype " + phi::DataTypeToString(caches[i].dtype()) + ", " + kNames.caches +
                      "[0] has " + phi::DataTypeToString(caches[0].dtype()) + "; all must have the same");
    }
    block_bytes = CheckedProduct(elements, phi::SizeOf(caches[i].dtype()), "bytes of a block");
    if (own_bytes != block_bytes) {
      ThrowValueError(name + " has shape " + ShapeText(caches[i].shape()) + ", cache_shape is " +
                      ShapeText(cache_shape) + "; the blocks of both must have the same size");
    }
  }
  CheckIds(host_ids, "cpu_block_ids", INT64_MAX);
  CheckDistinct(to_host ? host_ids : device_ids, to_host ? "cpu_block_ids" : "gpu_block_ids");
  RefuseCapture(caches.front(), stream);
  if (device_ids.empty()) return;  // nothing moves, whatever is at the address

  const auto layers = static_cast<int64_t>(caches.size());
  const int64_t stride = CheckedProduct(layers, block_bytes, "bytes of a block of all layers");
  const int64_t last = *std::max_element(host_ids.begin(), host_ids.end());
  const int64_t host_bytes = CheckedProduct(last, stride, "cpu_block_ids x bytes of a block of all layers") + stride;
  MappedMemory memory;
  CheckHostRange(pointer, host_bytes, kNames.pointers, "the blocks up to cpu_block_ids = " + std::to_string(last),
                 place, to_host ? Access::kWrite : Access::kRead, &memory);
  auto* host = reinterpret_cast<std::uint8_t*>(pointer);
  std::vector<BlockRows> rows;
  std::vector<MemoryRange> ranges = {{host, host + host_bytes, to_host}};
  for (const paddle::Tensor& cache : caches) {
    std::uint8_t* device = BytesOf(cache);
    ranges.push_back({device, device + cache.shape()[0] * block_bytes, !to_host});
    rows.push_back(to_host ? BlockRows{device, host, block_bytes, stride, block_bytes}
                           : BlockRows{host, device, stride, block_bytes, block_bytes});
    host += block_bytes;
  }
  CheckApart(std::move(ranges), kNames, to_host);
  MoveRows(rows, device_ids, host_ids, to_host, caches.front(), stream);
  WaitForSwap(caches.front(), stream);
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_swap_cache_layout)
    .Inputs({paddle::Vec("cache_gpu_tensors")})
    .Outputs({})
    .Attrs({"cache_cpu_ptrs: int64_t", "cache_shape: std::vector<int64_t>", "gpu_block_ids: std::vector<int64_t>",
            "cpu_block_ids: std::vector<int64_t>", "mode: int64_t", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::SwapCacheLayout));
