// Two kernels, so that nothing is decided by the host. The first, a CTA for each request, finds which tokens are
// resident and which slots the others take, in an order that does not depend on which thread comes first:
//
// 1. Each position of the list looks up its token. A hit notes the smallest position at the slot, a miss claims the
//    entry of its token in slot_of_token: a claim is above every slot and below kAbsent as an unsigned number, so the
//    smallest position wins.
// 2. A scan over the list numbers first appearances, and the misses among them.
// 3. A scan over the LRU order numbers the slots that are not used: the first of them go to the misses, the others move
//    up.
// 4. The slots that are used go to the end, in the order of first appearance.
//
// The second copies: a warp takes a row, all of whose words are in flight at once. A row of host memory is read once,
// and written to its slot and to each position of the list that names the token. It is launched dependently: its CTAs
// wait in their places for the end of the first.
#include "paddle_kv/topk/gather_topk_rows.h"

#include <climits>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/dependent_launch.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr int kPlanThreads = 1024;
  static constexpr int kItems = 4;  // that a thread numbers in one scan
  static constexpr int kCopyThreads = 256;
  static constexpr int kWordsInFlight = 4;          // of a lane: 2 KiB of a row
  static constexpr int kSharedLeftBytes = 1 << 10;  // for what the kernel has beside the lists
};

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr std::uint32_t kClaim = 0x80000000u;
constexpr std::int32_t kUnused = INT_MAX;
constexpr std::int32_t kMiss = -2;  // a position whose token is not resident

// Two numbers that are summed at once.
struct Pair {
  std::uint32_t first;
  std::uint32_t second;
};

__device__ inline Pair operator+(const Pair& a, const Pair& b) { return {a.first + b.first, a.second + b.second}; }

// What the threads before this one have; `total`: what all have. Every thread of the CTA takes part, and what was
// written before can be read behind it.
__device__ Pair SumBefore(const Pair& own, Pair* total) {
  __shared__ Pair of_warps[Tuning::kPlanThreads / kLanes];
  const unsigned lane = threadIdx.x % kLanes;
  const unsigned warp = threadIdx.x / kLanes;
  Pair sum = own;
  for (unsigned distance = 1; distance < kLanes; distance *= 2) {
    const Pair below{__shfl_up_sync(kAllLanes, sum.first, distance), __shfl_up_sync(kAllLanes, sum.second, distance)};
    if (lane >= distance) sum = sum + below;
  }
  if (lane == kLanes - 1) of_warps[warp] = sum;
  __syncthreads();
  Pair before{sum.first - own.first, sum.second - own.second};
  Pair all{};
  for (unsigned w = 0; w < blockDim.x / kLanes; ++w) {
    if (w == warp) before = before + all;
    all = all + of_warps[w];
  }
  __syncthreads();
  *total = all;
  return before;
}

// The lists of one request. `local` is shared memory, or where that is too small a part of scratch.
struct Lists {
  __device__ Lists(const TopkRows& call, std::int64_t request, std::int32_t* shared)
      : token_ids(call.token_ids + request * call.k),
        slot_of_token(call.slot_of_token + request * call.max_tokens),
        token_of_slot(call.token_of_slot + request * call.num_slots),
        lru_order(call.lru_order + request * call.num_slots),
        plan(call.scratch + request * call.scratch_stride),
        chain(plan + call.k),
        kind(shared != nullptr ? shared : chain + call.k),
        order(kind + call.k),
        misses(order + call.k),
        first_use(misses + call.k) {}

  const std::int32_t* token_ids;
  std::int32_t* slot_of_token;
  std::int32_t* token_of_slot;
  std::int32_t* lru_order;
  std::int32_t* plan;
  std::int32_t* chain;      // positions of one token, from the first one on; kAbsent ends it
  std::int32_t* kind;       // of a position: its slot, kMiss or kZeros
  std::int32_t* order;      // first appearances: the slot; -1 - position until a miss has one
  std::int32_t* misses;     // entries of `order`
  std::int32_t* first_use;  // of a slot: a position, or kUnused
};

