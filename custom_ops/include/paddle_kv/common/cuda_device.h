// Facts about a device and a stream that the glue needs for its checks and messages.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

// Compute capability as one number: 90 for 9.0.
Status ComputeCapability(int device, int* architecture);

// Whether [first, first + bytes) is host memory that the GPU can reach at these addresses (page-locked or registered),
// in however many allocations. Where the driver does not tell their sizes, the first and the last byte are looked at.
Status HostRangeIsReachable(const void* first, std::int64_t bytes, int device, bool* reachable);

// Whether the stream is being captured into a CUDA graph: then nothing may wait for it.
Status StreamIsCapturing(const DeviceStream& where, bool* capturing);

// Copies device memory to the host behind the work on the stream, and blocks the calling thread until it is there.
Status CopyToHost(void* target, const void* source, std::int64_t bytes, const DeviceStream& where);

// Blocks the calling thread until all work on the stream is done.
Status SynchronizeStream(const DeviceStream& where);

}  // namespace paddle_kv
