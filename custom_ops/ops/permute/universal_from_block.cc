// universal_from_block: block stacks to [blocks, heads, layers, outer, tokens, head size].
#include "../common/guarded_kernel.h"
#include "permute_glue.h"

namespace paddle_kv {

// Chunks are tensors, or where these are absent a list of addresses (see IdsAt): memory on `device` (-1: in RAM) or
// that it can reach.
void UniversalFromBlock(const paddle::optional<std::vector<paddle::Tensor>>& chunks, const paddle::Tensor& universal,
                        const std::vector<int64_t>& chunk_list, int64_t device, int64_t num_layers, int64_t num_outer,
                        bool heads_first, int64_t stream) {
  const GivenChunks given{chunks ? &*chunks : nullptr, IdsAt(chunk_list), device};
  PermuteUniversal(given, universal, "out", num_layers, num_outer, heads_first, PermuteDirection::kToDense, stream);
}

void UniversalFromBlockInPlace(const paddle::optional<std::vector<paddle::Tensor>>& chunks, paddle::Tensor& universal,
                               const std::vector<int64_t>& chunk_list, int64_t device, int64_t num_layers,
                               int64_t num_outer, bool heads_first, int64_t stream) {
  UniversalFromBlock(chunks, universal, chunk_list, device, num_layers, num_outer, heads_first, stream);
}

}  // namespace paddle_kv

#define UNIVERSAL_FROM_BLOCK_ATTRS     \
  {"chunk_list: std::vector<int64_t>", \
   "device: int64_t",                  \
   "num_layers: int64_t",              \
   "num_outer: int64_t",               \
   "heads_first: bool",                \
   "stream: int64_t"}

// Registered twice: one that updates a list in place costs 1 us a tensor more, but only that one means anything in a
// traced program.
PD_BUILD_STATIC_OP(paddle_kv_universal_from_block)
    .Inputs({paddle::Optional(paddle::Vec("chunks")), "universal"})
    .Outputs({})
    .Attrs(UNIVERSAL_FROM_BLOCK_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::UniversalFromBlock));

PD_BUILD_STATIC_OP(paddle_kv_universal_from_block_in_place)
    .Inputs({paddle::Optional(paddle::Vec("chunks")), "universal"})
    .Outputs({"universal_out"})
    .Attrs(UNIVERSAL_FROM_BLOCK_ATTRS)
    .SetInplaceMap({{"universal", "universal_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::UniversalFromBlockInPlace));
