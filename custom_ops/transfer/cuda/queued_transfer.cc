#include "paddle_kv/transfer/queued_transfer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "paddle_kv/transfer/host_rows.h"

namespace paddle_kv {
namespace {

// What an urgent transfer may find before it is what the copy engine has been given: 0.3 ms of the link a call. The
// others are kernels, which run beside each other, and their calls are worth more when they are long.
constexpr std::int64_t kCopyEngineBytes = 16 << 20;
constexpr std::int64_t kKernelBytes = 64 << 20;
constexpr std::int64_t kStagedSaveBytes = 14 << 20;            // two slots, but for what rows leave over in them
constexpr std::int64_t kKernelBytesBetweenCaches = 512 << 20;  // which take as long

bool IsStagedSave(EngineKind engine, Direction direction) {
  return engine == EngineKind::kStaging && direction == Direction::kDeviceToHost;
}

}  // namespace

QueuedTransfer::QueuedTransfer(const PaddleKvTransfer& given, std::shared_ptr<const TransferPlan> registered)
    : QueuedTransfer(given, std::move(registered), std::make_shared<TransferPairs>(given)) {}

QueuedTransfer::QueuedTransfer(const PaddleKvTransfer& given, std::shared_ptr<const TransferPlan> registered,
                               std::shared_ptr<TransferPairs> pairs)
    : token(given.token),
      plan(std::move(registered)),
      direction(static_cast<Direction>(given.direction)),
      engine(static_cast<EngineKind>(given.engine)),
      start_event(given.start_event),
      pairs_(std::move(pairs)),
      first_layer_(given.first_layer),
      end_layer_(given.end_layer),
      block_count_(given.block_count) {
  const std::int64_t layers = end_layer_ - first_layer_;
  // Whoever wants one event for all may name any number: arithmetic with that would overflow.
  layers_per_event = std::clamp<std::int64_t>(given.layers_per_event, 1, layers);
  const std::int64_t groups = (layers + layers_per_event - 1) / layers_per_event;
  first_wait.assign(groups + 1, 0);
  std::partial_sum(given.waits_per_group, given.waits_per_group + groups, first_wait.begin() + 1);
  wait_events.assign(given.wait_events, given.wait_events + first_wait.back());
  record_events.assign(given.record_events, given.record_events + groups);
  end_copied_ = groups;
  if (block_count_ > TransferPairs::kMostMergedLater) Prepare();
}

void QueuedTransfer::Prepare() {
  pairs_->Merge();
  // Groups that have to wait for something begin a band.
  std::int64_t waiting = 0;
  for (std::int64_t group = 1; group < group_count(); ++group) waiting += first_wait[group + 1] > first_wait[group];
  std::int64_t band = LayersOfRows(*plan, kStagedRowBytes[static_cast<int>(direction) % 2]);
  if (direction == Direction::kHostToDevice) {
    const std::int64_t layers = end_layer_ - first_layer_;
    band = std::min(band, std::max(LayersOfRows(*plan, kShortestLoadedRow), layers / kBandsOfLoad));
  }
  const std::int64_t wanted = (band + layers_per_event - 1) / layers_per_event;
  groups_per_band_ = std::min(wanted, (group_count() + waiting) / (1 + waiting));
  sizes_ = SizesOfPieces(*plan, direction, runs(), layers_per_band());
  for (std::int64_t t = 0; t < plan->tensors_per_layer; ++t) {
    layer_bytes_ += plan->tensors[t].block_bytes * block_count_;
  }
  is_prepared_ = true;
}

std::int64_t QueuedTransfer::FirstLayer(std::int64_t group) const {
  return std::min(first_layer_ + group * layers_per_event, end_layer_);
}

std::int64_t QueuedTransfer::GroupBytes(std::int64_t first_group, std::int64_t end_group) const {
  return (FirstLayer(end_group) - FirstLayer(first_group)) * layer_bytes_;
}

// How many blocks of what has `bytes` are the next part (one block at least); parts are about equal.
std::int64_t QueuedTransfer::BlocksOfPart(std::int64_t bytes, std::int64_t largest_bytes) const {
  const std::int64_t most = std::max<std::int64_t>(1, largest_bytes / (bytes / block_count_));
  const std::int64_t parts = (block_count_ + most - 1) / most;
  return std::min((block_count_ + parts - 1) / parts, block_count_ - submitted_blocks_);
}

bool QueuedTransfer::FollowsAtOnce(std::int64_t group) const {
  return group < end_copied_ && first_wait[group] == first_wait[group + 1];
}

std::int64_t QueuedTransfer::EndOfBand(std::int64_t group, EngineKind by) const {
  std::int64_t end = group + 1;
  if (by != EngineKind::kStaging) return end;
  while (end < group + groups_per_band_ && FollowsAtOnce(end)) ++end;
  return end;
}

std::int64_t QueuedTransfer::LargestBytes(EngineKind engine) const {
  if (engine == EngineKind::kCopyEngine) return kCopyEngineBytes;
  if (IsStagedSave(engine, direction)) return kStagedSaveBytes;
  return plan->inside_device ? kKernelBytesBetweenCaches : kKernelBytes;
}

std::int64_t QueuedTransfer::BytesBefore(EngineKind engine) const {
  // Two slots are left for the call.
  return IsStagedSave(engine, direction) ? (kStagingSlots - 2) * kLargestStagedRow + 1 : 2 * LargestBytes(engine);
}

std::int64_t QueuedTransfer::BytesInFlight(const Step& step) const {
  if (!IsStagedSave(step.engine, direction)) return step.bytes;
  return (step.bytes + kLargestStagedRow - 1) / kLargestStagedRow * kLargestStagedRow;  // each call begins with a slot
}

EngineKind QueuedTransfer::NextEngine(bool beside_compute, const EngineCosts& costs) const {
  if (more_follows_) return last_engine_;
  if (next_group < end_without_memory) return EngineKind::kCopyEngine;
  if (engine != EngineKind::kAuto) return engine;
  return plan->inside_device ? ChooseEngineBetweenCaches(sizes_, plan->on_other_gpu, beside_compute)
                             : ChooseEngine(sizes_, direction, beside_compute, costs);
}

Step QueuedTransfer::NextStep(EngineKind by, bool beside_compute) const {
  const std::int64_t largest = LargestBytes(by);
  Step step;
  step.first_group = next_group;
  step.end_group = EndOfBand(next_group, by);
  step.engine = by;
  step.beside_compute = beside_compute;
  step.bytes = GroupBytes(step.first_group, step.end_group);
  if (by != EngineKind::kKernel && step.bytes > largest) {
    step.blocks = BlocksOfPart(step.bytes, largest);
    step.begins = submitted_blocks_ == 0;
    step.ends = submitted_blocks_ + step.blocks == block_count_;
    step.bytes = step.bytes / block_count_ * step.blocks;
    step.more_follows = !step.ends || FollowsAtOnce(step.end_group);
    return step;
  }
  while ((step.more_follows = FollowsAtOnce(step.end_group))) {
    const std::int64_t end = EndOfBand(step.end_group, by);
    const std::int64_t bytes = GroupBytes(step.first_group, end);
    // Calls of kernels are worth more when they are long; what the other engines are given has a bound.
    if (by == EngineKind::kKernel ? step.bytes >= largest : bytes > largest) break;
    step.end_group = end;
    step.bytes = bytes;
  }
  return step;
}

Step QueuedTransfer::PassedOverStep() const {
  Step step;
  step.first_group = next_group;
  step.end_group = next_group + 1;
  step.engine = last_engine_;
  step.begins = submitted_blocks_ == 0;
  return step;
}

std::vector<Run> QueuedTransfer::TakePart(std::int64_t wanted) {
  std::vector<Run> part;
  while (wanted > 0) {
    const Run& run = runs()[next_run_];
    const std::int64_t length = std::min(wanted, run.length - next_in_run_);
    part.push_back({run.source + next_in_run_, run.target + next_in_run_, length});
    wanted -= length;
    next_in_run_ += length;
    if (next_in_run_ == run.length) {
      next_in_run_ = 0;
      next_run_ = (next_run_ + 1) % runs().size();  // the next group has the same blocks
    }
  }
  return part;
}

void QueuedTransfer::TakeAllAgain() {
  submitted_blocks_ = 0;
  next_run_ = 0;
  next_in_run_ = 0;
}

void QueuedTransfer::Advance(const Step& step) {
  next_group = step.RecordedEnd();
  submitted_blocks_ = step.ends ? 0 : submitted_blocks_ + step.blocks;
  more_follows_ = step.more_follows;
  last_engine_ = step.engine;
}

std::int64_t QueuedTransfer::Drop() {
  const std::int64_t first = std::max(end_given_, next_group);
  if (!failure.ok() || first >= end_copied_) return -1;
  end_copied_ = first;
  return FirstLayer(first);
}

}  // namespace paddle_kv
