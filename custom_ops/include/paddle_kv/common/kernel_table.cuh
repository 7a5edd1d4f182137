// A table that the kernels read which are enqueued while it lives. Its rows are made of 64-bit words.
//
// It lies in page-locked host memory, and the kernels read it there. That costs a kernel with much to copy nothing, and
// needs neither device memory nor a copy, which beside a long upload would wait for the copy engine for milliseconds.
// A captured graph would read memory that has long been given to the next table: while a graph is captured, the words
// travel as parameters of a small kernel that stores them in memory of the graph. The same where too many tables are in
// flight: nothing here waits for the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "paddle_kv/common/cuda_status.cuh"

namespace paddle_kv {

// Lets this thread ask for events and memory although some other stream may be captured into a graph at this time.
class CaptureTolerance {
 public:
  CaptureTolerance() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureTolerance() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  CaptureTolerance(const CaptureTolerance&) = delete;
  CaptureTolerance& operator=(const CaptureTolerance&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Page-locked memory for one table at a time.
struct TableSlot {
  std::int64_t* words = nullptr;
  std::size_t count = 0;
  cudaEvent_t done = nullptr;  // of the last table
  bool taken = false;
};

// The slots of one device, kept for the life of the process.
class TableSlots {
 public:
  static TableSlots& Of(int device) {
    static std::mutex mutex;
    static auto& all = *new std::vector<std::unique_ptr<TableSlots>>;  // never destroyed: CUDA may be gone by then
    const std::lock_guard<std::mutex> lock(mutex);
    while (all.size() <= static_cast<std::size_t>(device)) all.push_back(std::make_unique<TableSlots>());
    return *all[device];
  }

  // A slot that no kernel reads any more; null if there is none and no more can be made. The device must be current.
  TableSlot* Take(std::size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& slot : slots_) {
      if (slot->taken || slot->count < count) continue;
      if (cudaEventQuery(slot->done) == cudaSuccess) {
        slot->taken = true;
        return slot.get();
      }
      cudaGetLastError();  // "not ready" must not be reported by the next launch
    }
    return count_ + count <= kMostWords ? Make(count) : nullptr;
  }

  // The work that is on the stream now is the last to read the slot.
  void GiveBack(TableSlot* slot, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (cudaEventRecord(slot->done, stream) == cudaSuccess) slot->taken = false;
  }

 private:
  static constexpr std::size_t kMostWords = std::size_t{4} << 20;
  static constexpr std::size_t kFewestWords = std::size_t{16} << 10;

  TableSlot* Make(std::size_t count) {
    auto slot = std::make_unique<TableSlot>();
    slot->count = kFewestWords;
    while (slot->count < count) slot->count *= 2;
    void** words = reinterpret_cast<void**>(&slot->words);
    if (cudaHostAlloc(words, slot->count * sizeof(std::int64_t), cudaHostAllocDefault) != cudaSuccess ||
        cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming) != cudaSuccess) {
      cudaGetLastError();
      cudaFreeHost(slot->words);
      return nullptr;
    }
    slot->taken = true;
    count_ += slot->count;
    slots_.push_back(std::move(slot));
    return slots_.back().get();
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<TableSlot>> slots_;
  std::size_t count_ = 0;  // words of all slots
};

// Kernel parameters hold 32,764 bytes with every driver of CUDA 13, and 4 KiB everywhere.
constexpr int kWordsPerStore = CUDART_VERSION >= 13000 ? 4000 : 500;

struct TableWords {
  std::int64_t words[kWordsPerStore];
};

static __global__ void StoreTableWords(const __grid_constant__ TableWords from, std::int64_t* to, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from.words[i];
}

class KernelTable {
 public:
  KernelTable() = default;
  ~KernelTable() {
    if (slot_ != nullptr) TableSlots::Of(where_.device).GiveBack(slot_, StreamOf(where_));
    if (stored_ != nullptr) cudaFreeAsync(stored_, StreamOf(where_));
  }
  KernelTable(const KernelTable&) = delete;
  KernelTable& operator=(const KernelTable&) = delete;

  // The device must be current. The rows may be freed on return.
  template <class Row>
  Status Store(const std::vector<Row>& rows, const DeviceStream& where) {
    static_assert(sizeof(Row) % sizeof(std::int64_t) == 0, "a row is made of words");
    where_ = where;
    const auto* words = reinterpret_cast<const std::int64_t*>(rows.data());
    const std::size_t count = rows.size() * (sizeof(Row) / sizeof(std::int64_t));
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    PADDLE_KV_CUDA(cudaStreamIsCapturing(StreamOf(where), &capture));
    if (capture == cudaStreamCaptureStatusNone) {
      const CaptureTolerance tolerance;
      slot_ = TableSlots::Of(where.device).Take(count);
    }
    if (slot_ == nullptr) return StoreOnDevice(words, count);
    std::memcpy(slot_->words, words, count * sizeof(std::int64_t));
    return {};
  }

  template <class Row>
  const Row* rows() const {
    return reinterpret_cast<const Row*>(slot_ != nullptr ? slot_->words : stored_);
  }

 private:
  Status StoreOnDevice(const std::int64_t* words, std::size_t count) {
    const cudaStream_t stream = StreamOf(where_);
    void* memory = nullptr;
    PADDLE_KV_CUDA(cudaMallocAsync(&memory, count * sizeof(std::int64_t), stream));
    stored_ = static_cast<std::int64_t*>(memory);
    TableWords piece;
    for (std::size_t first = 0; first < count; first += kWordsPerStore) {
      const std::size_t stored = std::min<std::size_t>(kWordsPerStore, count - first);
      std::copy_n(words + first, stored, piece.words);
      StoreTableWords<<<1, 256, 0, stream>>>(piece, stored_ + first, static_cast<int>(stored));
      PADDLE_KV_RETURN_IF_ERROR(LaunchStatus("StoreTableWords"));
    }
    return {};
  }

  DeviceStream where_;
  TableSlot* slot_ = nullptr;
  std::int64_t* stored_ = nullptr;
};

}  // namespace paddle_kv
