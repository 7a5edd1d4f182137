#include "mixed_latent.h"

#include "../common/element_type.h"
#include "../common/errors.h"
#include "../common/validate.h"

namespace paddle_kv {

MixedLatent CheckMixedLatent(const CacheTensor& cache, const paddle::Tensor& tensor, const std::string& name) {
  const std::string what = name + " with kv_cache_dtype \"" + MixedLatent::kName + "\" has ";
  if (cache.shape.heads != 1 || cache.shape.head_size != MixedLatent::kTokenBytes) {
    ThrowValueError(what + "shape " + ShapeText(tensor.shape()) + "; [blocks, block size, " +
                    std::to_string(MixedLatent::kTokenBytes) + "] is expected");
  }
  if (tensor.dtype() != paddle::DataType::UINT8) {
    ThrowValueError(what + "dtype " + DtypeName(tensor.dtype()) + "; uint8 is expected");
  }
  const RowPlace& place = cache.place;
  if ((reinterpret_cast<std::uintptr_t>(place.data) | static_cast<std::uint64_t>(place.block_stride) |
       static_cast<std::uint64_t>(place.token_stride)) %
          sizeof(float) !=
      0) {
    ThrowValueError(what + "tokens at addresses that are no multiples of " + std::to_string(sizeof(float)) +
                    " bytes; their scales must be aligned");
  }
  MixedLatent parts{place, {}, place};
  parts.codes.head_stride = parts.codes.group_stride = parts.codes.group_bytes = MixedLatent::kGroupSize;
  parts.scales.data = reinterpret_cast<float*>(place.data + MixedLatent::kScalesAt);
  parts.scales.stride_per_block = place.block_stride / static_cast<int64_t>(sizeof(float));
  parts.scales.stride_per_token = place.token_stride / static_cast<int64_t>(sizeof(float));
  parts.scales.stride_per_head = 1;
  parts.rope.data += MixedLatent::kRopeAt;
  parts.rope.head_stride = 0;
  parts.rope.group_stride = parts.rope.group_bytes = MixedLatent::kRope * MixedLatent::kElementBytes;
  return parts;
}

}  // namespace paddle_kv