__device__ inline bool IsBelow(std::int32_t number, std::int32_t limit) {
  return static_cast<std::uint32_t>(number) < static_cast<std::uint32_t>(limit);
}

__device__ inline std::uint32_t ClaimOf(std::int32_t position) { return kClaim | static_cast<std::uint32_t>(position); }

// On its way to the L2 cache, while nobody waits for it.
__device__ void Prefetch(const std::int32_t* first, std::int32_t count) {
  constexpr int kOfLine = 128 / sizeof(std::int32_t);
  for (std::int32_t i = threadIdx.x * kOfLine; i < count; i += blockDim.x * kOfLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(first + i));
  }
}

__device__ void ForgetAll(const TopkRows& call, const Lists& lists) {
  for (std::int32_t s = threadIdx.x; s < call.num_slots; s += blockDim.x) {
    const std::int32_t token = lists.token_of_slot[s];
    if (IsBelow(token, call.max_tokens)) lists.slot_of_token[token] = kAbsent;
    lists.token_of_slot[s] = kAbsent;
    lists.lru_order[s] = s;
  }
}

__device__ void LookUp(const TopkRows& call, std::int64_t request, const Lists& lists) {
  for (std::int32_t i = threadIdx.x; i < call.k; i += blockDim.x) {
    const std::int32_t token = lists.token_ids[i];
    std::int32_t kind = kZeros;
    if (IsBelow(token, call.max_tokens)) {
      const std::int32_t slot = lists.slot_of_token[token];  // or a claim of another thread, which no slot is
      if (IsBelow(slot, call.num_slots)) {
        kind = slot;
        atomicMin(lists.first_use + slot, i);
      } else if (HostRowOf(call, request, token) != nullptr) {
        kind = kMiss;
        atomicMin(reinterpret_cast<std::uint32_t*>(lists.slot_of_token + token), ClaimOf(i));
      }
    }
    lists.kind[i] = kind;
    lists.chain[i] = kAbsent;
  }
}

// Returns the number of first appearances, and of misses among them.
__device__ Pair NumberFirst(const TopkRows& call, const Lists& lists) {
  Pair found{};
  for (std::int32_t base = 0; base < call.k; base += Tuning::kPlanThreads * Tuning::kItems) {
    const std::int32_t begin = base + static_cast<std::int32_t>(threadIdx.x) * Tuning::kItems;
    std::int32_t kinds[Tuning::kItems];
    bool is_first[Tuning::kItems];
    Pair own{};
#pragma unroll
    for (int j = 0; j < Tuning::kItems; ++j) {
      const std::int32_t i = begin + j;
      kinds[j] = i < call.k ? lists.kind[i] : kZeros;
      is_first[j] = false;
      if (kinds[j] >= 0) {
        is_first[j] = lists.first_use[kinds[j]] == i;
        lists.plan[i] = kinds[j];
      } else if (kinds[j] == kMiss) {
        const auto claim = static_cast<std::uint32_t>(lists.slot_of_token[lists.token_ids[i]]);
        is_first[j] = claim == ClaimOf(i);
        const auto first = static_cast<std::int32_t>(claim & ~kClaim);
        const bool is_second = !is_first[j] && (claim & kClaim) != 0 && first < call.k;
        if (is_second) lists.chain[i] = atomicExch(lists.chain + first, i);
        lists.plan[i] = is_second ? kElsewhere : kZeros;  // of the first one until it has a slot
      } else if (i < call.k) {
        lists.plan[i] = kZeros;
      }
      own = own + Pair{is_first[j], is_first[j] && kinds[j] == kMiss};
    }
    Pair total;
    Pair place = found + SumBefore(own, &total);
#pragma unroll
    for (int j = 0; j < Tuning::kItems; ++j) {
      if (!is_first[j]) continue;
      lists.order[place.first] = kinds[j] == kMiss ? -1 - (begin + j) : kinds[j];
      if (kinds[j] == kMiss) lists.misses[place.second++] = static_cast<std::int32_t>(place.first);
      ++place.first;
    }
    found = found + total;
  }
  __syncthreads();
  return found;
}

