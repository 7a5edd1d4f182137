// The copies between the host and one slot of staging.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "paddle_kv/common/status.h"
#include "paddle_kv/memcpy/copy_pair.h"
#include "paddle_kv/transfer/staging_fills.h"

namespace paddle_kv {

// Used by one thread at a time.
class HostCopies {
 public:
  // Whether the link moves the pieces sooner than one thread describes them, for they are small. Of others a second
  // stream brings no more, but makes products beside it take longer.
  static bool AreMany(const Packed& packed, const Fill& fill);

  // The device must be current. Throws std::bad_alloc.
  Status Enqueue(const Packed& packed, const Fill& fill, std::uint8_t* slot, bool to_host, int device,
                 cudaStream_t stream);

 private:
  Status AddRows(const HostRow& row, std::uint8_t* staged, std::uint8_t* host, std::int64_t count, bool to_host,
                 cudaStream_t stream);

  std::vector<CopyPair> pieces_;
};

}  // namespace paddle_kv
