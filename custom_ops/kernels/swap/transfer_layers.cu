#include "paddle_kv/swap/transfer_layers.h"

#include <algorithm>

#include "paddle_kv/common/cuda_status.cuh"

namespace paddle_kv {

Status TransferLayersCuda(const TransferPlan& plan, Direction direction, const std::int64_t* device_ids,
                          const std::int64_t* host_ids, std::int64_t block_count, const LayerRange& range,
                          std::int64_t stream) {
  const DeviceStream where{plan.device, stream};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  const bool to_host = direction == Direction::kDeviceToHost;
  const std::vector<Run> runs =
      MergeRuns(to_host ? device_ids : host_ids, to_host ? host_ids : device_ids, block_count);
  const auto event = [](std::int64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); };
  std::size_t next_wait = 0;
  std::size_t group = 0;
  for (std::int64_t first = range.first_layer; first < range.end_layer; first += range.layers_per_event, ++group) {
    for (std::int64_t w = 0; w < range.waits_per_group[group]; ++w, ++next_wait) {
      PADDLE_KV_CUDA(cudaStreamWaitEvent(StreamOf(where), event(range.wait_events[next_wait]), 0));
    }
    if (group == 0 && range.start_event != 0) {
      PADDLE_KV_CUDA(cudaEventRecord(event(range.start_event), StreamOf(where)));
    }
    const std::int64_t end = std::min(first + range.layers_per_event, range.end_layer);
    for (std::int64_t layer = first; layer < end; ++layer) {
      const std::vector<BlockRows> rows = RowsOfLayer(plan, layer, direction);
      PADDLE_KV_RETURN_IF_ERROR(TransferBlocksCuda(rows.data(), plan.tensors_per_layer, runs, direction, where));
    }
    PADDLE_KV_CUDA(cudaEventRecord(event(range.record_events[group]), StreamOf(where)));
  }
  return {};
}

}  // namespace paddle_kv
