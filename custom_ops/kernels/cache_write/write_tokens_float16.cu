// Tokens of float16 into quantised caches.
#include "paddle_kv/cache_write/write_kernels.cuh"

namespace paddle_kv {

template Status WriteQuantized<Float16>(const TokenWrite&, const DeviceStream&);

}  // namespace paddle_kv
