// reshard_universal: the heads of universal tensors, cut for another number of tensor-parallel ranks.
#include <algorithm>

#include "../common/guarded_kernel.h"
#include "permute_glue.h"

namespace paddle_kv {
namespace {

// Heads [first, end) of all blocks, from one tensor to another. Both are [blocks, heads, ...] with the same inner part.
void CopyHeads(const paddle::Tensor& source, const paddle::Tensor& target, int64_t source_head, int64_t target_head,
               int64_t head_count, int64_t head_bytes, const Placement& place) {
  PermuteShape shape;
  shape.blocks = source.shape()[0];
  shape.chunks = 1;
  shape.heads = 1;
  shape.tokens = head_count;
  shape.row_bytes = head_bytes;
  const auto base = reinterpret_cast<int64_t>(source.data()) + source_head * head_bytes;
  ChunkSide from;
  from.bases = &base;
  from.base_count = 1;
  from.block_stride = source.shape()[1] * head_bytes;
  from.token_stride = head_bytes;
  DenseSide to;
  to.base = BytesOf(target) + target_head * head_bytes;
  to.block_stride = target.shape()[1] * head_bytes;
  to.token_stride = head_bytes;
  if (place.on_gpu) {
    LAUNCH_CUDA(place.where.device,
                PermuteChunksCuda(shape, from, to, PermuteDirection::kToDense, place.touches_host, place.where));
  } else {
    PermuteChunksCpu(shape, from, to, PermuteDirection::kToDense);
  }
}

}  // namespace

// Targets are new tensors, [blocks, heads / their number, ...].
void ReshardUniversal(const std::vector<paddle::Tensor>& parts, const std::vector<paddle::Tensor>& targets,
                      int64_t stream) {
  const int64_t part_bytes = CheckAlike({parts, "parts"});
  const int64_t target_bytes = CheckAlike({targets, "targets"});
  const std::vector<int64_t> size = parts.front().shape();
  if (size.size() != 6) {
    ThrowValueError("parts have shape " + ShapeText(size) +
                    "; [blocks, heads, layers, outer, tokens, head size] is expected");
  }
  const auto source_tp = static_cast<int64_t>(parts.size());
  const auto target_tp = static_cast<int64_t>(targets.size());
  const int64_t source_heads = size[1];
  const int64_t head_count = CheckedProduct(source_heads, source_tp, "heads of all parts");
  const int64_t target_heads = head_count / target_tp;
  std::vector<int64_t> expected = size;
  expected[1] = target_heads;
  if (head_count % target_tp != 0 || targets.front().shape() != expected ||
      targets.front().dtype() != parts.front().dtype()) {
    ThrowValueError("targets do not hold the heads of the parts");
  }
  const Placement place = PlaceTensors({{parts, "parts"}, {targets, "targets"}}, stream);
  if (part_bytes == 0 || target_bytes == 0) return;
  const int64_t head_bytes = part_bytes / (size[0] * source_heads);
  for (int64_t head = 0; head < head_count;) {
    const int64_t source = head / source_heads;
    const int64_t target = head / target_heads;
    const int64_t end = std::min((source + 1) * source_heads, (target + 1) * target_heads);
    CopyHeads(parts[source], targets[target], head - source * source_heads, head - target * target_heads, end - head,
              head_bytes, place);
    head = end;
  }
}

void ReshardUniversalInPlace(const std::vector<paddle::Tensor>& parts, std::vector<paddle::Tensor>& targets,
                             int64_t stream) {
  ReshardUniversal(parts, targets, stream);
}

}  // namespace paddle_kv

#define RESHARD_UNIVERSAL_INPUTS {paddle::Vec("parts"), paddle::Vec("targets")}

// Registered twice: only the operator with outputs means anything in a traced program.
PD_BUILD_STATIC_OP(paddle_kv_reshard_universal)
    .Inputs(RESHARD_UNIVERSAL_INPUTS)
    .Outputs({})
    .Attrs({"stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ReshardUniversal));

PD_BUILD_STATIC_OP(paddle_kv_reshard_universal_in_place)
    .Inputs(RESHARD_UNIVERSAL_INPUTS)
    .Outputs({paddle::Vec("targets_out")})
    .Attrs({"stream: int64_t"})
    .SetInplaceMap({{paddle::Vec("targets"), paddle::Vec("targets_out")}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ReshardUniversalInPlace));
