// Tokens of quantised caches as rows of float16.
#include "paddle_kv/cache_write/move_kernels.cuh"

namespace paddle_kv {

template Status GatherDequantized<Float16>(const TokenMove&, const Dequantization&, const DeviceStream&);

}  // namespace paddle_kv
