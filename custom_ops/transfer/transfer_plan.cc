#include "paddle_kv/transfer/transfer_plan.h"

#include <map>
#include <mutex>
#include <utility>

#include "paddle_kv/common/fork_mutex.h"

namespace paddle_kv {
namespace {

using Plans = std::map<std::int64_t, std::shared_ptr<const TransferPlan>>;

// Calls come from several threads: Paddle releases the GIL while an operator runs. Never destroyed: a daemon thread may
// still call while the process ends.
ForkMutex& plans_mutex = *new ForkMutex;
Plans& plans = *new Plans;

}  // namespace

bool AddTransferPlan(std::int64_t number, std::shared_ptr<const TransferPlan> plan) {
  const std::lock_guard<ForkMutex> lock(plans_mutex);
  return plans.emplace(number, std::move(plan)).second;
}

std::shared_ptr<const TransferPlan> FindTransferPlan(std::int64_t number) {
  const std::lock_guard<ForkMutex> lock(plans_mutex);
  const auto found = plans.find(number);
  return found == plans.end() ? nullptr : found->second;
}

void RemoveTransferPlan(std::int64_t number) {
  const std::lock_guard<ForkMutex> lock(plans_mutex);
  plans.erase(number);
}

std::vector<BlockRows> RowsOfLayer(const TransferPlan& plan, std::int64_t layer, Direction direction) {
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
