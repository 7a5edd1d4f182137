// A transfer in the queue: how far it is, and what of it goes to an engine next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "paddle_kv/common/status.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/engine_choice.h"
#include "paddle_kv/transfer/queue_api.h"
#include "paddle_kv/transfer/transfer_pairs.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

// Groups of a transfer that go to an engine in one call, or a part of their blocks.
struct Step {
  std::int64_t first_group = 0;
  std::int64_t end_group = 0;
  std::int64_t bytes = 0;
  EngineKind engine{};
  std::int64_t blocks = 0;    // of each of the groups: a part; 0: all of them
  bool begins = true;         // nothing of the groups has been submitted before
  bool ends = true;           // nothing of them is left: their events can be recorded
  bool more_follows = false;  // the next step on the stream is of the same transfer and engine, and waits for nothing
  bool beside_compute = false;

  // The end of the groups whose events are recorded behind this step.
  std::int64_t RecordedEnd() const { return ends ? end_group : first_group; }
};

class QueuedTransfer {
 public:
  // Somebody waits for it. Few blocks are left to Prepare, which has to come before anything of it is copied; many
  // would hold up what others have submitted for longer than its own caller minds.
  QueuedTransfer(const PaddleKvTransfer& given, std::shared_ptr<const TransferPlan> registered);
  // The same of blocks that are given already.
  QueuedTransfer(const PaddleKvTransfer& given, std::shared_ptr<const TransferPlan> registered,
                 std::shared_ptr<TransferPairs> pairs);

  // Touches nothing that Drop does. Throws std::bad_alloc.
  void Prepare();
  bool is_prepared() const { return is_prepared_; }
  // Sorted by host block; once it is prepared.
  const std::vector<Run>& runs() const { return pairs_->runs(); }

  std::int64_t group_count() const { return static_cast<std::int64_t>(record_events.size()); }
  std::int64_t FirstLayer(std::int64_t group) const;

  // What is next, for the engine that NextEngine has named.
  EngineKind NextEngine(bool beside_compute, const EngineCosts& costs) const;
  Step NextStep(EngineKind engine, bool beside_compute) const;
  // Whether the next group is copied, if nothing fails.
  bool IsCopied() const { return failure.ok() && next_group < end_copied_; }
  // Whether the next group has the last layer of the cache.
  bool IsAtLastLayer() const { return FirstLayer(next_group + 1) == plan->layer_count; }
  // The next group alone, of which nothing is copied (any more).
  Step PassedOverStep() const;
  // The next `wanted` blocks of the next groups.
  std::vector<Run> TakePart(std::int64_t wanted);
  // No blocks of the next groups count as submitted.
  void TakeAllAgain();
  // The step is the engine's from here on, though it may take it in several calls; and when that was submitted, or
  // passed over.
  void Begin(const Step& step) { end_given_ = std::max(end_given_, step.RecordedEnd()); }
  void Advance(const Step& step);
  // Whatever no engine was given is not copied: the first layer of that, -1: there is none.
  std::int64_t Drop();

  // Layers that staging moves together.
  std::int64_t layers_per_band() const { return groups_per_band_ * layers_per_event; }

  // How many bytes an engine is given in one call.
  std::int64_t LargestBytes(EngineKind engine) const;
  // Fewer than so many are in flight before it is given another one, and what a step counts for among them.
  std::int64_t BytesBefore(EngineKind engine) const;
  std::int64_t BytesInFlight(const Step& step) const;

  std::int64_t number = 0;  // in the order of the calls
  std::int64_t token;
  std::shared_ptr<const TransferPlan> plan;
  Direction direction;
  EngineKind engine;
  std::int64_t layers_per_event;
  std::vector<std::int64_t> wait_events;
  std::vector<std::int64_t> first_wait;  // of each group, and the end
  std::int64_t start_event;
  std::vector<std::int64_t> record_events;
  std::int64_t next_group = 0;
  std::int64_t end_without_memory = 0;  // of the groups for which another engine than the copy engine found no memory
  Status failure;                       // of a step: no later group is copied

 private:
  std::int64_t GroupBytes(std::int64_t first_group, std::int64_t end_group) const;
  std::int64_t BlocksOfPart(std::int64_t bytes, std::int64_t largest_bytes) const;
  bool FollowsAtOnce(std::int64_t group) const;
  // Of the groups from this one on that an engine moves together.
  std::int64_t EndOfBand(std::int64_t group, EngineKind by) const;

  bool is_prepared_ = false;
  std::shared_ptr<TransferPairs> pairs_;
  PieceSizes sizes_;
  std::int64_t first_layer_;
  std::int64_t end_layer_;
  std::int64_t layer_bytes_ = 0;
  std::int64_t block_count_;
  std::int64_t groups_per_band_ = 1;
  std::int64_t submitted_blocks_ = 0;  // of the next group, or of the next band
  std::size_t next_run_ = 0;           // with the first block of it that is not
  std::int64_t next_in_run_ = 0;
  std::int64_t end_given_ = 0;  // of the groups that are an engine's
  std::int64_t end_copied_;     // of the groups that are or will be copied
  bool more_follows_ = false;   // as the last step has told its engine
  EngineKind last_engine_{};
};

}  // namespace paddle_kv
