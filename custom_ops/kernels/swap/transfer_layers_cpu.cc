#include "paddle_kv/swap/transfer_layers.h"

#include <vector>

#include "paddle_kv/swap/transfer_blocks.h"

namespace paddle_kv {

void TransferLayersCpu(const TransferPlan& plan, Direction direction, const std::int64_t* device_ids,
                       const std::int64_t* host_ids, std::int64_t block_count, std::int64_t first_layer,
                       std::int64_t end_layer) {
  const bool to_host = direction == Direction::kDeviceToHost;
  std::vector<BlockRows> rows;
  for (std::int64_t layer = first_layer; layer < end_layer; ++layer) {
    const std::vector<BlockRows> of_layer = RowsOfLayer(plan, layer, direction);
    rows.insert(rows.end(), of_layer.begin(), of_layer.end());
  }
  TransferBlocksCpu(rows.data(), static_cast<std::int64_t>(rows.size()), to_host ? device_ids : host_ids,
                    to_host ? host_ids : device_ids, block_count);
}

}  // namespace paddle_kv
