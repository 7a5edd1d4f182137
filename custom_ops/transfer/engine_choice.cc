#include "paddle_kv/transfer/engine_choice.h"

#include <algorithm>

#include "paddle_kv/transfer/host_rows.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kShareOfSmall = 32;  // one of so many bytes may lie in smaller pieces
// Between caches on GPUs, by bytes of a piece, [to another GPU][beside compute]. A piece costs the copy engine 0.6 us,
// or 2 us inside a GPU, in which a kernel moves megabytes. But the model hardly notices, and a kernel beside it is
// narrow.
constexpr std::int64_t kCopyEngineBetweenCaches[2][2] = {{64 << 20, 256 << 10}, {8 << 20, 24 << 10}};
constexpr double kMiB = 1 << 20;

// Batches of loads reach a tenth of the link where a piece has 4 to 28 KiB, whatever was measured: the driver decides.
constexpr std::int64_t kSmallestBatchedLoad = 28 << 10;
constexpr double kSmallLoadNs = 3000;
constexpr double kShareBeside = 0.1;  // of a transfer's time, beside compute
// Of a scatter or a gather, for a block of a tensor; the copy engine works meanwhile.
constexpr double kScatterNs = 20;

// What a piece costs, between the sizes that were measured. Below the smallest a piece costs as if its bytes and a time
// of its own made up all costs; above the largest, by its bytes.
double CostOfPiece(const EngineCosts::OfSizes& ns_per_mib, std::int64_t bytes) {
  constexpr std::int64_t kSmallest = EngineCosts::kSmallestBytes;
  const auto measured = [&](int size) { return ns_per_mib[size] * static_cast<double>(kSmallest << size) / kMiB; };
  int above = 1;
  while (above < EngineCosts::kSizes - 1 && (kSmallest << above) < bytes) ++above;
  const std::int64_t upper = kSmallest << above;
  if (bytes >= upper) return measured(above) * bytes / upper;
  const std::int64_t lower = upper / 2;
  const double cost = measured(above) - (measured(above) - measured(above - 1)) * (upper - bytes) / (upper - lower);
  return bytes >= lower ? cost : std::clamp(cost, measured(0) * bytes / lower, measured(0));
}

}  // namespace

void Pieces::Add(std::int64_t piece_bytes, std::int64_t count) {
  if (piece_bytes > 0 && count > 0) counts_[piece_bytes] += count;
}

std::int64_t Pieces::Count() const {
  std::int64_t pieces = 0;
  for (const auto& [size, count] : counts_) pieces += count;
  return pieces;
}

bool Pieces::AreLarge(std::int64_t smallest_bytes) const {
  std::int64_t bytes = 0;
  std::int64_t small_bytes = 0;
  for (const auto& [size, count] : counts_) {
    bytes += size * count;
    if (size < smallest_bytes) small_bytes += size * count;
  }
  return small_bytes <= bytes / kShareOfSmall && bytes >= smallest_bytes * std::max<std::int64_t>(1, Count());
}

double Pieces::CostWithLeast(const EngineCosts::OfSizes& ns_per_mib, std::int64_t below_bytes, double least_ns) const {
  double cost = 0;
  for (const auto& [size, count] : counts_) {
    const double of_piece = CostOfPiece(ns_per_mib, size);
    cost += count * (size < below_bytes ? std::max(of_piece, least_ns) : of_piece);
  }
  return cost;
}

double Pieces::Cost(const EngineCosts::OfSizes& ns_per_mib) const { return CostWithLeast(ns_per_mib, 0, 0); }

PieceSizes SizesOfPieces(const TransferPlan& plan, Direction direction, const std::vector<Run>& runs,
                         std::int64_t layers_per_band) {
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
  const auto add = [&](Pieces* pieces, const std::map<std::int64_t, std::int64_t>& counts, std::int64_t bytes,
                       std::int64_t times, bool is_dense) {
    if (!is_dense) pieces->Add(bytes, blocks * times);
    for (const auto& [length, count] : counts) {
      if (is_dense) pieces->Add(length * bytes, count * times);
    }
  };
  PieceSizes sizes;
  const std::int64_t layers = std::min(layers_per_band, plan.layer_count);
  for (std::int64_t t = 0; t < plan.tensors_per_layer; ++t) {  // the layers are alike
    const LayerTensor& tensor = plan.tensors[t];
    const bool is_dense = tensor.host_stride == tensor.block_bytes && tensor.device_stride == tensor.block_bytes;
    add(&sizes.both, runs_of_length, tensor.block_bytes, layers, is_dense);
  }
  for (const HostRow& row : HostRows(plan, 0, layers, kLargestStagedRow)) {
    add(&sizes.host, host_runs_of_length, row.bytes, 1, row.IsDense());
    sizes.blocks += blocks * static_cast<std::int64_t>(row.tensors.size());
  }
  return sizes;
}

EngineKind ChooseEngine(const PieceSizes& sizes, Direction direction, bool beside_compute, const EngineCosts& costs) {
  const auto of = [&](const EngineCosts::Ways(&ways)[2]) -> const EngineCosts::OfSizes& {
    const EngineCosts::Ways& way = ways[static_cast<int>(direction)];
    return beside_compute ? way.beside : way.alone;
  };
  const double share = beside_compute ? kShareBeside : 1.0;
  const std::int64_t batched = direction == Direction::kHostToDevice ? kSmallestBatchedLoad : 0;
  const double copy_engine = sizes.both.CostWithLeast(of(costs.copy_engine), batched, share * kSmallLoadNs);
  const double staging = std::max(sizes.host.CostWithLeast(of(costs.staging), batched, share * kSmallLoadNs),
                                  static_cast<double>(sizes.blocks) * share * kScatterNs);
  const double kernel = sizes.both.Cost(of(costs.kernel));
  if (copy_engine <= std::min(staging, kernel)) return EngineKind::kCopyEngine;
  return staging < kernel ? EngineKind::kStaging : EngineKind::kKernel;
}

EngineKind ChooseEngineBetweenCaches(const PieceSizes& sizes, bool on_other_gpu, bool beside_compute) {
  const bool are_large = sizes.both.AreLarge(kCopyEngineBetweenCaches[on_other_gpu][beside_compute]);
  return are_large ? EngineKind::kCopyEngine : EngineKind::kKernel;
}

}  // namespace paddle_kv
