// What bench_copy_shapes.py times: the kernels that copy segments, with any number of CTAs and any shape of the rings.
#include "../custom_ops/transfer/cuda/copy_segments.cu"

#include <cuda_runtime.h>

namespace paddle_kv {

Status RunsWithBulkCopies(const void*, int, int, bool* runs) {
  *runs = true;
  return {};
}

namespace {

template <int kWarpsOfCta, int kStagesOfWarp, int kBytes, int kStores>
struct Ring {
  static constexpr int kCtas = 0;
  static constexpr int kWarps = kWarpsOfCta;
  static constexpr int kStages = kStagesOfWarp;
  static constexpr int kStageBytes = kBytes;
  static constexpr int kStoreStages = kStores;
  static constexpr bool kUntilWritten = false;
};

// Calls `function` with the shape of a number, which is the caller's list.
template <class Function>
int WithRing(int number, Function function) {
  switch (number) {
    case 0:
      return function(Ring<4, 4, 8 << 10, 2>{});
    case 1:
      return function(Ring<4, 6, 8 << 10, 3>{});
    case 2:
      return function(Ring<4, 3, 16 << 10, 1>{});
    case 3:
      return function(Ring<2, 4, 8 << 10, 2>{});
    case 4:
      return function(Ring<1, 4, 4 << 10, 1>{});
    case 5:
      return function(Ring<1, 4, 4 << 10, 2>{});
    case 6:
      return function(Ring<1, 8, 4 << 10, 4>{});
    case 7:
      return function(Ring<1, 8, 2 << 10, 4>{});
    case 8:
      return function(Ring<1, 4, 8 << 10, 2>{});
    case 9:
      return function(Ring<1, 8, 8 << 10, 4>{});
    default:
      return -1;
  }
}

Segment Cut(int ring, std::uint8_t* source, std::uint8_t* target, std::int64_t block_bytes, std::int64_t pairs) {
  const bool bulk = ring >= 0;
  const BlockRows rows = {source, target, block_bytes, block_bytes, block_bytes};
  Segment segment = CutSegment(rows, 0, pairs, false, Direction::kCacheToCache);
  if (!bulk) return segment;
  int largest = 0;
  WithRing(ring, [&](auto shape) { return largest = shape.kStageBytes; });
  const std::int64_t pieces = (block_bytes + largest - 1) / largest;
  segment.piece_bytes = static_cast<std::int32_t>(block_bytes / pieces);  // powers of two here
  segment.pieces_per_block = static_cast<std::int32_t>(pieces);
  segment.pieces_per_item = std::clamp(largest / segment.piece_bytes, 1, kMostPiecesPerItem);
  segment.items = (pairs * pieces + segment.pieces_per_item - 1) / segment.pieces_per_item;
  return segment;
}

}  // namespace
}  // namespace paddle_kv

using namespace paddle_kv;

// Writes the segments of `count` tensors to device memory. ring: -1 for words.
extern "C" int prepare(int ring, const std::int64_t* sources, const std::int64_t* targets, int count,
                       std::int64_t block_bytes, std::int64_t pairs, Segment* segments) {
  for (int i = 0; i < count; ++i) {
    const Segment segment = Cut(ring, reinterpret_cast<std::uint8_t*>(sources[i]),
                                reinterpret_cast<std::uint8_t*>(targets[i]), block_bytes, pairs);
    const cudaError_t result = cudaMemcpy(segments + i, &segment, sizeof(Segment), cudaMemcpyHostToDevice);
    if (result != cudaSuccess) return result;
  }
  return 0;
}

// threads: of a CTA of words.
extern "C" int run(int ring, int ctas, int threads, const Segment* segments, int count, const std::int64_t* source_ids,
                   const std::int64_t* target_ids, cudaStream_t stream) {
  SegmentCopy copy{};
  copy.segments = segments;
  copy.segment_count = count;
  copy.source_ids = source_ids;
  copy.target_ids = target_ids;
  copy.segments_per_group = count;
  if (ring < 0) {
    CopySegmentsByWords<<<ctas, threads, 0, stream>>>(copy);
    return cudaGetLastError();
  }
  return WithRing(ring, [&](auto shape) -> int {
    using Shape = decltype(shape);
    const auto kernel = CopySegmentsByBulk<Shape>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Shape>);
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    kernel<<<ctas, Shape::kWarps * kWarpLanes, kSharedBytes<Shape>, stream>>>(copy);
    return cudaGetLastError();
  });
}

// One copy a piece, by the copy engine.
extern "C" int run_pieces(std::uint8_t* target, const std::uint8_t* source, std::int64_t bytes, std::int64_t count,
                          const std::int64_t* places, cudaStream_t stream) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t offset = places[i] * bytes;
    const cudaError_t result = cudaMemcpyAsync(target + offset, source + offset, bytes, cudaMemcpyDefault, stream);
    if (result != cudaSuccess) return result;
  }
  return 0;
}

extern "C" int reach(int from, int to) {  // lets a device write to another one's memory
  int can = 0;
  if (const cudaError_t result = cudaDeviceCanAccessPeer(&can, from, to)) return result;
  if (!can) return -1;
  cudaSetDevice(from);
  const cudaError_t result = cudaDeviceEnablePeerAccess(to, 0);
  cudaGetLastError();
  return result == cudaErrorPeerAccessAlreadyEnabled ? 0 : result;
}
