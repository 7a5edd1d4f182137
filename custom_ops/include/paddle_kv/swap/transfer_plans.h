// The pairs of pools that transfers name by a number, because a list of 160 tensors costs 160 us a call.
#pragma once

#include <cstdint>
#include <memory>

#include "paddle_kv/swap/transfer_layers.h"

namespace paddle_kv {

// False: the number is taken.
bool AddTransferPlan(std::int64_t number, std::shared_ptr<const TransferPlan> plan);

// Null: there is none.
std::shared_ptr<const TransferPlan> FindTransferPlan(std::int64_t number);

void RemoveTransferPlan(std::int64_t number);

}  // namespace paddle_kv
