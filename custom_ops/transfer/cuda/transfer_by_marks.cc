#include "paddle_kv/transfer/transfer_by_marks.h"

#include <algorithm>
#include <new>
#include <utility>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/transfer/engine_events.cuh"
#include "paddle_kv/transfer/transfer_queue.h"

namespace paddle_kv {
namespace {

Status RecordMark(int device, std::int64_t event, std::int64_t stream) {
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  return ToStatus(cudaEventRecord(EventOf(event), reinterpret_cast<cudaStream_t>(stream)), "cudaEventRecord");
}

}  // namespace

TransferByMarks::TransferByMarks(const PaddleKvTransfer& given, const std::int64_t* start_events,
                                 std::shared_ptr<const TransferPlan> plan)
    : given_(given),
      plan_(std::move(plan)),
      pairs_(std::make_shared<TransferPairs>(given)),
      layers_per_event_(std::min(given.layers_per_event, given.end_layer - given.first_layer)),
      marks_(given.wait_events, given.wait_events + (given.end_layer - given.first_layer)),
      layers_(marks_.size(), Layer::kUnmarked) {
  const std::size_t groups = (marks_.size() - 1) / layers_per_event_ + 1;
  start_events_.assign(start_events, start_events + groups);
  record_events_.assign(given.record_events, given.record_events + groups);
  enqueued_.reserve(groups);
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
  return QueuedTransfer(part, plan_, pairs_);
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

// ---- in the queue ----
bool TransferQueue::SubmitByMarks(std::int64_t token, std::shared_ptr<TransferByMarks> transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (OpenStream(transfer->stream(), transfer->device()) == nullptr) return false;
  by_marks_[token] = std::move(transfer);
  return true;
}

Marked TransferQueue::Mark(std::int64_t token, std::int64_t layer, std::int64_t compute_stream, Status* status) {
  Lock lock(mutex_);
  const auto found = by_marks_.find(token);
  if (found == by_marks_.end() || found->second->is_ended || !found->second->HasLayer(layer)) return Marked::kNotKnown;
  const std::shared_ptr<TransferByMarks> transfer = found->second;
  if (!transfer->BeginMark(layer)) return Marked::kBefore;
  lock.unlock();
  *status = RecordMark(transfer->device(), transfer->MarkEvent(layer), compute_stream);
  lock.lock();
  if (!transfer->EndMark(layer, status->ok()) || transfer->is_ended) return Marked::kHere;
  lock.unlock();
  try {
    const std::int64_t group = transfer->GroupOf(layer);
    QueuedTransfer part = transfer->Group(group);
    EventStates::Entries entries = EventStates::EntriesOf(part.record_events);
    lock.lock();
    if (transfer->is_ended) return Marked::kHere;
    Stream* const stream = OpenStream(transfer->stream(), transfer->device());
    if (stream == nullptr) return Marked::kHere;  // it was closed: nobody waits for this
    Append(*stream, std::move(part), std::move(entries));
    transfer->NoteEnqueued(group);
    mark_seen_ = Clock::now();
    // To wake the thread costs more than all of this. It looks again by itself while marks come one after the other.
    if (!looks_soon_) work_.notify_one();
    return Marked::kHere;
  } catch (const std::bad_alloc&) {
    if (!lock.owns_lock()) lock.lock();
    transfer->is_ended = true;
    return Marked::kNotEnqueued;
  }
}

std::int64_t TransferQueue::TakeEnqueued(std::int64_t token, std::int64_t first, bool ends, std::int64_t* groups) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_marks_.find(token);
  if (found == by_marks_.end()) return 0;
  TransferByMarks& transfer = *found->second;
  const std::vector<std::int64_t>& enqueued = transfer.enqueued();
  const std::int64_t count = static_cast<std::int64_t>(enqueued.size()) - first;
  std::copy_n(enqueued.begin() + first, std::max<std::int64_t>(0, count), groups);
  if (ends || first + count == transfer.group_count()) {
    transfer.is_ended = true;  // for whoever is marking a layer
    by_marks_.erase(found);
  }
  return std::max<std::int64_t>(0, count);
}

}  // namespace paddle_kv
