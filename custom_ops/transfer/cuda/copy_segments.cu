// Two kernels do the same:
//
// Bulk copies (sm_90 and later): source to a stage in shared memory, stage to target, with one instruction of one
// thread a piece. A warp keeps its whole ring in flight, across the borders of blocks, tensors and groups, so that few
// threads cover the latency of the link.
//
// Words: any address and size, any GPU.
#include "paddle_kv/transfer/copy_segments.h"

#include <algorithm>

#include "paddle_kv/common/bulk_async.cuh"
#include "paddle_kv/common/copy_bytes.cuh"
#include "paddle_kv/common/cuda_status.cuh"

// Code for GPUs without bulk copies leaves unused what they need, and compilers see it once for each architecture.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177
#endif

namespace paddle_kv {
namespace {

constexpr int kWordThreads = 1024;
constexpr int kWordCtas = 2;
constexpr int kWordPieceBytes = 8 << 10;
constexpr int kBulkAlignment = 16;

// The items of all segments in order, dealt to the warps in turn.
class ItemCursor {
 public:
  __device__ ItemCursor(const SegmentCopy& copy, int warp, int warps)
      : segments_(copy.segments), segment_count_(copy.segment_count), warps_(warps), item_(warp) {
    SkipSegments();
  }
  __device__ bool Done() const { return segment_ == segment_count_; }
  __device__ void Advance(int items) {
    item_ += static_cast<std::int64_t>(items) * warps_;
    SkipSegments();
  }
  __device__ const Segment& segment() const { return segments_[segment_]; }
  __device__ int segment_index() const { return segment_; }
  // The warp's next item, or the one `ahead` items behind it.
  __device__ std::int64_t item(int ahead = 0) const { return item_ + static_cast<std::int64_t>(ahead) * warps_; }
  // How many items of this segment are left to the warp, `most` or fewer.
  __device__ int Left(int most) const {
    const std::int64_t left = (segment().items - item_ + warps_ - 1) / warps_;
    return left < most ? static_cast<int>(left) : most;
  }

 private:
  __device__ void SkipSegments() {
    while (segment_ < segment_count_ && item_ >= segment().items) item_ -= segments_[segment_++].items;
  }

  const Segment* segments_;
  int segment_count_;
  int warps_;
  int segment_ = 0;
  std::int64_t item_;
};

// Tells that the warp is through with the groups before `group`. What the warp has written is complete by then.
class GroupSignals {
 public:
  __device__ explicit GroupSignals(const SegmentCopy& copy) : done_(copy.done), count_(copy.signal_count) {}
  __device__ bool Pending(int group) const { return sent_ < count_ && sent_ < group; }
  __device__ void Send(int group, int lane) {
    if (!Pending(group)) return;
    __syncwarp();
    if (lane == 0) {
      __threadfence_system();
      for (int g = sent_; g < count_ && g < group; ++g) atomicAdd_system(done_ + g, 1u);
    }
    sent_ = group;
  }
  __device__ void SendAll(int lane) { Send(count_, lane); }

