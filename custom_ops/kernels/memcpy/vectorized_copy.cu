// Copies a list of pieces of memory.
//
// 1. The host cuts long pieces, so that each is work for one warp and no warp has to search.
// 2. A warp copies its piece in the widest words on which its own two addresses agree.
// 3. Inside the device there is a warp for each piece. Copies over the link get few CTAs, which walk over the list.
// The list travels as kernel parameters where it fits, otherwise in a KernelTable.
#include "paddle_kv/memcpy/vectorized_copy.h"

#include <algorithm>
#include <vector>

#include "paddle_kv/common/copy_bytes.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/kernel_parameters.cuh"
#include "paddle_kv/common/kernel_table.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr std::int64_t kMostPieceBytes = 8 << 10;
  static constexpr std::int64_t kFewestPieceBytes = 2 << 10;
  static constexpr std::int64_t kBusyWarps = 4096;  // enough for the memory; shorter lists are cut finer
  static constexpr int kThreads = 256;
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
static_assert(sizeof(Launch) <= kSmallParameterBytes);

__device__ void Copy(const CopyPair& piece) {
  CopyBytesWithWarp(piece.source, piece.target, piece.bytes, threadIdx.x % kWarpLanes);
}

// kFewCtas: the grid is smaller than the list. The next piece is read before the copy of this one.
template <bool kFewCtas>
__global__ void __launch_bounds__(Tuning::kThreads) CopyPieces(const __grid_constant__ Launch launch) {
  const CopyPair* pieces = launch.pieces != nullptr ? launch.pieces : launch.inline_pieces;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerCta + threadIdx.x / kWarpLanes;
  if (i >= launch.count) return;
  CopyPair piece = pieces[i];
  if constexpr (kFewCtas) {
    const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarpsPerCta;
    for (; i + warps < launch.count; i += warps) {
      const CopyPair next = pieces[i + warps];
      Copy(piece);
      piece = next;
    }
  }
  Copy(piece);
}

std::vector<CopyPair> CutIntoPieces(const CopyPair* pairs, std::int64_t pair_count) {
  std::int64_t total_bytes = 0;
  for (std::int64_t p = 0; p < pair_count; ++p) total_bytes += pairs[p].bytes;
  constexpr std::int64_t kStep = 512;  // a 16-byte word for each lane
  const std::int64_t share = (total_bytes / Tuning::kBusyWarps + kStep - 1) / kStep * kStep;
  const std::int64_t piece_bytes = std::clamp(share, Tuning::kFewestPieceBytes, Tuning::kMostPieceBytes);
  std::vector<CopyPair> pieces;
  pieces.reserve(pair_count + total_bytes / piece_bytes);
  for (std::int64_t p = 0; p < pair_count; ++p) {
    const CopyPair& pair = pairs[p];
    for (std::int64_t offset = 0; offset < pair.bytes; offset += piece_bytes) {
      pieces.push_back({pair.source + offset, pair.target + offset, std::min(piece_bytes, pair.bytes - offset)});
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
    PADDLE_KV_RETURN_IF_ERROR(table.Store(pieces, touches_host, where));
    launch.pieces = table.rows<CopyPair>();
  }
  const std::int64_t whole_grid = (launch.count + kWarpsPerCta - 1) / kWarpsPerCta;
  const std::int64_t grid = std::min(whole_grid, touches_host ? Tuning::kHostLinkCtas : kLargestGrid);
  const auto kernel = grid < whole_grid ? CopyPieces<true> : CopyPieces<false>;
  kernel<<<grid, Tuning::kThreads, 0, StreamOf(where)>>>(launch);
  return LaunchStatus("CopyPieces");
}

}  // namespace paddle_kv
