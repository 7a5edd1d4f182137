// How the engines hand lists of pieces to the copy engine: in calls that are not too long, by one thread or two.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <new>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/helper_thread.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/memcpy/copy_pair.h"

namespace paddle_kv {

// The driver's lock is held for the time of a call, and the model's launches wait for it.
constexpr std::int64_t kPiecesPerCall = 128;

// The device must be current.
Status CopyPieces(const CopyPair* pieces, std::int64_t count, int device, cudaStream_t stream);

// Runs both, which give a Status: the first one in this thread, the second one in the helper's if that can be had. What
// they throw for want of memory becomes a Status.
template <class First, class Second>
Status ByTwoThreads(HelperThread* helper, int device, First first, Second second) {
  const auto guarded = [device](auto& submit) -> Status {
    PADDLE_KV_CUDA(cudaSetDevice(device));
    const CaptureTolerance tolerance;
    try {
      return submit();
    } catch (const std::bad_alloc&) {
      return OutOfHostMemory();
    }
  };
  Status of_second;
  const std::function<void()> others = [&] { of_second = guarded(second); };
  const bool is_helped = helper->Start(others);
  const Status status = guarded(first);
  if (is_helped) {
    helper->Wait();
  } else {
    others();
  }
  return status.ok() ? of_second : status;
}

}  // namespace paddle_kv
