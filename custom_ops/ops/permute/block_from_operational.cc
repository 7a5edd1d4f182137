// block_from_operational: [blocks, layers, outer, inner] to block stacks.
#include "../common/guarded_kernel.h"
#include "permute_glue.h"

namespace paddle_kv {

// Chunks are tensors, or where these are absent a list of addresses (see IdsAt): memory on `device` (-1: in RAM) or
// that it can reach.
void BlockFromOperational(const paddle::Tensor& operational,
                          const paddle::optional<std::vector<paddle::Tensor>>& chunks,
                          const std::vector<int64_t>& chunk_list, int64_t device, int64_t num_layers, int64_t num_outer,
                          int64_t stream) {
  const GivenChunks given{chunks ? &*chunks : nullptr, IdsAt(chunk_list), device};
  PermuteOperational(given, operational, "operational", num_layers, num_outer, PermuteDirection::kFromDense, stream);
}

void BlockFromOperationalInPlace(const paddle::Tensor& operational, std::vector<paddle::Tensor>& chunks,
                                 const std::vector<int64_t>& chunk_list, int64_t device, int64_t num_layers,
                                 int64_t num_outer, int64_t stream) {
  BlockFromOperational(operational, chunks, chunk_list, device, num_layers, num_outer, stream);
}

}  // namespace paddle_kv

#define BLOCK_FROM_OPERATIONAL_ATTRS                                                                   \
  {"chunk_list: std::vector<int64_t>", "device: int64_t", "num_layers: int64_t", "num_outer: int64_t", \
   "stream: int64_t"}

// Registered twice: one that updates a list in place costs 1 us a tensor more, but only that one means anything in a
// traced program.
PD_BUILD_STATIC_OP(paddle_kv_block_from_operational)
    .Inputs({"operational", paddle::Optional(paddle::Vec("chunks"))})
    .Outputs({})
    .Attrs(BLOCK_FROM_OPERATIONAL_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::BlockFromOperational));

PD_BUILD_STATIC_OP(paddle_kv_block_from_operational_in_place)
    .Inputs({"operational", paddle::Vec("chunks")})
    .Outputs({paddle::Vec("chunks_out")})
    .Attrs(BLOCK_FROM_OPERATIONAL_ATTRS)
    .SetInplaceMap({{paddle::Vec("chunks"), paddle::Vec("chunks_out")}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::BlockFromOperationalInPlace));
