// A table of 64-bit words in device memory for the kernels that are enqueued while it lives.
//
// The words travel as kernel parameters of a small kernel that stores them. Compared with a copy from host memory: it
// never waits for the stream (a pageable copy may), nothing on the host has to stay alive, and a captured graph carries
// the words themselves, where a captured copy would read freed host memory at each replay. The memory is taken and
// given back in stream order, so a table costs no synchronisation, and may be dropped when its last kernel is enqueued.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "paddle_kv/common/cuda_status.cuh"

namespace paddle_kv {

// Kernel parameters hold 32,764 bytes with every driver of CUDA 13, and 4 KiB everywhere.
constexpr int kWordsPerStore = CUDART_VERSION >= 13000 ? 4000 : 500;

struct TableWords {
  std::int64_t words[kWordsPerStore];
};

static __global__ void StoreTableWords(const __grid_constant__ TableWords from, std::int64_t* to, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from.words[i];
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

class DeviceTable {
 public:
  DeviceTable() = default;
  ~DeviceTable() {
    if (words_ != nullptr) cudaFreeAsync(words_, stream_);
  }
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;

  // Enqueues the stores. The device must be current. `words` may be freed on return.
  Status Store(const std::vector<std::int64_t>& words, const DeviceStream& where) {
    stream_ = StreamOf(where);
    cudaMemPool_t pool = nullptr;
    PADDLE_KV_RETURN_IF_ERROR(TablePool(where.device, &pool));
    void* memory = nullptr;
    PADDLE_KV_CUDA(cudaMallocFromPoolAsync(&memory, words.size() * sizeof(std::int64_t), pool, stream_));
    words_ = static_cast<std::int64_t*>(memory);
    TableWords piece;
    for (std::size_t first = 0; first < words.size(); first += kWordsPerStore) {
      const int count = static_cast<int>(std::min<std::size_t>(kWordsPerStore, words.size() - first));
      std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(first), count, piece.words);
      StoreTableWords<<<1, 256, 0, stream_>>>(piece, words_ + first, count);
      PADDLE_KV_RETURN_IF_ERROR(LaunchStatus("StoreTableWords"));
    }
    return {};
  }

  const std::int64_t* words() const { return words_; }

 private:
  std::int64_t* words_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace paddle_kv
