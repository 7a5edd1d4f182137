// scatter_cache: contiguous rows of the tokens of many sequences, into their blocks.
#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/launch.h"
#include "../common/validate.h"
#include "cache_layout.h"
#include "paddle_kv/cache_write/move_tokens.h"
#include "token_map.h"

namespace paddle_kv {
namespace {

// The rows of a strided tensor of [tokens, heads, head size]; strides in elements. Paddle reports any stride for a
// dimension of size 1: it is never taken.
RowPlace PlaceOfRows(std::uint8_t* data, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                     int64_t element_bytes) {
  std::vector<int64_t> step(3);
  for (int d = 0; d < 3; ++d) step[d] = shape[d] == 1 ? 0 : strides[d] * element_bytes;
  const bool contiguous = shape[2] == 1 || strides[2] == 1;
  const int64_t row_bytes = shape[2] * element_bytes;
  return {data, 1, step[0], 0, step[1], step[2], contiguous ? row_bytes : element_bytes};
}

}  // namespace

// The tokens are in the tensor or, where Paddle would copy that, in memory described by `tokens_view`: the address, the
// shape and the strides; then Python has checked that dtype and device are those of the cache.
void ScatterCache(const paddle::optional<paddle::Tensor>& tokens, paddle::Tensor& cache,
                  const paddle::Tensor& block_table, const paddle::Tensor& cu_seq_lens,
                  const paddle::optional<paddle::Tensor>& starts, const std::vector<int64_t>& tokens_view,
                  const std::string& layout, int64_t stream) {
  const Layout cache_layout = LayoutOfCache(cache.shape().size(), layout);
  const CacheTensor to = CheckCacheTensor(cache, "cache", cache_layout);
  std::uint8_t* data = nullptr;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  if (tokens) {
    if (tokens->dtype() != cache.dtype()) {
      ThrowValueError("tokens has dtype " + DtypeName(tokens->dtype()) + ", cache " + DtypeName(cache.dtype()) +
                      "; both must have the same");
    }
    CheckSameDevice(*tokens, "tokens", cache, "cache");
    const StridedMemory memory = MemoryOf(*tokens);
    data = BytesOf(*tokens);
    shape = memory.shape;
    for (const int64_t stride : memory.strides) strides.push_back(stride / memory.item_bytes);
  } else if (!tokens_view.empty()) {
    const auto middle = tokens_view.begin() + 1 + (tokens_view.size() - 1) / 2;
    data = reinterpret_cast<std::uint8_t*>(tokens_view[0]);
    shape.assign(tokens_view.begin() + 1, middle);
    strides.assign(middle, tokens_view.end());
  }
  CheckAligned(data, to.element_bytes, "tokens");
  if (shape.empty() || shape != RowsShape(shape[0], to.shape, cache_layout)) {
    const std::string heads = cache_layout == Layout::kLatent ? "" : std::to_string(to.shape.heads) + ", ";
    ThrowValueError("tokens has shape " + ShapeText(shape) + "; [tokens, " + heads +
                    std::to_string(to.shape.head_size) + "] is expected for this cache");
  }
  if (cache_layout == Layout::kLatent) {  // one head
    shape.insert(shape.begin() + 1, 1);
    strides.insert(strides.begin() + 1, 0);
  }
  const DeviceStream where = OnGpu(cache) ? WhereOf(cache, stream) : DeviceStream{};
  const TokenMap map =
      CheckTokenMap(block_table, cu_seq_lens, starts, cache, to.shape, shape[0], BlockUse::kWritten, where);
  const RowPlace from = PlaceOfRows(data, shape, strides, to.element_bytes);
  const TokenMove move{
      from, to.place, map, to.shape.blocks, shape[0], to.shape.heads, to.shape.head_size, to.element_bytes};
  if (OnGpu(cache)) {
    LAUNCH_CUDA(where.device, ScatterTokensCuda(move, where));
  } else {
    ScatterTokensCpu(move);
  }
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_scatter_cache)
    .Inputs({paddle::Optional("tokens"), "cache", "block_table", "cu_seq_lens", paddle::Optional("starts")})
    .Outputs({"cache_out"})
    .Attrs({"tokens_view: std::vector<int64_t>", "layout: std::string", "stream: int64_t"})
    .SetInplaceMap({{"cache", "cache_out"}})
    .SetKernelFn(GUARDED_KERNEL_OF_VIEWS(paddle_kv::ScatterCache));