 private:
  std::uint32_t* done_;
  int count_;
  int sent_ = 0;
};

__device__ std::int64_t BlockOf(const std::int64_t* ids, const Segment& segment, std::int64_t pair) {
  return ids == nullptr ? pair : ids[segment.first_pair + pair];
}

__global__ void __launch_bounds__(kWordThreads) CopySegmentsByWords(const SegmentCopy copy) {
  const int lane = threadIdx.x % kWarpLanes;
  const int warps = blockDim.x / kWarpLanes;
  GroupSignals signals(copy);
  for (ItemCursor cursor(copy, blockIdx.x * warps + threadIdx.x / kWarpLanes, gridDim.x * warps); !cursor.Done();
       cursor.Advance(1)) {
    signals.Send(cursor.segment_index() / copy.segments_per_group, lane);
    const Segment& segment = cursor.segment();
    const std::int64_t pair = cursor.item() / segment.pieces_per_block;
    const std::int64_t offset = cursor.item() % segment.pieces_per_block * segment.piece_bytes;
    const std::int64_t left = segment.rows.block_bytes - offset;
    CopyBytesWithWarp(
        segment.rows.source + BlockOf(copy.source_ids, segment, pair) * segment.rows.source_stride + offset,
        segment.rows.target + BlockOf(copy.target_ids, segment, pair) * segment.rows.target_stride + offset,
        left < segment.piece_bytes ? left : segment.piece_bytes, lane);
  }
  signals.SendAll(lane);
}

// How bulk copies are spread, by what they pass. A warp has a ring of kStages in shared memory, of which kStoreStages
// may be on their way out while the others are on their way in; warps share nothing. The figures are measured ones.
//
// Over the link: some 200 KiB in flight take all of it. A multiprocessor that the copy is on is lost to products whose
// CTAs fill a multiprocessor, so there are two, whatever the number of warps.
struct ToDevice {
  static constexpr int kCtas = 2;
  static constexpr int kWarps = 2;
  static constexpr int kStages = 8;
  static constexpr int kStageBytes = 8 << 10;
  static constexpr int kStoreStages = 2;
  static constexpr bool kUntilWritten = false;
};
// A stage is free when its bytes have arrived, not when they have left it: stores that queue up before the link hold up
// everybody's memory accesses.
struct ToHost {
  static constexpr int kCtas = 2;
  static constexpr int kWarps = 4;
  static constexpr int kStages = 4;
  static constexpr int kStageBytes = 8 << 10;
  static constexpr int kStoreStages = 2;
  static constexpr bool kUntilWritten = true;
};
// For a few microseconds at a time: small, because a small CTA is placed sooner on a busy device.
struct InsideDevice {
  static constexpr int kCtas = 32;
  static constexpr int kWarps = 1;
  static constexpr int kStages = 4;
  static constexpr int kStageBytes = 4 << 10;
  static constexpr int kStoreStages = 1;
  static constexpr bool kUntilWritten = false;
};
// Whole transfers inside the device, or to another one. The caller says how many CTAs: one fills a multiprocessor.
struct CacheToCache {
  static constexpr int kCtas = 64;
  static constexpr int kWarps = 4;
  static constexpr int kStages = 4;
  static constexpr int kStageBytes = 8 << 10;
  static constexpr int kStoreStages = 2;
  static constexpr bool kUntilWritten = false;
};
constexpr int kMostBulkThreads = 4 * kWarpLanes;

// Calls `function` with an object of the shape for the direction.
template <class Function>
auto WithShape(Direction direction, Function function) {
  switch (direction) {
    case Direction::kDeviceToHost:
      return function(ToHost{});
    case Direction::kHostToDevice:
      return function(ToDevice{});
    case Direction::kCacheToCache:
      return function(CacheToCache{});
    default:
      return function(InsideDevice{});
  }
}

constexpr int kMostPiecesPerItem = 8;

template <class Shape>
struct BulkShared {
  alignas(128) std::uint8_t stages[Shape::kStages][Shape::kStageBytes];
  std::uint64_t loaded[Shape::kStages];  // barriers
  // What a stage holds.
  int group[Shape::kStages];
  std::uint8_t* targets[Shape::kStages][kMostPiecesPerItem];
  std::uint32_t bytes[Shape::kStages][kMostPiecesPerItem];
  std::uint32_t offsets[Shape::kStages][kMostPiecesPerItem];
  // Each lane's piece of the batch.
  const std::uint8_t* sources[kWarpLanes];
  std::uint8_t* piece_targets[kWarpLanes];
  std::uint32_t piece_bytes[kWarpLanes];  // 0: none
};

template <class Shape>
constexpr int kSharedBytes = Shape::kWarps * static_cast<int>(sizeof(BulkShared<Shape>));

#if __CUDA_ARCH__ >= 900
// As many items of one segment as there are lanes for their pieces: a lane holds one piece.
template <class Shape>
class Batches {
 public:
  __device__ Batches(const SegmentCopy& copy, BulkShared<Shape>& shared, int warp, int lane)
      : copy_(copy), shared_(shared), lane_(lane), cursor_(copy, warp, gridDim.x * Shape::kWarps) {
    FetchIds();
    Take();
  }
  __device__ bool Done() const { return items_ == 0; }

  __device__ void LoadItem(int stage) {
    const int place = lane_ - first_lane_;
    const bool mine = place >= 0 && place < lanes_per_item_;
    const std::uint32_t bytes = mine ? shared_.piece_bytes[lane_] : 0;
    const std::uint32_t all = __reduce_add_sync(0xffffffff, bytes);
    if (lane_ == 0) {
      shared_.group[stage] = group_;
      ExpectBytes(&shared_.loaded[stage], all);
    }
    if (lane_ < kMostPiecesPerItem && lane_ >= lanes_per_item_) shared_.bytes[stage][lane_] = 0;
    __syncwarp();
    if (mine) {
      const std::uint32_t offset = place * piece_stride_;
      shared_.bytes[stage][place] = bytes;
      shared_.offsets[stage][place] = offset;
      shared_.targets[stage][place] = shared_.piece_targets[lane_];
      if (bytes != 0) LoadBulk(shared_.stages[stage] + offset, shared_.sources[lane_], bytes, &shared_.loaded[stage]);
    }
    first_lane_ += lanes_per_item_;
    if (--items_ == 0) Take();
  }

