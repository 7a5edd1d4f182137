// swap_cache_per_layer, swap_cache_per_layer_async: blocks of one tensor of one layer <-> host memory.
#include "../common/guarded_kernel.h"
#include "host_swap.h"

namespace paddle_kv {

void SwapCachePerLayerAsync(const paddle::Tensor& cache_gpu, int64_t cache_cpu_ptr, int64_t max_block_num_cpu,
                            const std::vector<int64_t>& swap_block_ids_gpu,
                            const std::vector<int64_t>& swap_block_ids_cpu, int64_t mode, int64_t stream) {
  SwapWithHost({cache_gpu}, {cache_cpu_ptr}, max_block_num_cpu, swap_block_ids_gpu, swap_block_ids_cpu, mode, stream,
               {"cache_gpu", "cache_cpu_ptr"});
}

void SwapCachePerLayer(const paddle::Tensor& cache_gpu, int64_t cache_cpu_ptr, int64_t max_block_num_cpu,
                       const std::vector<int64_t>& swap_block_ids_gpu, const std::vector<int64_t>& swap_block_ids_cpu,
                       int64_t mode, int64_t stream) {
  RefuseCapture(cache_gpu, stream);
  SwapCachePerLayerAsync(cache_gpu, cache_cpu_ptr, max_block_num_cpu, swap_block_ids_gpu, swap_block_ids_cpu, mode,
                         stream);
  WaitForSwap(cache_gpu, stream);
}

}  // namespace paddle_kv

#define SWAP_CACHE_PER_LAYER_ATTRS             \
  {"cache_cpu_ptr: int64_t",                   \
   "max_block_num_cpu: int64_t",               \
   "swap_block_ids_gpu: std::vector<int64_t>", \
   "swap_block_ids_cpu: std::vector<int64_t>", \
   "mode: int64_t",                            \
   "stream: int64_t"}

PD_BUILD_STATIC_OP(paddle_kv_swap_cache_per_layer)
    .Inputs({"cache_gpu"})
    .Outputs({})
    .Attrs(SWAP_CACHE_PER_LAYER_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::SwapCachePerLayer));

PD_BUILD_STATIC_OP(paddle_kv_swap_cache_per_layer_async)
    .Inputs({"cache_gpu"})
    .Outputs({})
    .Attrs(SWAP_CACHE_PER_LAYER_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::SwapCachePerLayerAsync));
