#include "host_range.h"

#include <limits>

#include "launch.h"
#include "paddle_kv/common/cuda_device.h"

namespace paddle_kv {
void CheckHostRange(int64_t pointer, int64_t bytes, const std::string& name, const std::string& extent, int device,
                    Access access, MappedMemory* memory) {
  if (pointer <= 0) ThrowValueError(name + " = " + std::to_string(pointer) + " must be the address of host memory");
  const std::string range =
      name + ": the " + std::to_string(bytes) + " bytes (" + extent + ") at " + std::to_string(pointer);
  if (bytes > std::numeric_limits<int64_t>::max() - pointer) ThrowValueError(range + " do not fit in 64 bits");
  if (device < 0) {
    if (memory->Allows(static_cast<std::uintptr_t>(pointer), bytes, access)) return;
    ThrowValueError(range + " are not all memory that this process may " +
                    (access == Access::kWrite ? "write" : "read"));
  }
  const void* first = reinterpret_cast<const void*>(pointer);
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
