// Copies a list of pieces of memory.
//
// 1. Each piece is cut into chunks: the work items.
// 2. Each warp takes an equal share of neighbouring items. It searches the piece of its first item once and walks on
//    from there, so pieces of any mixture of sizes cost no search per chunk.
// 3. A chunk is copied in the widest words on which its two addresses agree, decided from its own addresses.
// The list travels as kernel parameters where it fits, otherwise in a DeviceTable.
#include "paddle_kv/memcpy/vectorized_copy.h"

#include <algorithm>
#include <vector>

#include "paddle_kv/common/copy_bytes.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/device_table.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr std::int64_t kChunkBytes = 4 << 10;
  static constexpr int kThreads = 256;
  static constexpr int kCtasPerMultiprocessor = 4;
  static constexpr int kHostLinkCtas =
      8;  // reaches the rate of the link; more only take bandwidth from a running model
};

constexpr int kWarpsPerCta = Tuning::kThreads / kWarpLanes;

// A pair in the table, as 64-bit words.
constexpr int kSourceWord = 0;
constexpr int kTargetWord = 1;
constexpr int kBytesWord = 2;
constexpr int kFirstItemWord = 3;
constexpr int kWordsPerPair = 4;
constexpr int kInlinePairs = 120;

struct Launch {
  std::int64_t items;
  std::int64_t pair_count;
  const std::int64_t* words;  // null: they are here
  std::int64_t inline_words[kInlinePairs * kWordsPerPair];
};
static_assert(sizeof(Launch) <= 4096, "kernel parameters");

// The last pair whose first item is not behind `item`.
__device__ std::int64_t PairOf(const std::int64_t* words, std::int64_t pair_count, std::int64_t item) {
  std::int64_t low = 0;
  std::int64_t high = pair_count - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (words[middle * kWordsPerPair + kFirstItemWord] <= item) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__global__ void __launch_bounds__(Tuning::kThreads, Tuning::kCtasPerMultiprocessor)
    CopyPieces(const __grid_constant__ Launch launch) {
  const int lane = threadIdx.x % kWarpLanes;
  const std::int64_t* words = launch.words != nullptr ? launch.words : launch.inline_words;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarpsPerCta;
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kWarpsPerCta + threadIdx.x / kWarpLanes;
  const std::int64_t share = launch.items / warps;
  const std::int64_t longer = launch.items % warps;  // so many warps have one item more
  std::int64_t item = warp * share + min(warp, longer);
  const std::int64_t end = item + share + (warp < longer ? 1 : 0);
  if (item == end) return;
  std::int64_t pair = PairOf(words, launch.pair_count, item);
  while (item < end) {
    const std::int64_t* row = words + pair * kWordsPerPair;
    const std::int64_t bytes = row[kBytesWord];
    std::int64_t offset = (item - row[kFirstItemWord]) * Tuning::kChunkBytes;
    for (; item < end && offset < bytes; ++item, offset += Tuning::kChunkBytes) {
      CopyBytesWithWarp(reinterpret_cast<const std::uint8_t*>(row[kSourceWord]) + offset,
                        reinterpret_cast<std::uint8_t*>(row[kTargetWord]) + offset,
                        min(Tuning::kChunkBytes, bytes - offset), lane);
    }
    ++pair;
  }
}

}  // namespace

Status VectorizedCopyCuda(const CopyPair* pairs, std::int64_t pair_count, bool touches_host,
                          const DeviceStream& where) {
  if (pair_count == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  Launch launch{};
  launch.pair_count = pair_count;
  std::vector<std::int64_t> words;
  words.reserve(pair_count * kWordsPerPair);
  for (std::int64_t i = 0; i < pair_count; ++i) {
    words.push_back(reinterpret_cast<std::int64_t>(pairs[i].source));
    words.push_back(reinterpret_cast<std::int64_t>(pairs[i].target));
    words.push_back(pairs[i].bytes);
    words.push_back(launch.items);
    launch.items += (pairs[i].bytes + Tuning::kChunkBytes - 1) / Tuning::kChunkBytes;
  }
  DeviceTable table;
  if (pair_count <= kInlinePairs) {
    std::copy(words.begin(), words.end(), launch.inline_words);
  } else {
    PADDLE_KV_RETURN_IF_ERROR(table.Store(words, where));
    launch.words = table.words();
  }

  int multiprocessors = 0;
  PADDLE_KV_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, where.device));
  const std::int64_t largest_grid =
      touches_host ? Tuning::kHostLinkCtas : multiprocessors * Tuning::kCtasPerMultiprocessor;
  const auto grid = static_cast<int>(std::min(largest_grid, (launch.items + kWarpsPerCta - 1) / kWarpsPerCta));
  CopyPieces<<<grid, Tuning::kThreads, 0, StreamOf(where)>>>(launch);
  return LaunchStatus("CopyPieces");
}

}  // namespace paddle_kv
