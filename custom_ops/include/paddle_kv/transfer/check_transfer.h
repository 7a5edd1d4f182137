#pragma once

#include <cstdint>
#include <string>

#include "paddle_kv/transfer/queue_api.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

// What is wrong with a transfer that somebody has put together: argument, value and what is legal. Empty: nothing that
// can be seen.
std::string WhatIsWrong(const PaddleKvTransfer& given, const TransferPlan& plan);
std::string WhatIsWrongByMarks(const PaddleKvTransfer& given, const std::int64_t* start_events,
                               const TransferPlan& plan);

}  // namespace paddle_kv
