#include "paddle_kv/transfer/check_transfer.h"

#include <algorithm>
#include <cstdint>

#include "paddle_kv/transfer/engine_choice.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kMostWaits = 1 << 24;  // of a transfer: far more than there are events

std::string Outside(const std::string& name, std::int64_t value, std::int64_t first, std::int64_t last) {
  return name + " = " + std::to_string(value) + " is not in [" + std::to_string(first) + ", " + std::to_string(last) +
         "]";
}

std::string CheckIds(const std::int64_t* ids, std::int64_t count, const char* name, std::int64_t blocks) {
  if (count > 0 && ids == nullptr) return std::string(name) + " is null";
  for (std::int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= blocks) {
      return Outside(std::string(name) + "[" + std::to_string(i) + "]", ids[i], 0, blocks - 1);
    }
  }
  return {};
}

std::string CheckEvents(const std::int64_t* events, std::int64_t count, const char* name) {
  if (count > 0 && events == nullptr) return std::string(name) + " is null";
  const std::int64_t* const none = std::find(events, events + count, 0);
  return none == events + count ? std::string()
                                : std::string(name) + "[" + std::to_string(none - events) + "] is no event";
}

}  // namespace

std::string WhatIsWrong(const PaddleKvTransfer& given, const TransferPlan& plan) {
  if (plan.device < 0) return "plan = " + std::to_string(given.plan) + " has its device cache in RAM";
  if (given.direction < 0 || given.direction > 1) return Outside("direction", given.direction, 0, 1);
  if (given.engine < 0 || given.engine >= kEngineKinds) return Outside("engine", given.engine, 0, kEngineKinds - 1);
  if (given.first_layer < 0 || given.first_layer > plan.layer_count) {
    return Outside("first_layer", given.first_layer, 0, plan.layer_count);
  }
  if (given.end_layer < given.first_layer || given.end_layer > plan.layer_count) {
    return Outside("end_layer", given.end_layer, given.first_layer, plan.layer_count);
  }
  if (given.layers_per_event < 1) return Outside("layers_per_event", given.layers_per_event, 1, INT64_MAX);
  const std::int64_t most_blocks = std::max(plan.device_blocks, plan.host_blocks);
  if (given.block_count < 0 || given.block_count > most_blocks) {
    return Outside("block_count", given.block_count, 0, most_blocks);
  }
  for (const std::string& wrong : {CheckIds(given.device_ids, given.block_count, "device_ids", plan.device_blocks),
                                   CheckIds(given.host_ids, given.block_count, "host_ids", plan.host_blocks)}) {
    if (!wrong.empty()) return wrong;
  }
  const std::int64_t layers = given.end_layer - given.first_layer;
  if (layers == 0) return {};
  const std::int64_t groups = (layers - 1) / given.layers_per_event + 1;
  if (given.waits_per_group == nullptr) return "waits_per_group is null";
  std::int64_t waits = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t count = given.waits_per_group[g];
    if (count < 0 || count > kMostWaits - waits) {
      return Outside("waits_per_group[" + std::to_string(g) + "]", count, 0, kMostWaits - waits);
    }
    waits += count;
  }
  for (const std::string& wrong :
       {CheckEvents(given.wait_events, waits, "wait_events"), CheckEvents(given.record_events, groups, "record_events"),
        CheckEvents(&given.start_event, 1, "start_event")}) {
    if (!wrong.empty()) return wrong;
  }
  return {};
}

std::string WhatIsWrongByMarks(const PaddleKvTransfer& given, const std::int64_t* start_events,
                               const TransferPlan& plan) {
  PaddleKvTransfer without_layers = given;
  without_layers.end_layer = given.first_layer;
  const std::string wrong = WhatIsWrong(without_layers, plan);
  if (!wrong.empty()) return wrong;
  if (given.end_layer <= given.first_layer || given.end_layer > plan.layer_count) {
    return Outside("end_layer", given.end_layer, given.first_layer + 1, plan.layer_count);
  }
  const std::int64_t layers = given.end_layer - given.first_layer;
  const std::int64_t groups = (layers - 1) / given.layers_per_event + 1;
  for (const std::string& found :
       {CheckEvents(given.wait_events, layers, "wait_events"),
        CheckEvents(given.record_events, groups, "record_events"), CheckEvents(start_events, groups, "start_events")}) {
    if (!found.empty()) return found;
  }
  return {};
}

}  // namespace paddle_kv
