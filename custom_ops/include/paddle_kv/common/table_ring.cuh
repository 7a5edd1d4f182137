// Page-locked memory for tables that kernels read, handed out in turn and taken back when the kernels are done.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "paddle_kv/common/cuda_status.cuh"

namespace paddle_kv {

struct TableRegion {
  std::int64_t* words;
  std::size_t first;  // in the ring
  std::size_t count;
  cudaEvent_t done;  // of the kernels that read it
  bool given_back;
};

// One for each device, allocated when it is first used and kept for the life of the process: to allocate page-locked
// memory may wait for the device.
class TableRing {
 public:
  static TableRing& Of(int device) {
    static std::mutex& mutex = *new std::mutex;
    static auto& rings = *new std::vector<std::unique_ptr<TableRing>>;  // never destroyed: CUDA may be gone by then
    const std::lock_guard<std::mutex> lock(mutex);
    while (rings.size() <= static_cast<std::size_t>(device)) rings.push_back(std::make_unique<TableRing>());
    return *rings[device];
  }

  // Null if there is no room until kernels have finished. Waits for nothing. The device must be current.
  TableRegion* Take(std::size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (words_ == nullptr && !Allocate()) return nullptr;
    while (!regions_.empty() && regions_.front()->given_back && IsDone(*regions_.front())) {
      spare_events_.push_back(regions_.front()->done);
      regions_.pop_front();
    }
    std::size_t first = 0;
    if (!FindRoom(count, &first)) return nullptr;
    cudaEvent_t done = nullptr;
    if (!spare_events_.empty()) {
      done = spare_events_.back();
      spare_events_.pop_back();
    } else if (cudaEventCreateWithFlags(&done, cudaEventDisableTiming) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    regions_.push_back(std::make_unique<TableRegion>(TableRegion{words_ + first, first, count, done, false}));
    return regions_.back().get();
  }

  // The work that is on the stream now is the last to read the region.
  void GiveBack(TableRegion* region, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    region->given_back = ToStatus(cudaEventRecord(region->done, stream), "cudaEventRecord").ok();
  }

 private:
  static constexpr std::size_t kWords = std::size_t{2} << 20;

  bool Allocate() {
    void** words = reinterpret_cast<void**>(&words_);
    if (cudaHostAlloc(words, kWords * sizeof(std::int64_t), cudaHostAllocDefault) == cudaSuccess) return true;
    cudaGetLastError();
    return false;
  }

  static bool IsDone(const TableRegion& region) {
    if (cudaEventQuery(region.done) == cudaSuccess) return true;
    cudaGetLastError();  // "not ready" must not be reported by the next launch
    return false;
  }

  // Regions lie in the order in which they were taken, from the oldest on and around the end.
  bool FindRoom(std::size_t count, std::size_t* first) const {
    if (regions_.empty()) {
      *first = 0;
      return count <= kWords;
    }
    const std::size_t oldest = regions_.front()->first;
    const std::size_t end = regions_.back()->first + regions_.back()->count;
    const bool around = regions_.back()->first < oldest;
    *first = end;
    if (around) return end + count <= oldest;
    if (end + count <= kWords) return true;
    *first = 0;
    return count <= oldest;
  }

  std::mutex mutex_;
  std::int64_t* words_ = nullptr;
  std::deque<std::unique_ptr<TableRegion>> regions_;
  std::vector<cudaEvent_t> spare_events_;
};

}  // namespace paddle_kv
