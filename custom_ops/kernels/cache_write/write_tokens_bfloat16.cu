// Tokens of bfloat16 into quantised caches.
#include "paddle_kv/cache_write/write_kernels.cuh"

namespace paddle_kv {

template Status WriteQuantized<BFloat16>(const TokenWrite&, const DeviceStream&);

}  // namespace paddle_kv
