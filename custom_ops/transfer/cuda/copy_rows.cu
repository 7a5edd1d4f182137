// One warp a CTA, 32 registers a thread and 16 KiB of shared memory: so small a CTA finds a place on a multiprocessor
// beside those of a matrix product, and need not wait until one of them has ended. Measured on an H100 beside products
// of 4096 rows: CTAs of 4 warps let a scatter wait so long that loads reached 10 to 22 GB/s, these 50. For scatters 8
// are not enough beside products that are bound by memory; these lose least by 24 (docs/performance.md). Gathers, which
// wait for what they read there, are quicker with 64, and the products as well: on an H200 saves have 51.3 GB/s and
// slow them by 3.0 %, with 16 CTAs 50.6 and 3.6, on an H100 50 and 8, with 16 CTAs 45 and 9.
#include "paddle_kv/transfer/copy_rows.h"

#include "paddle_kv/common/bulk_async.cuh"
#include "paddle_kv/common/copy_bytes.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/transfer/copy_segments.h"

namespace paddle_kv {
namespace {

constexpr int kScatterCtas = 24;
constexpr int kGatherCtas = 64;
constexpr int kStages = 4;
constexpr int kStageBytes = 4 << 10;
constexpr int kThreadsOf32Registers = 128;  // a multiprocessor has 65,536 registers for 16 CTAs of these

struct Shared {
  alignas(128) std::uint8_t stages[kStages][kStageBytes];
  std::uint64_t loaded[kStages];  // barriers
  std::uint8_t* targets[kStages];
  std::uint32_t bytes[kStages];
};

#if __CUDA_ARCH__ >= 900

// The items of all parts, dealt to the warps in turn. A lane knows one of the warp's next 32, so that the latency of
// the tables is hidden.
class RowItems {
 public:
  __device__ explicit RowItems(const RowCopy& copy)
      : copy_(copy), item_(blockIdx.x + static_cast<std::int64_t>(threadIdx.x) * gridDim.x) {}

  // Begins the next load into the stage; false: there is none.
  __device__ bool Load(Shared& shared, int stage) {
    if (next_lane_ == 0) Fetch();
    const std::uint32_t bytes = __shfl_sync(0xffffffff, bytes_, next_lane_);
    if (bytes == 0) return false;
    if (static_cast<int>(threadIdx.x) == next_lane_) {
      shared.targets[stage] = target_;
      shared.bytes[stage] = bytes;
      ExpectBytes(&shared.loaded[stage], bytes);
      LoadBulk(shared.stages[stage], source_, bytes, &shared.loaded[stage]);
    }
    next_lane_ = (next_lane_ + 1) % kWarpLanes;
    __syncwarp();
    return true;
  }

 private:
  __device__ void Fetch() {
    while (part_ < copy_.part_count && item_ >= copy_.parts[part_].items) item_ -= copy_.parts[part_++].items;
    bytes_ = 0;
    if (part_ < copy_.part_count) {
      const RowPart& part = copy_.parts[part_];
      // Their product is what a slot holds.
      const auto item = static_cast<std::uint32_t>(item_);
      const std::uint32_t pair = item / static_cast<std::uint32_t>(part.piece_count);
      const RowPiece& piece = part.pieces[item - pair * part.piece_count];
      std::uint8_t* const staged = part.slot + static_cast<std::int64_t>(pair) * part.row_bytes + piece.offset;
      std::uint8_t* const device = piece.device + part.ids[pair] * piece.device_stride;
      source_ = copy_.to_slot ? device : staged;
      target_ = copy_.to_slot ? staged : device;
      bytes_ = piece.bytes;
    }
    item_ += static_cast<std::int64_t>(kWarpLanes) * gridDim.x;
  }

  const RowCopy& copy_;
  std::int64_t item_;  // of the lane, in the part
  int part_ = 0;
  int next_lane_ = 0;
  const std::uint8_t* source_ = nullptr;
  std::uint8_t* target_ = nullptr;
  std::uint32_t bytes_ = 0;
};

#endif

__global__ void __launch_bounds__(kThreadsOf32Registers, 16) CopyRowsByBulk(const __grid_constant__ RowCopy copy) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x;
  if (lane < kStages) InitBarrier(&shared.loaded[lane]);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  RowItems items(copy);
  // One stage less than there are: the last one is free when the store before has left it.
  int held = 0;
  while (held < kStages - 1 && items.Load(shared, held)) ++held;
  int free_stage = kStages - 1;
  int stage = 0;
  std::uint32_t parity = 0;
  bool more = held == kStages - 1;
  while (held > 0) {
    AwaitBytes(&shared.loaded[stage], parity);
    if (lane == 0) {
      if (copy.to_slot) {
        StoreBulkEvictFirst(shared.targets[stage], shared.stages[stage], shared.bytes[stage]);
      } else {
        StoreBulk(shared.targets[stage], shared.stages[stage], shared.bytes[stage]);
      }
      CommitStores();
      AwaitStores<1>(false);
    }
    __syncwarp();
    --held;
    if (more && (more = items.Load(shared, free_stage))) ++held;
    free_stage = stage;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (lane == 0) AwaitStores<0>(true);
#else
  __trap();
#endif
}

}  // namespace

Status LaunchCopyRows(const RowCopy& copy, const DeviceStream& where) {
  // A multiprocessor changes its share of shared memory only when it is empty: a kernel that needs more would wait.
  PADDLE_KV_CUDA(cudaFuncSetAttribute(CopyRowsByBulk, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared));
  CopyRowsByBulk<<<copy.to_slot ? kGatherCtas : kScatterCtas, kWarpLanes, sizeof(Shared), StreamOf(where)>>>(copy);
  return LaunchStatus("CopyRowsByBulk");
}

Status LoadCopyRows(const DeviceStream& where) {
  bool has_bulk_copies = false;
  PADDLE_KV_RETURN_IF_ERROR(HasBulkCopies(where.device, &has_bulk_copies));
  return has_bulk_copies ? LaunchCopyRows({}, where) : Status{};
}

}  // namespace paddle_kv
