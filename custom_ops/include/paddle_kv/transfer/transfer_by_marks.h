// A transfer whose groups of layers are enqueued one by one, each when its layers have been marked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "paddle_kv/transfer/queue_api.h"
#include "paddle_kv/transfer/queued_transfer.h"
#include "paddle_kv/transfer/transfer_pairs.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

// What marks change is used under the queue's lock; the rest stays as it is.
class TransferByMarks {
 public:
  // The given arrays are copied, those of the blocks once for all groups. Each group waits for the marks of its layers,
  // and has a start event of its own.
  TransferByMarks(const PaddleKvTransfer& given, const std::int64_t* start_events,
                  std::shared_ptr<const TransferPlan> plan);

  int device() const { return plan_->device; }
  std::int64_t stream() const { return given_.stream; }
  std::int64_t group_count() const { return static_cast<std::int64_t>(start_events_.size()); }
  std::int64_t GroupOf(std::int64_t layer) const { return (layer - given_.first_layer) / layers_per_event_; }
  bool HasLayer(std::int64_t layer) const { return layer >= given_.first_layer && layer < given_.end_layer; }
  std::int64_t MarkEvent(std::int64_t layer) const { return marks_[layer - given_.first_layer]; }
  // As it is enqueued. Throws std::bad_alloc.
  QueuedTransfer Group(std::int64_t group) const;

  // False: somebody has marked the layer, or is about to.
  bool BeginMark(std::int64_t layer);
  // Whether the group of the layer is to be enqueued now, by whoever is told so.
  bool EndMark(std::int64_t layer, bool is_recorded);
  // Has room for all.
  void NoteEnqueued(std::int64_t group) { enqueued_.push_back(group); }
  const std::vector<std::int64_t>& enqueued() const { return enqueued_; }

  bool is_ended = false;  // nothing more of it is enqueued

 private:
  enum class Layer : char { kUnmarked, kBeingMarked, kMarked };
  std::int64_t FirstOf(std::int64_t group) const { return given_.first_layer + group * layers_per_event_; }
  std::int64_t EndOf(std::int64_t group) const;

  PaddleKvTransfer given_;  // but for its arrays
  const std::shared_ptr<const TransferPlan> plan_;
  const std::shared_ptr<TransferPairs> pairs_;
  const std::int64_t layers_per_event_;
  const std::vector<std::int64_t> marks_;  // an event for each layer
  std::vector<std::int64_t> start_events_, record_events_;
  std::vector<Layer> layers_;
  std::vector<std::int64_t> enqueued_;  // groups, in the order in which they were
};

}  // namespace paddle_kv
