// The pointers of a pair of pools, and copies of the same blocks of many layers.
#pragma once

#include <cstdint>
#include <vector>

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

// Returns when the layers are copied.
void TransferLayersCpu(const TransferPlan& plan, Direction direction, const std::int64_t* device_ids,
                       const std::int64_t* host_ids, std::int64_t block_count, std::int64_t first_layer,
                       std::int64_t end_layer);

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
