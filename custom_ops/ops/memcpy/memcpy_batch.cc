// memcpy_batch: a list of pieces of memory, by the copy engine.
#include "paddle_kv/memcpy/memcpy_batch.h"

#include "../common/guarded_kernel.h"
#include "../common/launch.h"
#include "paddle_kv/memcpy/vectorized_copy.h"
#include "pointer_ranges.h"

namespace paddle_kv {

void MemcpyBatch(const std::vector<int64_t>& source_list, const std::vector<int64_t>& target_list,
                 const std::vector<int64_t>& size_list, bool batched, int64_t device, int64_t stream) {
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
  const PairMemory memory = CheckPairMemory(source_pointers, target_pointers, sizes, where.device, true);
  // The single copy stages pageable memory before it returns; the batched one makes no such promise.
  LAUNCH_CUDA(where.device, MemcpyBatchCuda(pairs.data(), pair_count, batched && !memory.pageable, where));
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_memcpy_batch)
    .Inputs({})
    .Outputs({})
    .Attrs({"source_list: std::vector<int64_t>", "target_list: std::vector<int64_t>", "size_list: std::vector<int64_t>",
            "batched: bool", "device: int64_t", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::MemcpyBatch));
