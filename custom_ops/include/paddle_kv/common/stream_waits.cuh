// A stream that waits until a counter in device memory has reached a value, or that writes one.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/driver_entry.cuh"

namespace paddle_kv {

// Fails where the device, the driver or the virtualisation cannot do it. The comparison is cyclic: counters may wrap.
inline Status WaitUntilReached(const std::uint32_t* counter, std::uint32_t value, cudaStream_t stream) {
  using Function = CUresult (*)(CUstream, CUdeviceptr, std::uint32_t, unsigned);
  static const auto wait = reinterpret_cast<Function>(DriverEntry("cuStreamWaitValue32", 12000));
  if (wait == nullptr) return ToStatus(cudaErrorNotSupported, "cuStreamWaitValue32");
  // The two error enumerations agree in the values that this call can give.
  return ToStatus(
      static_cast<cudaError_t>(wait(stream, reinterpret_cast<CUdeviceptr>(counter), value, CU_STREAM_WAIT_VALUE_GEQ)),
      "cuStreamWaitValue32");
}

// Whatever the stream did before can be seen by who sees the value.
inline Status WriteWord(std::uint32_t* word, std::uint32_t value, cudaStream_t stream) {
  using Function = CUresult (*)(CUstream, CUdeviceptr, std::uint32_t, unsigned);
  static const auto write = reinterpret_cast<Function>(DriverEntry("cuStreamWriteValue32", 12000));
  if (write == nullptr) return ToStatus(cudaErrorNotSupported, "cuStreamWriteValue32");
  return ToStatus(static_cast<cudaError_t>(
                      write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT)),
                  "cuStreamWriteValue32");
}

}  // namespace paddle_kv
