// vectorized_copy: a list of pieces of memory, by a kernel.
#include "paddle_kv/memcpy/vectorized_copy.h"

#include "../common/guarded_kernel.h"
#include "../common/launch.h"
#include "pointer_ranges.h"

namespace paddle_kv {

void VectorizedCopy(const std::vector<int64_t>& source_list, const std::vector<int64_t>& target_list,
                    const std::vector<int64_t>& size_list, int64_t device, int64_t stream) {
  const Ids source_pointers = IdsAt(source_list);
  const Ids target_pointers = IdsAt(target_list);
  const Ids sizes = IdsAt(size_list);
  const std::vector<CopyPair> pairs = CheckCopyPairs(source_pointers, target_pointers, sizes);
  const auto pair_count = static_cast<int64_t>(pairs.size());
  if (device == kNoDevice) {
    CheckMappedPairs(source_pointers, target_pointers, sizes);
    VectorizedCopyCpu(pairs.data(), pair_count);
    return;
  }
  const DeviceStream where{static_cast<int>(device), stream};
  const PairMemory memory = CheckPairMemory(source_pointers, target_pointers, sizes, where.device, false);
  LAUNCH_CUDA(where.device, VectorizedCopyCuda(pairs.data(), pair_count, memory.host, where));
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_vectorized_copy)
    .Inputs({})
    .Outputs({})
    .Attrs({"source_list: std::vector<int64_t>", "target_list: std::vector<int64_t>", "size_list: std::vector<int64_t>",
            "device: int64_t", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::VectorizedCopy));