 private:
  // The lane's piece of the batch at the cursor, or -1.
  __device__ std::int64_t Piece(const Segment& segment) const {
    const int item = lane_ / segment.pieces_per_item;
    if (item >= Items(segment)) return -1;
    const std::int64_t piece = cursor_.item(item) * segment.pieces_per_item + lane_ % segment.pieces_per_item;
    return piece < segment.pair_count * segment.pieces_per_block ? piece : -1;
  }
  __device__ int Items(const Segment& segment) const { return cursor_.Left(kWarpLanes / segment.pieces_per_item); }
  // One batch ahead, so that the latency is hidden.
  __device__ void FetchIds() {
    if (cursor_.Done()) return;
    const Segment& segment = cursor_.segment();
    const std::int64_t piece = Piece(segment);
    if (piece < 0) return;
    const std::int64_t pair = segment.pieces_per_block == 1 ? piece : piece / segment.pieces_per_block;
    source_block_ = BlockOf(copy_.source_ids, segment, pair);
    target_block_ = BlockOf(copy_.target_ids, segment, pair);
  }
  __device__ void Take() {
    if (cursor_.Done()) return;
    const Segment& segment = cursor_.segment();
    const std::int64_t piece = Piece(segment);
    std::uint32_t bytes = 0;
    if (piece >= 0) {
      const std::int64_t offset =
          segment.pieces_per_block == 1 ? 0 : piece % segment.pieces_per_block * segment.piece_bytes;
      const std::int64_t rest = segment.rows.block_bytes - offset;
      bytes = static_cast<std::uint32_t>(rest < segment.piece_bytes ? rest : segment.piece_bytes);
      shared_.sources[lane_] = segment.rows.source + source_block_ * segment.rows.source_stride + offset;
      shared_.piece_targets[lane_] = segment.rows.target + target_block_ * segment.rows.target_stride + offset;
    }
    shared_.piece_bytes[lane_] = bytes;
    items_ = Items(segment);
    first_lane_ = 0;
    lanes_per_item_ = segment.pieces_per_item;
    piece_stride_ = segment.piece_bytes;
    group_ = cursor_.segment_index() / copy_.segments_per_group;
    cursor_.Advance(items_);
    FetchIds();
  }

  const SegmentCopy& copy_;
  BulkShared<Shape>& shared_;
  int lane_;
  ItemCursor cursor_;  // behind the batch
  std::int64_t source_block_ = 0;
  std::int64_t target_block_ = 0;
  int items_ = 0;  // left in the batch
  int first_lane_ = 0;
  int lanes_per_item_ = 1;
  std::uint32_t piece_stride_ = 0;
  int group_ = 0;
};

#endif

template <class Shape>
__global__ void __launch_bounds__(kMostBulkThreads, 16)  // 32 registers a thread
    CopySegmentsByBulk(const __grid_constant__ SegmentCopy copy) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::uint8_t memory[];
  const int lane = threadIdx.x % kWarpLanes;
  const int warp = threadIdx.x / kWarpLanes;
  BulkShared<Shape>& shared = reinterpret_cast<BulkShared<Shape>*>(memory)[warp];
  if (lane < Shape::kStages) InitBarrier(&shared.loaded[lane]);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  GroupSignals signals(copy);
  Batches<Shape> batches(copy, shared, blockIdx.x * Shape::kWarps + warp, lane);
  int held = 0;  // stages on their way in or out
  for (; held < Shape::kStages && !batches.Done(); ++held) batches.LoadItem(held);

