// Which engine moves a transfer.
//
// Measured on an H200 (docs/performance.md): the copy engine hardly slows the model beside it, but each piece costs it
// some 0.3 to 0.9 us of a CPU core; the kernel takes the link to 92 % at any size, but products beside it take longer.
// Staging makes large pieces where the host side is contiguous and the device side is not.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "paddle_kv/transfer/runs.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

enum class EngineKind { kAuto = 0, kCopyEngine = 1, kKernel = 2, kStaging = 3 };
constexpr int kEngineKinds = 4;

// Smallest sizes in bytes, [device to host, host to device][alone, beside compute].
struct EngineThresholds {
  std::int64_t copy_engine[2][2] = {{65536, 24576}, {65536, 28672}};  // of a piece that is contiguous on both sides
  std::int64_t staging[2][2] = {{262144, 262144}, {262144, 262144}};  // on average, of what is contiguous on the host
  std::int64_t staging_block = 8192;                                  // of one block of a tensor, to be staged at all
  // Batches of loads reach a tenth of the link where a piece has 4 to 28 KiB: never less for a load, whatever was
  // measured, since the driver decides.
  std::int64_t smallest_load = 28672;
};

// Pieces of memory that are contiguous, by their size.
class Pieces {
 public:
  void Add(std::int64_t piece_bytes, std::int64_t count);
  std::int64_t AverageBytes() const;
  // On average, and nearly all bytes lie in pieces of that size: a few small ones make the average of many large ones
  // no smaller, but the copy engine may take longer for them than for all others.
  bool AreLarge(std::int64_t smallest_bytes) const;

 private:
  std::map<std::int64_t, std::int64_t> counts_;  // by size
};

struct PieceSizes {
  Pieces both;             // of what is contiguous on both sides
  Pieces host;             // of what is contiguous on the host
  std::int64_t block = 0;  // average bytes of one block of one tensor
};

// `runs` are sorted by host block.
PieceSizes SizesOfPieces(const TransferPlan& plan, Direction direction, const std::vector<Run>& runs);

EngineKind ChooseEngine(const PieceSizes& sizes, Direction direction, bool beside_compute,
                        const EngineThresholds& thresholds);

// The same where both sides lie on GPUs.
EngineKind ChooseEngineBetweenCaches(const PieceSizes& sizes, bool on_other_gpu, bool beside_compute);

}  // namespace paddle_kv
