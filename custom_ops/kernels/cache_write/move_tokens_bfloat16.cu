// Tokens of quantised caches as rows of bfloat16.
#include "paddle_kv/cache_write/move_kernels.cuh"

namespace paddle_kv {

template Status GatherDequantized<BFloat16>(const TokenMove&, const Dequantization&, const DeviceStream&);

}  // namespace paddle_kv
