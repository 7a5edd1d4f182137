// Copies blocks between two memories, many tensors in one call. This is the one interface behind which the way of
// copying (copy engine, kernel) is chosen.
#pragma once

#include <cstdint>
#include <vector>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/transfer/block_rows.h"
#include "paddle_kv/transfer/runs.h"

namespace paddle_kv {

// Block source_ids[i] of each tensor is copied to target_ids[i], for i in [0, block_count). Targets are distinct and
// no target is a source; ids lie inside both memories (the caller has checked). Zero blocks is success.
void TransferBlocksCpu(const BlockRows* tensors, std::int64_t tensor_count, const std::int64_t* source_ids,
                       const std::int64_t* target_ids, std::int64_t block_count);

// The same for pairs that MergeRuns has put together. Enqueues; runs and descriptors are copied into the launches, so
// all arguments may be freed on return.
Status TransferBlocksCuda(const BlockRows* tensors, std::int64_t tensor_count, const std::vector<Run>& runs,
                          Direction direction, const DeviceStream& where);

}  // namespace paddle_kv
