// A table that the kernels read which are enqueued while it lives. Its rows are made of 64-bit words.
//
// The words go through page-locked memory. Kernels that copy inside the device read them there, which costs them
// nothing. Kernels that use the link to the host themselves get them in device memory, where a kernel has fetched them;
// the copy engine would do that only behind whatever upload it is busy with, milliseconds later. A captured graph would
// read page-locked memory that has long been given to another table: while a graph is captured, and where too many
// tables are in flight, the words travel as parameters of kernels that store them in device memory.
// Device memory is taken and given back in stream order. Nothing here waits for the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/table_ring.cuh"

namespace paddle_kv {

// Kernel parameters hold 32,764 bytes with every driver of CUDA 13, and 4 KiB everywhere.
constexpr int kWordsPerStore = CUDART_VERSION >= 13000 ? 4000 : 500;

struct TableWords {
  std::int64_t words[kWordsPerStore];
};

static __global__ void StoreTableWords(const __grid_constant__ TableWords from, std::int64_t* to, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from.words[i];
}

static __global__ void FetchTableWords(const std::int64_t* from, std::int64_t* to, std::int64_t count) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) to[i] = from[i];
}

// One pool a device, kept for the life of the process: the default pool gives its memory back at each synchronisation,
// and to tell it otherwise would change it for everybody.
inline Status TablePool(int device, cudaMemPool_t* pool) {
  constexpr std::uint64_t kKeptBytes = 32 << 20;
  static std::mutex mutex;
  static std::vector<cudaMemPool_t> pools;
  const std::lock_guard<std::mutex> lock(mutex);
  if (pools.size() <= static_cast<std::size_t>(device)) pools.resize(device + 1);
  if (pools[device] == nullptr) {
    const CaptureTolerance tolerance;
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;  // the only kind there is: device memory that does not move
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    cudaMemPool_t made = nullptr;
    PADDLE_KV_CUDA(cudaMemPoolCreate(&made, &properties));
    std::uint64_t kept_bytes = kKeptBytes;
    PADDLE_KV_CUDA(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &kept_bytes));
    pools[device] = made;
  }
  *pool = pools[device];
  return {};
}

class KernelTable {
 public:
  KernelTable() = default;
  ~KernelTable() {
    if (region_ != nullptr) TableRing::Of(where_.device).GiveBack(region_, StreamOf(where_));
    if (on_device_ != nullptr) ToStatus(cudaFreeAsync(on_device_, StreamOf(where_)), "cudaFreeAsync");
  }
  KernelTable(const KernelTable&) = delete;
  KernelTable& operator=(const KernelTable&) = delete;

  // `uses_host_link`: the kernels move data between host and device. The device must be current. The rows may be freed
  // on return.
  template <class Row>
  Status Store(const std::vector<Row>& rows, bool uses_host_link, const DeviceStream& where) {
    static_assert(sizeof(Row) % sizeof(std::int64_t) == 0, "a row is made of words");
    return Store(reinterpret_cast<const std::int64_t*>(rows.data()), rows.size() * sizeof(Row) / sizeof(std::int64_t),
                 uses_host_link, where);
  }

  template <class Row>
  const Row* rows() const {
    return reinterpret_cast<const Row*>(on_device_ != nullptr ? on_device_ : region_->words);
  }

 private:
  Status Store(const std::int64_t* words, std::size_t count, bool uses_host_link, const DeviceStream& where) {
    where_ = where;
    const cudaStream_t stream = StreamOf(where);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    PADDLE_KV_CUDA(cudaStreamIsCapturing(stream, &capture));
    if (capture == cudaStreamCaptureStatusNone) {
      const CaptureTolerance tolerance;
      region_ = TableRing::Of(where.device).Take(count);
    }
    if (region_ != nullptr) std::memcpy(region_->words, words, count * sizeof(std::int64_t));
    if (region_ != nullptr && !uses_host_link) return {};
    cudaMemPool_t pool = nullptr;
    PADDLE_KV_RETURN_IF_ERROR(TablePool(where.device, &pool));
    void* memory = nullptr;
    PADDLE_KV_CUDA(cudaMallocFromPoolAsync(&memory, count * sizeof(std::int64_t), pool, stream));
    on_device_ = static_cast<std::int64_t*>(memory);
    if (region_ == nullptr) return StoreParameters(words, count);
    constexpr int kThreads = 256;
    constexpr int kMostCtas = 16;
    const int ctas = static_cast<int>(std::min<std::size_t>(kMostCtas, (count + kThreads - 1) / kThreads));
    FetchTableWords<<<ctas, kThreads, 0, stream>>>(region_->words, on_device_, static_cast<std::int64_t>(count));
    return LaunchStatus("FetchTableWords");
  }

  Status StoreParameters(const std::int64_t* words, std::size_t count) {
    TableWords piece;
    for (std::size_t first = 0; first < count; first += kWordsPerStore) {
      const std::size_t stored = std::min<std::size_t>(kWordsPerStore, count - first);
      std::copy_n(words + first, stored, piece.words);
      StoreTableWords<<<1, 256, 0, StreamOf(where_)>>>(piece, on_device_ + first, static_cast<int>(stored));
      PADDLE_KV_RETURN_IF_ERROR(LaunchStatus("StoreTableWords"));
    }
    return {};
  }

  DeviceStream where_;
  TableRegion* region_ = nullptr;
  std::int64_t* on_device_ = nullptr;
};

}  // namespace paddle_kv
