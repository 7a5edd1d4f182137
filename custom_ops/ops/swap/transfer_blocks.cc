// transfer_blocks: blocks of one tensor to another tensor, each on the GPU, in pinned memory or on the CPU.
#include "paddle_kv/swap/transfer_blocks.h"

#include "../common/guarded_kernel.h"
#include "../common/host_range.h"
#include "../common/launch.h"
#include "../common/validate.h"

namespace paddle_kv {
void TransferBlocks(const paddle::Tensor& source, const paddle::Tensor& target, const std::vector<int64_t>& source_ids,
                    const std::vector<int64_t>& target_ids, int64_t stream) {
  const int64_t block_bytes = CheckCache(source, "source");
  CheckCache(target, "target");
  const auto source_shape = source.shape();
  const auto target_shape = target.shape();
  if (source.dtype() != target.dtype()) {
    ThrowValueError("source has dtype " + phi::DataTypeToString(source.dtype()) + ", target has " +
                    phi::DataTypeToString(target.dtype()) + "; both must have the same");
  }
  if (std::vector<int64_t>(source_shape.begin() + 1, source_shape.end()) !=
      std::vector<int64_t>(target_shape.begin() + 1, target_shape.end())) {
    ThrowValueError("source has shape " + ShapeText(source_shape) + ", target has " + ShapeText(target_shape) +
                    "; all dimensions but the first must agree");
  }
  CheckSameLength(source_ids, "sources of block_mapping", target_ids, "targets of block_mapping");
  CheckIds(source_ids, "sources of block_mapping", source_shape[0]);
  CheckIds(target_ids, "targets of block_mapping", target_shape[0]);
  CheckDistinct(target_ids, "block_mapping");
  const int64_t source_bytes = source_shape[0] * block_bytes;
  const int64_t target_bytes = target_shape[0] * block_bytes;
  if (source.data() == target.data()) {
    CheckDisjoint(source_ids, "the sources", target_ids, "the targets of block_mapping");
  } else if (BytesOf(source) < BytesOf(target) + target_bytes && BytesOf(target) < BytesOf(source) + source_bytes) {
    ThrowValueError("source and target share memory but do not start at the same block; use one tensor for both");
  }

  const BlockRows rows = {BytesOf(source), BytesOf(target), block_bytes, block_bytes, block_bytes};
  const auto block_count = static_cast<int64_t>(source_ids.size());
  if (!OnGpu(source) && !OnGpu(target)) {
    TransferBlocksCpu(&rows, 1, source_ids.data(), target_ids.data(), block_count);
    return;
  }
  const DeviceStream where = WhereOf(OnGpu(source) ? source : target, stream);
  if (OnGpu(source) && OnGpu(target) && DeviceOf(source) != DeviceOf(target)) {
    ThrowValueError("source and target are on different GPUs; both must be on one");
  }
  if (!OnGpu(source)) CheckReachable(source, "source", where.device);
  if (!OnGpu(target)) CheckReachable(target, "target", where.device);
  const Direction direction = !OnGpu(source)   ? Direction::kHostToDevice
                              : !OnGpu(target) ? Direction::kDeviceToHost
                                               : Direction::kDeviceToDevice;
  LAUNCH_CUDA(where.device, TransferBlocksCuda(&rows, 1, MergeRuns(source_ids.data(), target_ids.data(), block_count),
                                               direction, where));
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_transfer_blocks)
    .Inputs({"source", "target"})
    .Outputs({})
    .Attrs({"source_ids: std::vector<int64_t>", "target_ids: std::vector<int64_t>", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::TransferBlocks));
