// What the swap operators share: device tensors on one side, host memory given by address on the other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/paddle_api.h"
#include "paddle_kv/transfer/block_rows.h"

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

// The steps of it, for host memory in another order.

// ValueError unless `mode` is one of the two. Returns whether it is device to host.
bool CheckMode(int64_t mode);

// The GPU, or -1 for the CPU, that all caches are on. ValueError if they are not on one, or in pinned memory.
int CheckPlaces(const std::vector<paddle::Tensor>& caches, const std::string& name);

struct MemoryRange {
  const std::uint8_t* first;
  const std::uint8_t* end;
  bool written;
};

// Memory that is written must not share bytes with any other of the call: the result would depend on the order of the
// copies. Sources may coincide.
void CheckApart(std::vector<MemoryRange> ranges, const HostSwapNames& names, bool to_host);

// Enqueues the copies of checked rows, sources and targets as the direction says.
void MoveRows(const std::vector<BlockRows>& rows, const std::vector<int64_t>& device_ids,
              const std::vector<int64_t>& host_ids, bool to_host, const paddle::Tensor& cache, int64_t stream);

// ValueError if the stream is being captured into a CUDA graph: waiting for it would break the capture.
void RefuseCapture(const paddle::Tensor& cache, int64_t stream);

// Returns when all that was enqueued on the stream is done.
void WaitForSwap(const paddle::Tensor& cache, int64_t stream);

}  // namespace paddle_kv
