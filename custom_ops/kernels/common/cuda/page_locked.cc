#include "paddle_kv/common/page_locked.h"

#include <cuda_runtime.h>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/device_context.cuh"

using namespace paddle_kv;

namespace {

int Answer(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();  // or it would be the error of the next launch
  return static_cast<int>(error);
}

}  // namespace

int paddle_kv_page_locked_allocate(std::int64_t bytes, void** address) {
  const AnyContext context;
  const CaptureTolerance tolerance;
  *address = nullptr;
  return Answer(cudaHostAlloc(address, static_cast<std::size_t>(bytes), cudaHostAllocPortable));
}

int paddle_kv_page_locked_free(void* address) {
  const AnyContext context;
  const CaptureTolerance tolerance;
  return Answer(cudaFreeHost(address));
}

int paddle_kv_page_lock_add(void* address, std::int64_t bytes) {
  const AnyContext context;
  const CaptureTolerance tolerance;
  return Answer(cudaHostRegister(address, static_cast<std::size_t>(bytes), cudaHostRegisterPortable));
}

int paddle_kv_page_lock_remove(void* address) {
  const AnyContext context;
  const CaptureTolerance tolerance;
  return Answer(cudaHostUnregister(address));
}
