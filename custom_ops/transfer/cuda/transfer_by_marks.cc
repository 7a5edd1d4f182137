#include "paddle_kv/transfer/transfer_by_marks.h"

#include <algorithm>
#include <utility>

namespace paddle_kv {

TransferByMarks::TransferByMarks(const PaddleKvTransfer& given, const std::int64_t* start_events,
                                 std::shared_ptr<const TransferPlan> plan)
    : given_(given),
      plan_(std::move(plan)),
      device_ids_(given.device_ids, given.device_ids + given.block_count),
      host_ids_(given.host_ids, given.host_ids + given.block_count),
      layers_per_event_(std::min(given.layers_per_event, given.end_layer - given.first_layer)),
      marks_(given.wait_events, given.wait_events + (given.end_layer - given.first_layer)),
      layers_(marks_.size(), Layer::kUnmarked) {
  const std::size_t groups = (marks_.size() - 1) / layers_per_event_ + 1;
  start_events_.assign(start_events, start_events + groups);
  record_events_.assign(given.record_events, given.record_events + groups);
  enqueued_.reserve(groups);
  given_.device_ids = device_ids_.data();
  given_.host_ids = host_ids_.data();
}

std::int64_t TransferByMarks::EndOf(std::int64_t group) const { return std::min(FirstOf(group + 1), given_.end_layer); }

QueuedTransfer TransferByMarks::Group(std::int64_t group) const {
  PaddleKvTransfer part = given_;
  part.first_layer = FirstOf(group);
  part.end_layer = EndOf(group);
  const std::int64_t waits = part.end_layer - part.first_layer;
  part.wait_events = &marks_[part.first_layer - given_.first_layer];
  part.waits_per_group = &waits;
  part.start_event = start_events_[group];
  part.record_events = &record_events_[group];
  return QueuedTransfer(part, plan_);
}

bool TransferByMarks::BeginMark(std::int64_t layer) {
  Layer& state = layers_[layer - given_.first_layer];
  if (state != Layer::kUnmarked) return false;
  state = Layer::kBeingMarked;
  return true;
}

bool TransferByMarks::EndMark(std::int64_t layer, bool is_recorded) {
  layers_[layer - given_.first_layer] = is_recorded ? Layer::kMarked : Layer::kUnmarked;
  const std::int64_t group = GroupOf(layer);
  const auto first = layers_.begin() + (FirstOf(group) - given_.first_layer);
  const auto end = layers_.begin() + (EndOf(group) - given_.first_layer);
  return is_recorded && std::all_of(first, end, [](Layer state) { return state == Layer::kMarked; });
}

}  // namespace paddle_kv
