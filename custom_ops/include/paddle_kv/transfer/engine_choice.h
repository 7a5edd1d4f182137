// Which engine moves a transfer.
//
// Measured on an H200 (docs/performance.md): the copy engine hardly slows the model beside it, but each piece costs it
// some 0.3 to 0.9 us of a CPU core; the kernel takes the link to 92 % at any size, but products beside it take longer.
// Staging makes large pieces where the host side is contiguous and the device side is not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "paddle_kv/transfer/runs.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

enum class EngineKind { kAuto = 0, kCopyEngine = 1, kKernel = 2, kStaging = 3 };
constexpr int kEngineKinds = 4;

// Smallest average sizes in bytes, [device to host, host to device][alone, beside compute].
struct EngineThresholds {
  std::int64_t copy_engine[2][2] = {{65536, 24576}, {65536, 24576}};  // of a piece that is contiguous on both sides
  std::int64_t staging[2][2] = {{262144, 262144}, {262144, 262144}};  // of a piece that is contiguous on the host
  std::int64_t staging_block = 8192;                                  // of one block of a tensor, to be staged at all
};

struct PieceSizes {
  std::int64_t both;   // average bytes of what is contiguous on both sides
  std::int64_t host;   // average bytes of what is contiguous on the host
  std::int64_t block;  // average bytes of one block of one tensor
};

// `runs` are sorted by host block.
inline PieceSizes SizesOfPieces(const TransferPlan& plan, Direction direction, const std::vector<Run>& runs) {
  const bool to_host = direction == Direction::kDeviceToHost;
  std::int64_t blocks = 0;
  std::int64_t host_runs = 0;
  std::int64_t host_end = -1;
  for (const Run& run : runs) {
    const std::int64_t host = to_host ? run.target : run.source;
    if (host != host_end) ++host_runs;
    host_end = host + run.length;
    blocks += run.length;
  }
  std::int64_t bytes = 0;
  std::int64_t pieces_both = 0;
  std::int64_t pieces_host = 0;
  for (std::int64_t t = 0; t < plan.tensors_per_layer; ++t) {  // the layers are alike
    const LayerTensor& tensor = plan.tensors[t];
    const bool host_dense = tensor.host_stride == tensor.block_bytes;
    bytes += blocks * tensor.block_bytes;
    pieces_both += host_dense && tensor.device_stride == tensor.block_bytes ? runs.size() : blocks;
    pieces_host += host_dense ? host_runs : blocks;
  }
  const auto average = [&](std::int64_t pieces) { return bytes / std::max<std::int64_t>(1, pieces); };
  return {average(pieces_both), average(pieces_host), average(blocks * plan.tensors_per_layer)};
}

inline EngineKind ChooseEngine(const PieceSizes& sizes, Direction direction, bool beside_compute,
                               const EngineThresholds& thresholds) {
  const auto& copy_engine = thresholds.copy_engine[static_cast<int>(direction)];
  const auto& staging = thresholds.staging[static_cast<int>(direction)];
  if (sizes.both >= std::max(copy_engine[false], copy_engine[beside_compute])) return EngineKind::kCopyEngine;
  const bool longer = sizes.host > sizes.both;  // nothing is gained by staging what is contiguous on both sides
  if (longer && sizes.host >= staging[beside_compute] && sizes.block >= thresholds.staging_block) {
    return EngineKind::kStaging;
  }
  // Not as fast, but the model hardly notices.
  if (beside_compute && sizes.both >= copy_engine[true]) return EngineKind::kCopyEngine;
  return EngineKind::kKernel;
}

}  // namespace paddle_kv
