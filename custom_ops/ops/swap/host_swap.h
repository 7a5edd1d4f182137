// What the swap operators share: device tensors on one side, host memory given by address on the other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/paddle_api.h"

namespace paddle_kv {

// Argument names as the caller wrote them, for messages.
struct HostSwapNames {
  std::string caches;
  std::string pointers;
};

// Checks everything, then enqueues the copies of all tensors on `stream`. `mode` 0 is device to host, 1 host to device.
void SwapWithHost(const std::vector<paddle::Tensor>& caches, const std::vector<int64_t>& host_pointers,
                  int64_t max_block_num_cpu, const std::vector<int64_t>& device_ids,
                  const std::vector<int64_t>& host_ids, int64_t mode, int64_t stream, const HostSwapNames& names);

// ValueError if the stream is being captured into a CUDA graph: waiting for it would break the capture.
void RefuseCapture(const paddle::Tensor& cache, int64_t stream);

// Returns when all that was enqueued on the stream is done.
void WaitForSwap(const paddle::Tensor& cache, int64_t stream);

}  // namespace paddle_kv
