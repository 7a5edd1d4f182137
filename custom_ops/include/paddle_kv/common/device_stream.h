// Where a CUDA launcher enqueues its work.
#pragma once

#include <cstdint>

namespace paddle_kv {

struct DeviceStream {
  int device = 0;           // CUDA ordinal
  std::int64_t stream = 0;  // a cudaStream_t as an integer; 0 is the legacy default stream
};

}  // namespace paddle_kv
