// Buffers for small tables that kernels read: filled on the host, copied to the device by the copy engine. A store
// kernel (KernelTable) would have to wait until a multiprocessor is free, which beside matrix products takes longer
// than the upload; and the list here may be of any length.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "paddle_kv/common/cuda_owners.cuh"
#include "paddle_kv/common/cuda_status.cuh"

namespace paddle_kv {

// Page-locked memory, the device memory it is copied to, and an event that is done when both are free again.
class UploadBuffer {
 public:
  UploadBuffer() = default;
  ~UploadBuffer() {
    if (released_) cudaEventSynchronize(released_.get());
  }
  UploadBuffer(const UploadBuffer&) = delete;
  UploadBuffer& operator=(const UploadBuffer&) = delete;

  Status Allocate(std::size_t bytes) {
    PADDLE_KV_CUDA(MakeEvent(&released_));
    PADDLE_KV_CUDA(cudaHostAlloc(host_.Receive(), bytes, cudaHostAllocDefault));
    PADDLE_KV_CUDA(cudaMalloc(device_.Receive(), bytes));
    bytes_ = bytes;
    return {};
  }

  // One that was taken and never released stays in use: what was enqueued with it may still be to come.
  bool IsFree() const {
    if (is_taken_) return false;
    const cudaError_t state = cudaEventQuery(released_.get());
    if (state != cudaSuccess) cudaGetLastError();
    return state == cudaSuccess;
  }
  void Take() { is_taken_ = true; }
  std::size_t bytes() const { return bytes_; }
  std::uint8_t* host() const { return static_cast<std::uint8_t*>(host_.get()); }
  std::uint8_t* device() const { return static_cast<std::uint8_t*>(device_.get()); }

  Status Upload(std::size_t bytes, cudaStream_t stream) {
    PADDLE_KV_CUDA(cudaMemcpyAsync(device_.get(), host_.get(), bytes, cudaMemcpyHostToDevice, stream));
    return {};
  }
  // The work that is on the stream now is the last to use the buffer.
  Status ReleaseBehind(cudaStream_t stream) {
    PADDLE_KV_CUDA(cudaEventRecord(released_.get(), stream));
    is_taken_ = false;
    return {};
  }

 private:
  bool is_taken_ = false;
  std::size_t bytes_ = 0;
  PinnedMemory host_;
  DeviceMemory device_;
  CudaEvent released_;
};

class UploadBuffers {
 public:
  // A buffer that nothing uses any more. There are as many as calls have been in flight at once.
  Status Take(std::size_t bytes, UploadBuffer** taken) {
    for (const auto& buffer : buffers_) {
      if (buffer->bytes() >= bytes && buffer->IsFree()) {
        buffer->Take();
        *taken = buffer.get();
        return {};
      }
    }
    std::size_t size = kSmallestBytes;
    while (size < bytes) size *= 2;
    auto made = std::make_unique<UploadBuffer>();
    PADDLE_KV_RETURN_IF_ERROR(made->Allocate(size));
    made->Take();
    buffers_.push_back(std::move(made));
    *taken = buffers_.back().get();
    return {};
  }
  // Waits for the work that uses them.
  void clear() { buffers_.clear(); }

 private:
  static constexpr std::size_t kSmallestBytes = 64 << 10;
  std::vector<std::unique_ptr<UploadBuffer>> buffers_;
};

}  // namespace paddle_kv
