#include "paddle_kv/swap/transfer_layers.h"

namespace paddle_kv {

void TransferLayersCpu(const TransferPlan& plan, Direction direction, const std::int64_t* device_ids,
                       const std::int64_t* host_ids, std::int64_t block_count, const LayerRange& range) {
  const bool to_host = direction == Direction::kDeviceToHost;
  for (std::int64_t layer = range.first_layer; layer < range.end_layer; ++layer) {
    const std::vector<BlockRows> rows = RowsOfLayer(plan, layer, direction);
    TransferBlocksCpu(rows.data(), plan.tensors_per_layer, to_host ? device_ids : host_ids,
                      to_host ? host_ids : device_ids, block_count);
  }
}

}  // namespace paddle_kv