// The slot is the next one that no token of the list has.
__device__ void GiveSlot(const TopkRows& call, const Lists& lists, std::uint32_t miss, std::int32_t slot) {
  const std::int32_t entry = lists.misses[miss];
  const std::int32_t position = -1 - lists.order[entry];
  const std::int32_t token = lists.token_ids[position];
  const std::int32_t before = lists.token_of_slot[slot];
  if (IsBelow(before, call.max_tokens)) lists.slot_of_token[before] = kAbsent;
  lists.token_of_slot[slot] = token;
  lists.slot_of_token[token] = slot;
  lists.plan[position] = kFirstMiss - slot;
  lists.order[entry] = slot;
}

__device__ void MoveUp(const TopkRows& call, const Lists& lists, std::uint32_t misses) {
  std::uint32_t unused = 0;
  for (std::int32_t base = 0; base < call.num_slots; base += Tuning::kPlanThreads * Tuning::kItems) {
    const std::int32_t begin = base + static_cast<std::int32_t>(threadIdx.x) * Tuning::kItems;
    std::int32_t slots[Tuning::kItems];
    bool is_unused[Tuning::kItems];
    Pair own{};
#pragma unroll
    for (int j = 0; j < Tuning::kItems; ++j) {
      slots[j] = begin + j < call.num_slots ? lists.lru_order[begin + j] : kAbsent;
    }
#pragma unroll
    for (int j = 0; j < Tuning::kItems; ++j) {
      is_unused[j] = IsBelow(slots[j], call.num_slots) && lists.first_use[slots[j]] == kUnused;
      own.first += is_unused[j];
    }
    Pair total;
    std::uint32_t place = unused + SumBefore(own, &total).first;  // no thread writes before all have read
#pragma unroll
    for (int j = 0; j < Tuning::kItems; ++j) {
      if (!is_unused[j]) continue;
      if (place < misses) {
        GiveSlot(call, lists, place, slots[j]);
      } else {
        lists.lru_order[place - misses] = slots[j];
      }
      ++place;
    }
    unused += total.first;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(Tuning::kPlanThreads)
    PlanTopkRows(const __grid_constant__ TopkRows call, const __grid_constant__ bool lists_are_shared) {
  extern __shared__ std::int32_t shared[];
  WaitForKernelBefore();
  LetKernelBehindBegin();
  const std::int64_t request = blockIdx.x;
  const Lists lists(call, request, lists_are_shared ? shared : nullptr);
  Prefetch(lists.token_ids, call.k);
  Prefetch(lists.lru_order, call.num_slots);
  const bool is_fresh = call.fresh[request] != 0;
  if (is_fresh) ForgetAll(call, lists);
  for (std::int32_t s = threadIdx.x; s < call.num_slots; s += blockDim.x) lists.first_use[s] = kUnused;
  __syncthreads();
  if (is_fresh && threadIdx.x == 0) call.fresh[request] = 0;
  LookUp(call, request, lists);
  __syncthreads();
  const Pair found = NumberFirst(call, lists);
  MoveUp(call, lists, found.second);
  const auto used = static_cast<std::int32_t>(found.first);
  for (std::int32_t r = threadIdx.x; r < used; r += blockDim.x) {
    if (lists.order[r] >= 0) lists.lru_order[call.num_slots - used + r] = lists.order[r];
  }
}

constexpr std::uint32_t kRowsOfCta = Tuning::kCopyThreads / kLanes;

__host__ __device__ constexpr std::uint32_t CtasOfRequest(std::int32_t k) {
  return (static_cast<std::uint32_t>(k) + kRowsOfCta - 1) / kRowsOfCta;
}

template <class Word>
__global__ void __launch_bounds__(Tuning::kCopyThreads) CopyTopkRows(const __grid_constant__ TopkRows call) {
  constexpr int kWords = Tuning::kWordsInFlight;
  WaitForKernelBefore();
  const std::uint32_t ctas_of_request = CtasOfRequest(call.k);
  const std::uint32_t request = blockIdx.x / ctas_of_request;
  const auto position =
      static_cast<std::int32_t>((blockIdx.x - request * ctas_of_request) * kRowsOfCta + threadIdx.x / kLanes);
  if (position >= call.k) return;
  const std::int64_t first_row = std::int64_t{request} * call.k;
  const std::int64_t row = first_row + position;
  const std::int32_t* const plan = call.scratch + request * call.scratch_stride;
  const std::int32_t* const chain = plan + call.k;
  const std::int32_t kind = plan[position];
  if (kind == kElsewhere) return;
  const bool is_miss = kind <= kFirstMiss;
  const std::int64_t slot = is_miss ? kFirstMiss - kind : kind;
  std::uint8_t* const resident = call.resident + (std::int64_t{request} * call.num_slots + slot) * call.row_bytes;
  const std::uint8_t* source = nullptr;
  if (kind >= 0) source = resident;
  if (is_miss) source = HostRowOf(call, request, call.token_ids[row]);
  const std::int32_t second = is_miss ? chain[position] : kAbsent;

  const auto words = static_cast<std::uint32_t>(call.row_bytes / sizeof(Word));
  const auto* const from = reinterpret_cast<const Word*>(source);
  auto* const to = reinterpret_cast<Word*>(call.rows + row * call.row_bytes);
  for (std::uint32_t first = threadIdx.x % kLanes; first < words; first += kWords * kLanes) {
    Word held[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const std::uint32_t word = first + w * kLanes;
      held[w] = source != nullptr && word < words ? from[word] : Word{};
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const std::uint32_t word = first + w * kLanes;
      if (word >= words) continue;
      to[word] = held[w];
      if (!is_miss) continue;
      reinterpret_cast<Word*>(resident)[word] = held[w];
      for (std::int32_t other = second; other != kAbsent; other = chain[other]) {
        reinterpret_cast<Word*>(call.rows + (first_row + other) * call.row_bytes)[word] = held[w];
      }
    }
  }
}

template <class Word>
Status Copy(const TopkRows& call, const DeviceStream& where) {
  const std::int64_t ctas = call.batch * CtasOfRequest(call.k);
  if (ctas > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "CopyTopkRows");
  return LaunchKernel<TopkRows>(CopyTopkRows<Word>, dim3(static_cast<unsigned>(ctas)), dim3(Tuning::kCopyThreads), true,
                                StreamOf(where), "CopyTopkRows", call);
}

// Bytes of shared memory for the lists of a request; 0: it has not so much.
Status SharedBytes(const TopkRows& call, int device, int* bytes) {
  const std::int64_t wanted = 4 * (std::int64_t{call.num_slots} + 3 * std::int64_t{call.k});
  int most = 0;
  PADDLE_KV_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  *bytes = wanted <= most - Tuning::kSharedLeftBytes ? static_cast<int>(wanted) : 0;
  return {};
}

}  // namespace

Status GatherTopkRowsCuda(const TopkRows& call, const DeviceStream& where) {
  if (call.batch == 0 || call.k == 0) return {};
  if (call.batch > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "PlanTopkRows");
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  int shared_bytes = 0;
  PADDLE_KV_RETURN_IF_ERROR(SharedBytes(call, where.device, &shared_bytes));
  PADDLE_KV_CUDA(cudaFuncSetAttribute(PlanTopkRows, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  PlanTopkRows<<<static_cast<unsigned>(call.batch), Tuning::kPlanThreads, shared_bytes, StreamOf(where)>>>(
      call, shared_bytes > 0);
  PADDLE_KV_RETURN_IF_ERROR(LaunchStatus("PlanTopkRows"));
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(call.rows) |
                             reinterpret_cast<std::uintptr_t>(call.resident) |
                             reinterpret_cast<std::uintptr_t>(call.host) | static_cast<std::uint64_t>(call.row_bytes) |
                             static_cast<std::uint64_t>(call.block_stride);
  if (bits % 16 == 0) return Copy<uint4>(call, where);
  if (bits % 8 == 0) return Copy<uint2>(call, where);
  if (bits % 4 == 0) return Copy<std::uint32_t>(call, where);
  if (bits % 2 == 0) return Copy<std::uint16_t>(call, where);
  return Copy<std::uint8_t>(call, where);
}

}  // namespace paddle_kv
