#include "paddle_kv/transfer/transfer_pairs.h"

#include <utility>

#include "paddle_kv/transfer/engine.h"

namespace paddle_kv {

TransferPairs::TransferPairs(const PaddleKvTransfer& given)
    : host_ids_(given.host_ids, given.host_ids + given.block_count),
      device_ids_(given.device_ids, given.device_ids + given.block_count),
      is_save_(static_cast<Direction>(given.direction) == Direction::kDeviceToHost) {
  if (given.block_count > kMostMergedLater) Merge();
}

void TransferPairs::Merge() {
  if (is_merged_) return;
  runs_ = MergeRuns(host_ids_.data(), device_ids_.data(), static_cast<std::int64_t>(host_ids_.size()));
  host_ids_ = std::vector<std::int64_t>();  // `= {}` would keep the memory
  device_ids_ = std::vector<std::int64_t>();
  if (is_save_) {
    for (Run& run : runs_) std::swap(run.source, run.target);
  }
  is_merged_ = true;
}

}  // namespace paddle_kv
