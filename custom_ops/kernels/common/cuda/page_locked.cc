#include "paddle_kv/common/page_locked.h"

#include <cuda_runtime.h>

#include <exception>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/device_context.cuh"
#include "paddle_kv/common/parallel_for.h"

using namespace paddle_kv;

namespace {

int Answer(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();  // or it would be the error of the next launch
  return static_cast<int>(error);
}

// CUDA asks the system for the pages one by one, from one thread. Writes nothing but what is there: another process may
// have the memory too.
void TouchPages(char* first, std::int64_t bytes) {
  constexpr std::int64_t kPageBytes = 4096;  // the smallest: larger ones are touched more than once
  try {
    ParallelFor((bytes + kPageBytes - 1) / kPageBytes, bytes, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t page = begin; page < end; ++page) {
        __atomic_fetch_or(first + page * kPageBytes, 0, __ATOMIC_RELAXED);
      }
    });
  } catch (const std::exception&) {
    // No memory for threads: CUDA asks for the pages.
  }
}

}  // namespace

int paddle_kv_page_lock_add(void* address, std::int64_t bytes) {
  TouchPages(static_cast<char*>(address), bytes);
  const AnyContext context;
  const CaptureTolerance tolerance;
  return Answer(cudaHostRegister(address, static_cast<std::size_t>(bytes), cudaHostRegisterPortable));
}

int paddle_kv_page_lock_remove(void* address) {
  const AnyContext context;
  const CaptureTolerance tolerance;
  return Answer(cudaHostUnregister(address));
}