  int stage = 0;
  int leaving = 0;  // stages on their way out
  std::uint32_t parity = 0;
  while (held > leaving) {
    AwaitBytes(&shared.loaded[stage], parity);
    if (lane < kMostPiecesPerItem && shared.bytes[stage][lane] != 0) {
      StoreBulk(shared.targets[stage][lane], shared.stages[stage] + shared.offsets[stage][lane],
                shared.bytes[stage][lane]);
    }
    CommitStores();
    AwaitStores<Shape::kStoreStages>(Shape::kUntilWritten);
    __syncwarp();
    if (leaving < Shape::kStoreStages) {
      ++leaving;
    } else {
      // The oldest store has left its stage. The next one's group is unfinished, the groups before are not.
      const int oldest = stage >= leaving ? stage - leaving : stage - leaving + Shape::kStages;
      const int next = oldest + 1 == Shape::kStages ? 0 : oldest + 1;
      const int group = shared.group[next];
      if (signals.Pending(group)) {
        AwaitStores<Shape::kStoreStages>(true);
        signals.Send(group, lane);
      }
      if (!batches.Done()) {
        batches.LoadItem(oldest);
      } else {
        --held;
      }
    }
    if (++stage == Shape::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  AwaitStores<0>(true);
  signals.SendAll(lane);
#else
  __trap();
#endif
}

}  // namespace

Status HasBulkCopies(int device, bool* has) {
  // GPUs of a desktop have less shared memory than those of a server.
  constexpr int needed_bytes =
      std::max({kSharedBytes<ToDevice>, kSharedBytes<ToHost>, kSharedBytes<InsideDevice>, kSharedBytes<CacheToCache>});
  const auto kernel = CopySegmentsByBulk<ToDevice>;  // the others are compiled with it
  return RunsWithBulkCopies(reinterpret_cast<const void*>(kernel), needed_bytes, device, has);
}

bool BulkCopyable(const BlockRows& rows) {
  const auto multiple = [](std::int64_t value) { return value % kBulkAlignment == 0; };
  return multiple(reinterpret_cast<std::intptr_t>(rows.source)) &&
         multiple(reinterpret_cast<std::intptr_t>(rows.target)) && multiple(rows.source_stride) &&
         multiple(rows.target_stride) && multiple(rows.block_bytes);
}

Segment CutSegment(const BlockRows& rows, std::int64_t first_pair, std::int64_t pair_count, bool bulk,
                   Direction direction) {
  const int largest_piece = bulk ? WithShape(direction, [](auto shape) { return shape.kStageBytes; }) : kWordPieceBytes;
  Segment segment{};
  segment.rows = rows;
  segment.first_pair = first_pair;
  segment.pair_count = pair_count;
  if (rows.block_bytes == 0) return segment;
  const auto pieces_of = [](std::int64_t whole, std::int64_t piece) { return (whole + piece - 1) / piece; };
  // Pieces of one length, as far as alignment lets them be.
  const std::int64_t even = pieces_of(rows.block_bytes, pieces_of(rows.block_bytes, largest_piece));
  const std::int64_t piece_bytes = pieces_of(even, kBulkAlignment) * kBulkAlignment;
  segment.piece_bytes = static_cast<std::int32_t>(piece_bytes);
  segment.pieces_per_block = static_cast<std::int32_t>(pieces_of(rows.block_bytes, piece_bytes));
  segment.pieces_per_item = bulk ? std::clamp(largest_piece / segment.piece_bytes, 1, kMostPiecesPerItem) : 1;
  segment.items = pieces_of(pair_count * segment.pieces_per_block, segment.pieces_per_item);
  return segment;
}

int CtasOf(const SegmentCopy& copy, bool bulk, Direction direction) {
  if (copy.ctas > 0) return copy.ctas;
  return bulk ? WithShape(direction, [](auto shape) { return shape.kCtas; }) : kWordCtas;
}

int WarpsOf(const SegmentCopy& copy, bool bulk, Direction direction) {
  const int warps = bulk ? WithShape(direction, [](auto shape) { return shape.kWarps; }) : kWordThreads / kWarpLanes;
  return CtasOf(copy, bulk, direction) * warps;
}

Status LaunchCopySegments(const SegmentCopy& copy, bool bulk, Direction direction, const DeviceStream& where) {
  const int ctas = CtasOf(copy, bulk, direction);
  if (!bulk) {
    CopySegmentsByWords<<<ctas, kWordThreads, 0, StreamOf(where)>>>(copy);
    return LaunchStatus("CopySegmentsByWords");
  }
  return WithShape(direction, [&](auto shape) -> Status {
    using Shape = decltype(shape);
    const auto kernel = CopySegmentsByBulk<Shape>;
    PADDLE_KV_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Shape>));
    // A multiprocessor changes its share of shared memory only when it is empty: a kernel that needs more would wait.
    PADDLE_KV_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    kernel<<<ctas, Shape::kWarps * kWarpLanes, kSharedBytes<Shape>, StreamOf(where)>>>(copy);
    return LaunchStatus("CopySegmentsByBulk");
  });
}

Status LoadCopySegments(const DeviceStream& where) {
  SegmentCopy nothing{};
  nothing.ctas = 1;
  PADDLE_KV_RETURN_IF_ERROR(LaunchCopySegments(nothing, false, Direction::kHostToDevice, where));
  bool has_bulk_copies = false;
  PADDLE_KV_RETURN_IF_ERROR(HasBulkCopies(where.device, &has_bulk_copies));
  if (!has_bulk_copies) return {};
  for (const Direction direction :
       {Direction::kDeviceToHost, Direction::kHostToDevice, Direction::kDeviceToDevice, Direction::kCacheToCache}) {
    PADDLE_KV_RETURN_IF_ERROR(LaunchCopySegments(nothing, true, direction, where));
  }
  return {};
}

}  // namespace paddle_kv
