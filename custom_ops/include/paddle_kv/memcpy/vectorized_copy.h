// Copies a list of pieces of memory with a kernel, each in the widest words that its own two addresses agree on.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/memcpy/copy_pair.h"

namespace paddle_kv {

// Returns when the pieces are copied. Targets overlap nothing (the caller has checked); sizes are positive.
void VectorizedCopyCpu(const CopyPair* pairs, std::int64_t pair_count);

// Enqueues; the pairs are copied into the launches, so they may be freed on return. `touches_host`: some memory is
// page-locked host memory.
Status VectorizedCopyCuda(const CopyPair* pairs, std::int64_t pair_count, bool touches_host, const DeviceStream& where);

}  // namespace paddle_kv
