// Copies blocks between pinned host memory and the device, or inside the device.
//
// 1. The pairs come sorted, with neighbours merged (runs.h).
// 2. A run that is large and dense on both sides goes to the copy engine, which does not disturb running kernels.
// 3. The rest goes to one kernel with few CTAs: it reaches the rate of the link with two of them, and every further one
//    only takes memory bandwidth from the model beside it. Work items are chunks of a block, one warp each.
// Block ids travel as kernel parameters: copied at the launch, they need no device buffer, no synchronisation and no
// lifetime, and can be captured into a graph.
#include <algorithm>
#include <vector>

#include "paddle_kv/common/copy_bytes.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/kernel_parameters.cuh"
#include "paddle_kv/swap/transfer_blocks.h"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr std::int64_t kCopyEngineBytes = 256
                                                   << 10;  // from here on the copy engine is at the rate of the link
  static constexpr std::int64_t kChunkBytes = 8 << 10;
  static constexpr int kThreads = 1024;
  static constexpr int kHostLinkCtas = 2;
  static constexpr int kCtasPerMultiprocessor = 2;  // copies inside the device
};

// Kernel parameters hold 4 KiB on every architecture.
constexpr int kTensorsPerLaunch = 8;
constexpr int kPairsPerLaunch = 220;

struct Launch {
  BlockRows tensors[kTensorsPerLaunch];
  std::int64_t chunks[kTensorsPerLaunch];  // chunks of one block of the tensor
  std::int64_t source_ids[kPairsPerLaunch];
  std::int64_t target_ids[kPairsPerLaunch];
  std::int64_t items;
  int tensor_count;
  int pair_count;
};
static_assert(sizeof(Launch) <= kSmallParameterBytes);

__global__ void __launch_bounds__(Tuning::kThreads) CopyChunks(const __grid_constant__ Launch launch) {
  const int lane = threadIdx.x % kWarpLanes;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / kWarpLanes);
  std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kWarpLanes) + threadIdx.x / kWarpLanes;
  for (; item < launch.items; item += warps) {
    std::int64_t rest = item;
    int tensor = 0;
    while (rest >= launch.chunks[tensor] * launch.pair_count) {
      rest -= launch.chunks[tensor] * launch.pair_count;
      ++tensor;
    }
    const BlockRows rows = launch.tensors[tensor];
    const std::int64_t pair = rest / launch.chunks[tensor];
    const std::int64_t offset = rest % launch.chunks[tensor] * Tuning::kChunkBytes;
    const std::int64_t left = rows.block_bytes - offset;
    CopyBytesWithWarp(rows.source + launch.source_ids[pair] * rows.source_stride + offset,
                      rows.target + launch.target_ids[pair] * rows.target_stride + offset,
                      left < Tuning::kChunkBytes ? left : Tuning::kChunkBytes, lane);
  }
}

Status LaunchCopyChunks(const BlockRows* tensors, std::int64_t tensor_count, const std::vector<Run>& pairs,
                        int largest_grid, cudaStream_t stream) {
  for (std::int64_t first_tensor = 0; first_tensor < tensor_count; first_tensor += kTensorsPerLaunch) {
    Launch launch;
    launch.tensor_count = static_cast<int>(std::min<std::int64_t>(kTensorsPerLaunch, tensor_count - first_tensor));
    std::int64_t chunks_per_pair = 0;
    for (int t = 0; t < launch.tensor_count; ++t) {
      launch.tensors[t] = tensors[first_tensor + t];
      launch.chunks[t] = (launch.tensors[t].block_bytes + Tuning::kChunkBytes - 1) / Tuning::kChunkBytes;
      chunks_per_pair += launch.chunks[t];
    }
    if (chunks_per_pair == 0) continue;
    for (std::size_t first = 0; first < pairs.size(); first += kPairsPerLaunch) {
      launch.pair_count = static_cast<int>(std::min<std::size_t>(kPairsPerLaunch, pairs.size() - first));
      for (int i = 0; i < launch.pair_count; ++i) {
        launch.source_ids[i] = pairs[first + i].source;
        launch.target_ids[i] = pairs[first + i].target;
      }
      launch.items = chunks_per_pair * launch.pair_count;
      const std::int64_t warps_per_cta = Tuning::kThreads / kWarpLanes;
      const int grid =
          static_cast<int>(std::min<std::int64_t>(largest_grid, (launch.items + warps_per_cta - 1) / warps_per_cta));
      CopyChunks<<<grid, Tuning::kThreads, 0, stream>>>(launch);
      PADDLE_KV_RETURN_IF_ERROR(LaunchStatus("CopyChunks"));
    }
  }
  return {};
}

}  // namespace

Status TransferBlocksCuda(const BlockRows* tensors, std::int64_t tensor_count, const std::vector<Run>& runs,
                          Direction direction, const DeviceStream& where) {
  if (runs.empty() || tensor_count == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  const cudaStream_t stream = StreamOf(where);
  const bool inside_device = direction == Direction::kDeviceToDevice;
  int largest_grid = Tuning::kHostLinkCtas;
  if (inside_device) {
    int multiprocessors = 0;
    PADDLE_KV_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, where.device));
    largest_grid = multiprocessors * Tuning::kCtasPerMultiprocessor;
  }

  // Tensors differ in block size, so which runs are large differs too: those of one size share a split.
  std::vector<BlockRows> left(tensors, tensors + tensor_count);
  while (!left.empty()) {
    const std::int64_t block_bytes = left.front().block_bytes;
    const bool dense = left.front().source_stride == block_bytes && left.front().target_stride == block_bytes;
    const auto alike = [&](const BlockRows& rows) {
      const bool rows_dense = rows.source_stride == rows.block_bytes && rows.target_stride == rows.block_bytes;
      return rows.block_bytes == block_bytes && rows_dense == dense;
    };
    const auto others = std::stable_partition(left.begin(), left.end(), alike);
    const std::vector<BlockRows> group(left.begin(), others);
    left.erase(left.begin(), others);

    std::vector<Run> single_blocks;
    for (const Run& run : runs) {
      const bool one_piece = dense || run.length == 1;
      if (one_piece && !inside_device && run.length * block_bytes >= Tuning::kCopyEngineBytes) {
        for (const BlockRows& rows : group) {
          PADDLE_KV_CUDA(cudaMemcpyAsync(rows.target + run.target * rows.target_stride,
                                         rows.source + run.source * rows.source_stride, run.length * block_bytes,
                                         cudaMemcpyDefault, stream));
        }
      } else {
        for (std::int64_t i = 0; i < run.length; ++i) single_blocks.push_back({run.source + i, run.target + i, 1});
      }
    }
    PADDLE_KV_RETURN_IF_ERROR(
        LaunchCopyChunks(group.data(), static_cast<std::int64_t>(group.size()), single_blocks, largest_grid, stream));
  }
  return {};
}

}  // namespace paddle_kv
