// operational_from_block: block stacks to [blocks, layers, outer, inner].
#include "../common/guarded_kernel.h"
#include "permute_glue.h"

namespace paddle_kv {

// Chunks are tensors, or where these are absent a list of addresses (see IdsAt): memory on `device` (-1: in RAM) or
// that it can reach.
void OperationalFromBlock(const paddle::optional<std::vector<paddle::Tensor>>& chunks,
                          const paddle::Tensor& operational, const std::vector<int64_t>& chunk_list, int64_t device,
                          int64_t num_layers, int64_t num_outer, int64_t stream) {
  const GivenChunks given{chunks ? &*chunks : nullptr, IdsAt(chunk_list), device};
  PermuteOperational(given, operational, "out", num_layers, num_outer, PermuteDirection::kToDense, stream);
}

void OperationalFromBlockInPlace(const paddle::optional<std::vector<paddle::Tensor>>& chunks,
                                 paddle::Tensor& operational, const std::vector<int64_t>& chunk_list, int64_t device,
                                 int64_t num_layers, int64_t num_outer, int64_t stream) {
  OperationalFromBlock(chunks, operational, chunk_list, device, num_layers, num_outer, stream);
}

}  // namespace paddle_kv

#define OPERATIONAL_FROM_BLOCK_ATTRS                                                                   \
  {"chunk_list: std::vector<int64_t>", "device: int64_t", "num_layers: int64_t", "num_outer: int64_t", \
   "stream: int64_t"}

// Registered twice: one that updates a list in place costs 1 us a tensor more, but only that one means anything in a
// traced program.
PD_BUILD_STATIC_OP(paddle_kv_operational_from_block)
    .Inputs({paddle::Optional(paddle::Vec("chunks")), "operational"})
    .Outputs({})
    .Attrs(OPERATIONAL_FROM_BLOCK_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::OperationalFromBlock));

PD_BUILD_STATIC_OP(paddle_kv_operational_from_block_in_place)
    .Inputs({paddle::Optional(paddle::Vec("chunks")), "operational"})
    .Outputs({"operational_out"})
    .Attrs(OPERATIONAL_FROM_BLOCK_ATTRS)
    .SetInplaceMap({{"operational", "operational_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::OperationalFromBlockInPlace));
