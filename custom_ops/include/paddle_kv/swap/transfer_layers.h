// Copies the same blocks of many layers, layer after layer, with an event behind each group of layers.
#pragma once

#include <cstdint>
#include <vector>

#include "paddle_kv/common/status.h"
#include "paddle_kv/swap/transfer_blocks.h"

namespace paddle_kv {

// Where the blocks of one tensor of one layer lie on both sides. Block i starts at base + i * stride.
struct LayerTensor {
  std::uint8_t* device;
  std::uint8_t* host;
  std::int64_t device_stride;
  std::int64_t host_stride;
  std::int64_t block_bytes;
};

// All that stays the same between two transfers of one pair of pools.
struct TransferPlan {
  int device = -1;  // CUDA ordinal; -1: the "device" cache is in RAM
  std::int64_t device_blocks = 0;
  std::int64_t host_blocks = 0;
  std::int64_t layer_count = 0;
  std::int64_t tensors_per_layer = 0;
  std::vector<LayerTensor> tensors;  // [layer][tensor]
};

// One transfer, or a part of it. Event arrays hold cudaEvent_t as integers.
struct LayerRange {
  std::int64_t first_layer = 0;
  std::int64_t end_layer = 0;
  std::int64_t layers_per_event = 1;
  // Group g waits for the next waits_per_group[g] entries of wait_events before it starts.
  std::vector<std::int64_t> wait_events;
  std::vector<std::int64_t> waits_per_group;
  std::int64_t start_event = 0;             // recorded behind the waits of the first group; 0: none
  std::vector<std::int64_t> record_events;  // one a group, recorded when its last layer is enqueued
};

// Returns when the layers are copied. Events are not used: there is no stream to order.
void TransferLayersCpu(const TransferPlan& plan, Direction direction, const std::int64_t* device_ids,
                       const std::int64_t* host_ids, std::int64_t block_count, const LayerRange& range);

Status TransferLayersCuda(const TransferPlan& plan, Direction direction, const std::int64_t* device_ids,
                          const std::int64_t* host_ids, std::int64_t block_count, const LayerRange& range,
                          std::int64_t stream);

// The tensors of one layer with source and target as the direction has them.
inline std::vector<BlockRows> RowsOfLayer(const TransferPlan& plan, std::int64_t layer, Direction direction) {
  std::vector<BlockRows> rows;
  rows.reserve(plan.tensors_per_layer);
  for (std::int64_t t = 0; t < plan.tensors_per_layer; ++t) {
    const LayerTensor& tensor = plan.tensors[layer * plan.tensors_per_layer + t];
    if (direction == Direction::kDeviceToHost) {
      rows.push_back({tensor.device, tensor.host, tensor.device_stride, tensor.host_stride, tensor.block_bytes});
    } else {
      rows.push_back({tensor.host, tensor.device, tensor.host_stride, tensor.device_stride, tensor.block_bytes});
    }
  }
  return rows;
}

}  // namespace paddle_kv
