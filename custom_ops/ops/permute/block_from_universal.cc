// block_from_universal: [blocks, heads, layers, outer, tokens, head size] to block stacks.
#include "../common/guarded_kernel.h"
#include "permute_glue.h"

namespace paddle_kv {

// Chunks are tensors, or where these are absent a list of addresses (see IdsAt): memory on `device` (-1: in RAM) or
// that it can reach.
void BlockFromUniversal(const paddle::Tensor& universal, const paddle::optional<std::vector<paddle::Tensor>>& chunks,
                        const std::vector<int64_t>& chunk_list, int64_t device, int64_t num_layers, int64_t num_outer,
                        bool heads_first, int64_t stream) {
  const GivenChunks given{chunks ? &*chunks : nullptr, IdsAt(chunk_list), device};
  PermuteUniversal(given, universal, "universal", num_layers, num_outer, heads_first, PermuteDirection::kFromDense,
                   stream);
}

void BlockFromUniversalInPlace(const paddle::Tensor& universal, std::vector<paddle::Tensor>& chunks,
                               const std::vector<int64_t>& chunk_list, int64_t device, int64_t num_layers,
                               int64_t num_outer, bool heads_first, int64_t stream) {
  BlockFromUniversal(universal, chunks, chunk_list, device, num_layers, num_outer, heads_first, stream);
}

}  // namespace paddle_kv

#define BLOCK_FROM_UNIVERSAL_ATTRS     \
  {"chunk_list: std::vector<int64_t>", \
   "device: int64_t",                  \
   "num_layers: int64_t",              \
   "num_outer: int64_t",               \
   "heads_first: bool",                \
   "stream: int64_t"}

// Registered twice: one that updates a list in place costs 1 us a tensor more, but only that one means anything in a
// traced program.
PD_BUILD_STATIC_OP(paddle_kv_block_from_universal)
    .Inputs({"universal", paddle::Optional(paddle::Vec("chunks"))})
    .Outputs({})
    .Attrs(BLOCK_FROM_UNIVERSAL_ATTRS)
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::BlockFromUniversal));

PD_BUILD_STATIC_OP(paddle_kv_block_from_universal_in_place)
    .Inputs({"universal", paddle::Vec("chunks")})
    .Outputs({paddle::Vec("chunks_out")})
    .Attrs(BLOCK_FROM_UNIVERSAL_ATTRS)
    .SetInplaceMap({{paddle::Vec("chunks"), paddle::Vec("chunks_out")}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::BlockFromUniversalInPlace));
