// Plans of which both sides lie on GPUs.
#pragma once

#include <memory>
#include <string>

#include "paddle_kv/transfer/queue_api.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

// What is wrong with it, or nothing and the plan.
std::string MakeDevicePlan(const PaddleKvDevicePlan& given, std::shared_ptr<TransferPlan>* plan);

}  // namespace paddle_kv
