#include "paddle_kv/common/kernel_table.cuh"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/kernel_parameters.cuh"

namespace paddle_kv {
namespace {

template <int kCount>
struct TableWords {
  std::int64_t words[kCount];
};

template <int kWords>
__global__ void StoreTableWords(const __grid_constant__ TableWords<kWords> from, std::int64_t* to, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from.words[i];
}

__global__ void FetchTableWords(const std::int64_t* from, std::int64_t* to, std::int64_t count) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) to[i] = from[i];
}

// One pool a device, kept for the life of the process: the default pool gives its memory back at each synchronisation,
// and to tell it otherwise would change it for everybody.
Status TablePool(int device, cudaMemPool_t* pool) {
  constexpr std::uint64_t kKeptBytes = 32 << 20;
  static std::mutex& mutex = *new std::mutex;  // never destroyed: other threads may still come when the process ends
  static auto& pools = *new std::vector<cudaMemPool_t>;
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

template <int kParameterBytes>
Status StoreInParts(const std::int64_t* words, std::size_t count, std::int64_t* to, cudaStream_t stream) {
  constexpr int kWords = kParameterBytes / 8 - 2;
  static_assert(sizeof(TableWords<kWords>) + sizeof(to) + sizeof(int) <= kParameterBytes);
  TableWords<kWords> piece;
  for (std::size_t first = 0; first < count; first += kWords) {
    const std::size_t stored = std::min<std::size_t>(kWords, count - first);
    std::copy_n(words + first, stored, piece.words);
    StoreTableWords<<<1, 256, 0, stream>>>(piece, to + first, static_cast<int>(stored));
    PADDLE_KV_RETURN_IF_ERROR(LaunchStatus("StoreTableWords"));
  }
  return {};
}

}  // namespace

Status KernelTable::Store(const std::int64_t* words, std::size_t count, bool uses_host_link,
                          const DeviceStream& where) {
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

Status KernelTable::StoreParameters(const std::int64_t* words, std::size_t count) {
  const cudaStream_t stream = StreamOf(where_);
  return HasLargeParameters() ? StoreInParts<kLargestParameterBytes>(words, count, on_device_, stream)
                              : StoreInParts<kSmallParameterBytes>(words, count, on_device_, stream);
}

}  // namespace paddle_kv
