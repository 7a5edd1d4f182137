// Facts about a device and a stream that the glue needs for its checks and messages.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

// Compute capability as one number: 90 for 9.0.
Status ComputeCapability(int device, int* architecture);

// Whether [first, first + bytes) is host memory that the GPU can reach at these addresses (page-locked or registered).
// Looks at the first and at the last byte.
Status HostRangeIsReachable(const void* first, std::int64_t bytes, int device, bool* reachable);

Status StreamIsCapturing(const DeviceStream& where, bool* capturing);

// Blocks the calling thread until all work on the stream is done.
Status SynchronizeStream(const DeviceStream& where);

}  // namespace paddle_kv
