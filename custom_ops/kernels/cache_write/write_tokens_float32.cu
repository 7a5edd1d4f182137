// Tokens of float32 into quantised caches.
#include "paddle_kv/cache_write/write_kernels.cuh"

namespace paddle_kv {

template Status WriteQuantized<Float32>(const TokenWrite&, const DeviceStream&);

}  // namespace paddle_kv
