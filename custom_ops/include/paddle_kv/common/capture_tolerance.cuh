#pragma once

#include <cuda_runtime.h>

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

}  // namespace paddle_kv
