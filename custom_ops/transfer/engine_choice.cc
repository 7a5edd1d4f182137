#include "paddle_kv/transfer/engine_choice.h"

#include <algorithm>

namespace paddle_kv {
namespace {

constexpr std::int64_t kShareOfSmall = 32;  // one of so many bytes may lie in smaller pieces
// Between caches on GPUs, by bytes of a piece, [to another GPU][beside compute]. A piece costs the copy engine 0.6 us,
// or 2 us inside a GPU, in which a kernel moves megabytes. But the model hardly notices, and a kernel beside it is
// narrow.
constexpr std::int64_t kCopyEngineBetweenCaches[2][2] = {{64 << 20, 256 << 10}, {8 << 20, 24 << 10}};

}  // namespace

void Pieces::Add(std::int64_t piece_bytes, std::int64_t count) {
  if (piece_bytes > 0 && count > 0) counts_[piece_bytes] += count;
}

std::int64_t Pieces::AverageBytes() const {
  std::int64_t bytes = 0;
  std::int64_t pieces = 0;
  for (const auto& [size, count] : counts_) {
    bytes += size * count;
    pieces += count;
  }
  return bytes / std::max<std::int64_t>(1, pieces);
}

bool Pieces::AreLarge(std::int64_t smallest_bytes) const {
  std::int64_t bytes = 0;
  std::int64_t small_bytes = 0;
  for (const auto& [size, count] : counts_) {
    bytes += size * count;
    if (size < smallest_bytes) small_bytes += size * count;
  }
  return small_bytes <= bytes / kShareOfSmall && AverageBytes() >= smallest_bytes;
}

PieceSizes SizesOfPieces(const TransferPlan& plan, Direction direction, const std::vector<Run>& runs) {
  const bool to_host = direction == Direction::kDeviceToHost;
  std::int64_t blocks = 0;
  std::map<std::int64_t, std::int64_t> runs_of_length;
  std::map<std::int64_t, std::int64_t> host_runs_of_length;
  std::int64_t host_end = -1;
  std::int64_t host_length = 0;
  for (const Run& run : runs) {
    const std::int64_t host = to_host ? run.target : run.source;
    if (host != host_end) {
      ++host_runs_of_length[host_length];  // the first time of none
      host_length = 0;
    }
    host_end = host + run.length;
    host_length += run.length;
    ++runs_of_length[run.length];
    blocks += run.length;
  }
  ++host_runs_of_length[host_length];
  PieceSizes sizes;
  std::int64_t block_bytes = 0;
  for (std::int64_t t = 0; t < plan.tensors_per_layer; ++t) {  // the layers are alike
    const LayerTensor& tensor = plan.tensors[t];
    const auto add = [&](Pieces* pieces, const std::map<std::int64_t, std::int64_t>& counts, bool is_dense) {
      if (!is_dense) pieces->Add(tensor.block_bytes, blocks);
      for (const auto& [length, count] : counts) {
        if (is_dense) pieces->Add(length * tensor.block_bytes, count);
      }
    };
    const bool is_host_dense = tensor.host_stride == tensor.block_bytes;
    add(&sizes.both, runs_of_length, is_host_dense && tensor.device_stride == tensor.block_bytes);
    add(&sizes.host, host_runs_of_length, is_host_dense);
    block_bytes += tensor.block_bytes;
  }
  sizes.block = block_bytes / std::max<std::int64_t>(1, plan.tensors_per_layer);
  return sizes;
}

EngineKind ChooseEngine(const PieceSizes& sizes, Direction direction, bool beside_compute,
                        const EngineThresholds& thresholds) {
  const auto* copy_engine = thresholds.copy_engine[static_cast<int>(direction)];
  const auto* staging = thresholds.staging[static_cast<int>(direction)];
  const std::int64_t smallest = direction == Direction::kHostToDevice ? thresholds.smallest_load : 0;
  if (sizes.both.AreLarge(std::max({copy_engine[false], copy_engine[beside_compute], smallest}))) {
    return EngineKind::kCopyEngine;
  }
  // Nothing is gained by staging what is contiguous on both sides.
  const std::int64_t host_bytes = sizes.host.AverageBytes();
  const bool is_longer = host_bytes > sizes.both.AverageBytes();
  if (is_longer && host_bytes >= staging[beside_compute] && sizes.block >= thresholds.staging_block) {
    return EngineKind::kStaging;
  }
  // Not as fast, but the model hardly notices.
  if (beside_compute && sizes.both.AreLarge(std::max(copy_engine[true], smallest))) return EngineKind::kCopyEngine;
  return EngineKind::kKernel;
}

EngineKind ChooseEngineBetweenCaches(const PieceSizes& sizes, bool on_other_gpu, bool beside_compute) {
  const bool are_large = sizes.both.AreLarge(kCopyEngineBetweenCaches[on_other_gpu][beside_compute]);
  return are_large ? EngineKind::kCopyEngine : EngineKind::kKernel;
}

}  // namespace paddle_kv
