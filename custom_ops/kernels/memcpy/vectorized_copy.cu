// Copies a list of pieces of memory.
//
// 1. The host cuts long pieces, so that each is work for one CTA and no piece has to be searched.
// 2. The warps of a CTA share its piece, in steps that keep all of them busy with short pieces too.
// 3. Each warp copies in the widest words on which its own two addresses agree.
// The list travels as kernel parameters where it fits, otherwise in a KernelTable.
#include "paddle_kv/memcpy/vectorized_copy.h"

#include <algorithm>
#include <vector>

#include "paddle_kv/common/copy_bytes.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/kernel_table.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr std::int64_t kPieceBytes = 32 << 10;
  static constexpr std::int64_t kStepBytes = 512;  // one 16-byte word for each lane
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kLargestGrid = (std::int64_t{1} << 31) - 1;
  static constexpr std::int64_t kHostLinkCtas =
      8;  // reaches the rate of the link; more only take bandwidth from a running model
};

constexpr int kWarpsPerCta = Tuning::kThreads / kWarpLanes;
constexpr int kInlinePieces = 160;

struct Launch {
  std::int64_t count;
  const CopyPair* pieces;  // null: they are here
  CopyPair inline_pieces[kInlinePieces];
};
static_assert(sizeof(Launch) <= 4096, "kernel parameters");

__device__ void CopyShare(const CopyPair& piece) {
  constexpr std::int64_t kStepsBytes = kWarpsPerCta * Tuning::kStepBytes;
  const std::int64_t share = (piece.bytes + kStepsBytes - 1) / kStepsBytes * Tuning::kStepBytes;
  const std::int64_t offset = threadIdx.x / kWarpLanes * share;
  if (offset < piece.bytes) {
    CopyBytesWithWarp(piece.source + offset, piece.target + offset, min(share, piece.bytes - offset),
                      threadIdx.x % kWarpLanes);
  }
}

// kFewCtas: the grid is smaller than the list. The next piece is read before the copy of this one, because the list may
// be in host memory.
template <bool kFewCtas>
__global__ void __launch_bounds__(Tuning::kThreads) CopyPieces(const __grid_constant__ Launch launch) {
  const CopyPair* pieces = launch.pieces != nullptr ? launch.pieces : launch.inline_pieces;
  std::int64_t i = blockIdx.x;
  CopyPair piece = pieces[i];
  if constexpr (kFewCtas) {
    for (; i + gridDim.x < launch.count; i += gridDim.x) {
      const CopyPair next = pieces[i + gridDim.x];
      CopyShare(piece);
      piece = next;
    }
  }
  CopyShare(piece);
}

std::vector<CopyPair> CutIntoPieces(const CopyPair* pairs, std::int64_t pair_count) {
  std::vector<CopyPair> pieces;
  pieces.reserve(pair_count);
  for (std::int64_t p = 0; p < pair_count; ++p) {
    const CopyPair& pair = pairs[p];
    for (std::int64_t offset = 0; offset < pair.bytes; offset += Tuning::kPieceBytes) {
      pieces.push_back(
          {pair.source + offset, pair.target + offset, std::min(Tuning::kPieceBytes, pair.bytes - offset)});
    }
  }
  return pieces;
}

}  // namespace

Status VectorizedCopyCuda(const CopyPair* pairs, std::int64_t pair_count, bool touches_host,
                          const DeviceStream& where) {
  if (pair_count == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  const std::vector<CopyPair> pieces = CutIntoPieces(pairs, pair_count);
  Launch launch;
  launch.count = static_cast<std::int64_t>(pieces.size());
  launch.pieces = nullptr;
  KernelTable table;
  if (launch.count <= kInlinePieces) {
    std::copy(pieces.begin(), pieces.end(), launch.inline_pieces);
  } else {
    PADDLE_KV_RETURN_IF_ERROR(table.Store(pieces, where));
    launch.pieces = table.rows<CopyPair>();
  }
  const std::int64_t grid = std::min(launch.count, touches_host ? Tuning::kHostLinkCtas : Tuning::kLargestGrid);
  const auto kernel = grid < launch.count ? CopyPieces<true> : CopyPieces<false>;
  kernel<<<grid, Tuning::kThreads, 0, StreamOf(where)>>>(launch);
  return LaunchStatus("CopyPieces");
}

}  // namespace paddle_kv
