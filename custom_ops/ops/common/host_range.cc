#include "host_range.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <limits>

#include "launch.h"
#include "paddle_kv/common/cuda_device.h"

namespace paddle_kv {
namespace {

// Whether [first, first + bytes) begins and ends in mapped memory; looks at the pages of its first and last byte.
bool IsMapped(const void* first, int64_t bytes) {
  if (bytes <= 0) return true;
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<std::uintptr_t>(first);
  const std::uintptr_t last = start + static_cast<std::uintptr_t>(bytes) - 1;
  for (const std::uintptr_t byte : {start, last}) {
    unsigned char resident = 0;
    if (mincore(reinterpret_cast<void*>(byte / page_bytes * page_bytes), 1, &resident) != 0 && errno == ENOMEM) {
      return false;
    }
  }
  return true;
}

}  // namespace

void CheckHostRange(int64_t pointer, int64_t bytes, const std::string& name, const std::string& extent, int device) {
  if (pointer <= 0) ThrowValueError(name + " = " + std::to_string(pointer) + " must be the address of host memory");
  const std::string range =
      name + ": the " + std::to_string(bytes) + " bytes (" + extent + ") at " + std::to_string(pointer);
  if (bytes > std::numeric_limits<int64_t>::max() - pointer) ThrowValueError(range + " do not fit in 64 bits");
  const void* first = reinterpret_cast<const void*>(pointer);
  if (device < 0) {
    if (!IsMapped(first, bytes)) ThrowValueError(range + " are not all memory of this process");
    return;
  }
  bool reachable = false;
  LAUNCH_CUDA(device, HostRangeIsReachable(first, bytes, device, &reachable));
  if (!reachable) {
    ThrowValueError(range +
                    " are not all host memory that the GPU can reach; allocate them page-locked (paddle_kv.HostPool, "
                    "cudaHostAlloc) or register them");
  }
}

void CheckReachable(const paddle::Tensor& host, const std::string& name, int device) {
  const auto bytes = static_cast<int64_t>(host.numel() * phi::SizeOf(host.dtype()));
  bool reachable = false;
  LAUNCH_CUDA(device, HostRangeIsReachable(host.data(), bytes, device, &reachable));
  if (!reachable) {
    ThrowValueError(name + " is pageable host memory, which GPU " + std::to_string(device) +
                    " cannot reach; use pinned memory (Tensor.pin_memory())");
  }
}

}  // namespace paddle_kv
