// The pointers of a pair of pools. Transfers name them by a number, because a list of 160 tensors costs 160 us a call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "paddle_kv/transfer/block_rows.h"

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
  int device = -1;             // CUDA ordinal; -1: the "device" cache is in RAM
  bool inside_device = false;  // the "host" side lies on a GPU too: the cache of another process
  bool on_other_gpu = false;   // and that is not `device`
  std::int64_t device_blocks = 0;
  std::int64_t host_blocks = 0;
  std::int64_t layer_count = 0;
  std::int64_t tensors_per_layer = 0;
  std::vector<LayerTensor> tensors;  // [layer][tensor]
};

// False: the number is taken.
bool AddTransferPlan(std::int64_t number, std::shared_ptr<const TransferPlan> plan);

// Null: there is none.
std::shared_ptr<const TransferPlan> FindTransferPlan(std::int64_t number);

void RemoveTransferPlan(std::int64_t number);

// The tensors of one layer with source and target as the direction has them.
std::vector<BlockRows> RowsOfLayer(const TransferPlan& plan, std::int64_t layer, Direction direction);

}  // namespace paddle_kv
