// CUDA events that come as integers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/transfer/engine.h"

namespace paddle_kv {

inline cudaEvent_t EventOf(std::int64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); }

// Before the first bytes of a transfer, and behind what an engine does on the host: what is measured from this event on
// is the copying.
inline Status RecordStart(const EngineWork& work, cudaStream_t stream) {
  if (work.start_event != 0) PADDLE_KV_CUDA(cudaEventRecord(EventOf(work.start_event), stream));
  return {};
}

}  // namespace paddle_kv
