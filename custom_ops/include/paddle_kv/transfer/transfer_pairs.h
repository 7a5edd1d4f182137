// The blocks that a transfer moves.
#pragma once

#include <cstdint>
#include <vector>

#include "paddle_kv/transfer/queue_api.h"
#include "paddle_kv/transfer/runs.h"

namespace paddle_kv {

// Groups of layers that are enqueued one by one share them: they are copied and merged once.
class TransferPairs {
 public:
  // More are merged at once; to leave that to another thread would hold up what others have submitted.
  static constexpr std::int64_t kMostMergedLater = 8192;  // of 0.1 us each

  explicit TransferPairs(const PaddleKvTransfer& given);

  // Again: does nothing. Not in two threads at once where it does something; throws std::bad_alloc.
  void Merge();
  // Sorted by host block; once they are merged.
  const std::vector<Run>& runs() const { return runs_; }

 private:
  std::vector<std::int64_t> host_ids_, device_ids_;  // until then
  bool is_save_, is_merged_ = false;
  std::vector<Run> runs_;
};

}  // namespace paddle_kv
