// Copies of the same blocks of many layers, where the "device" cache is in RAM.
#pragma once

#include <cstdint>

#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

// Returns when the layers are copied.
void TransferLayersCpu(const TransferPlan& plan, Direction direction, const std::int64_t* device_ids,
                       const std::int64_t* host_ids, std::int64_t block_count, std::int64_t first_layer,
                       std::int64_t end_layer);

}  // namespace paddle_kv
