// swap_cache_all_layers, swap_cache_all_layers_async: the same blocks of many tensors <-> host memory.
#include "../common/guarded_kernel.h"
#include "host_swap.h"

namespace paddle_kv {

void SwapCacheAllLayersAsync(const std::vector<paddle::Tensor>& cache_gpu_tensors,
                             const std::vector<int64_t>& cache_cpu_ptrs, int64_t max_block_num_cpu,
                             const std::vector<int64_t>& swap_block_ids_gpu,
                             const std::vector<int64_t>& swap_block_ids_cpu, int64_t mode, int64_t stream) {
  SwapWithHost(cache_gpu_tensors, cache_cpu_ptrs, max_block_num_cpu, swap_block_ids_gpu, swap_block_ids_cpu, mode,
               stream, {"cache_gpu_tensors", "cache_cpu_ptrs"});
}

void SwapCacheAllLayers(const std::vector<paddle::Tensor>& cache_gpu_tensors,
                        const std::vector<int64_t>& cache_cpu_ptrs, int64_t max_block_num_cpu,
                        const std::vector<int64_t>& swap_block_ids_gpu, const std::vector<int64_t>& swap_block_ids_cpu,
                        int64_t mode, int64_t stream) {
  RefuseCapture(cache_gpu_tensors.front(), stream);
  SwapCacheAllLayersAsync(cache_gpu_tensors, cache_cpu_ptrs, max_block_num_cpu, swap_block_ids_gpu, swap_block_ids_cpu,
                          mode, stream);
  WaitForSwap(cache_gpu_tensors.front(), stream);
}

}  // namespace paddle_kv

#define SWAP_CACHE_ALL_LAYERS_ATTRS            \
  {"cache_cpu_ptrs: std::vector<int64_t>",     \
   "max_block_num_cpu: int64_t",               \
   "swap_block_ids_gpu: std::vector<int64_t>", \
   "swap_block_ids_cpu: std::vector<int64_t>", \
   "mode: int64_t",                            \
   "stream: int64_t"}

PD_BUILD_STATIC_OP(paddle_kv_swap_cache_all_layers)
    .Inputs({paddle::Vec("cache_gpu_tensors")})
    .Outputs({})
    .Attrs(SWAP_CACHE_ALL_LAYERS_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::SwapCacheAllLayers));

PD_BUILD_STATIC_OP(paddle_kv_swap_cache_all_layers_async)
    .Inputs({paddle::Vec("cache_gpu_tensors")})
    .Outputs({})
    .Attrs(SWAP_CACHE_ALL_LAYERS_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::SwapCacheAllLayersAsync));
