#include "paddle_kv/swap/transfer_plans.h"

#include <map>
#include <mutex>
#include <utility>

namespace paddle_kv {
namespace {

using Plans = std::map<std::int64_t, std::shared_ptr<const TransferPlan>>;

// Calls come from several threads: Paddle releases the GIL while an operator runs. Never destroyed: a daemon thread may
// still call while the process ends.
std::mutex plans_mutex;
Plans& plans = *new Plans;

}  // namespace

bool AddTransferPlan(std::int64_t number, std::shared_ptr<const TransferPlan> plan) {
  const std::lock_guard<std::mutex> lock(plans_mutex);
  return plans.emplace(number, std::move(plan)).second;
}

std::shared_ptr<const TransferPlan> FindTransferPlan(std::int64_t number) {
  const std::lock_guard<std::mutex> lock(plans_mutex);
  const auto found = plans.find(number);
  return found == plans.end() ? nullptr : found->second;
}

void RemoveTransferPlan(std::int64_t number) {
  const std::lock_guard<std::mutex> lock(plans_mutex);
  plans.erase(number);
}

}  // namespace paddle_kv
