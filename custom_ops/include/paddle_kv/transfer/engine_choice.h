// Which engine moves a transfer: the one whose costs, summed over all pieces of the transfer, are least.
//
// Measured on an H200 (docs/performance.md): the copy engine hardly slows the model beside it, but each piece costs it
// some 0.3 to 0.9 us of a CPU core; the kernel takes the link to 92 % at any size, but products beside it take longer.
// Staging makes large pieces of what lies together on the host and apart on the device.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "paddle_kv/transfer/runs.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

enum class EngineKind { kAuto = 0, kCopyEngine = 1, kKernel = 2, kStaging = 3 };
constexpr int kEngineKinds = 4;

// What a MiB costs in pieces of 4, 8, ... 256 KiB, in nanoseconds: of the transfer, with nothing else running; beside
// compute of what the model loses, and a tenth of the transfer's. Of staging the pieces are those on the host.
struct EngineCosts {
  static constexpr int kSizes = 7;
  static constexpr std::int64_t kSmallestBytes = 4 << 10;
  using OfSizes = std::array<std::int64_t, kSizes>;
  struct Ways {
    OfSizes alone;
    OfSizes beside;
  };
  // The built-in ones were measured on an H200.
  Ways copy_engine[2] = {
      {{100000, 50000, 30000, 24000, 20000, 19500, 19000}, {40000, 16000, 7000, 2850, 2600, 2300, 2200}},
      {{430000, 300000, 190000, 24000, 20000, 19500, 19000}, {55000, 45000, 30000, 3300, 2600, 2300, 2200}}};
  Ways kernel[2] = {{{20600, 20400, 20200, 20200, 20200, 20200, 20200}, {5200, 5200, 5200, 5000, 5000, 5000, 5000}},
                    {{21000, 20800, 20600, 20600, 20600, 20600, 20600}, {6500, 6300, 6000, 5800, 5500, 5500, 5500}}};
  Ways staging[2] = {
      {{100000, 50000, 30000, 27500, 24500, 22000, 20100}, {42000, 18000, 8000, 3500, 2900, 2750, 2650}},
      {{430000, 300000, 190000, 27500, 24500, 22000, 19800}, {57000, 47000, 32000, 3600, 3000, 2700, 2650}}};
};

// Pieces of memory that are contiguous, by their size.
class Pieces {
 public:
  void Add(std::int64_t piece_bytes, std::int64_t count);
  std::int64_t Count() const;
  // On average, and nearly all bytes lie in pieces of that size: a few small ones make the average of many large ones
  // no smaller, but the copy engine may take longer for them than for all others.
  bool AreLarge(std::int64_t smallest_bytes) const;
  // Nanoseconds, of what a MiB costs in pieces of each size.
  double Cost(const EngineCosts::OfSizes& ns_per_mib) const;
  // The same where no piece below so many bytes costs less than `least_ns`.
  double CostWithLeast(const EngineCosts::OfSizes& ns_per_mib, std::int64_t below_bytes, double least_ns) const;

 private:
  std::map<std::int64_t, std::int64_t> counts_;  // by size
};

// Of one layer, or of the layers of a band.
struct PieceSizes {
  Pieces both;  // of what is contiguous on both sides
  Pieces host;  // of what staging copies at once
  std::int64_t blocks = 0;
};

// `runs` are sorted by host block.
PieceSizes SizesOfPieces(const TransferPlan& plan, Direction direction, const std::vector<Run>& runs,
                         std::int64_t layers_per_band);

EngineKind ChooseEngine(const PieceSizes& sizes, Direction direction, bool beside_compute, const EngineCosts& costs);

// The same where both sides lie on GPUs.
EngineKind ChooseEngineBetweenCaches(const PieceSizes& sizes, bool on_other_gpu, bool beside_compute);

}  // namespace paddle_kv
