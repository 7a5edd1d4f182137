#include "paddle_kv/swap/transfer_layers.h"

namespace paddle_kv {

void TransferLayersCpu(const TransferPlan& plan, Direction direction, const std::int64_t* device_ids,
                       const std::int64_t* host_ids, std::int64_t block_count, std::int64_t first_layer,
                       std::int64_t end_layer) {
  const bool to_host = direction == Direction::kDeviceToHost;
  for (std::int64_t layer = first_layer; layer < end_layer; ++layer) {
    const std::vector<BlockRows> rows = RowsOfLayer(plan, layer, direction);
    TransferBlocksCpu(rows.data(), plan.tensors_per_layer, to_host ? device_ids : host_ids,
                      to_host ? host_ids : device_ids, block_count);
  }
}

}  // namespace paddle_kv
