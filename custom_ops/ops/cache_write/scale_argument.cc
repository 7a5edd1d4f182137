#include "scale_argument.h"

#include "../common/element_type.h"
#include "../common/errors.h"
#include "../common/validate.h"

namespace paddle_kv {

std::vector<int64_t> ScaleShape(const CacheShape& cache, const std::string& scale_layout) {
  if (scale_layout == "HND") return {cache.blocks, cache.heads, cache.block_size};
  if (scale_layout == "NHD") return {cache.blocks, cache.block_size, cache.heads};
  ThrowValueError("scale_layout = \"" + scale_layout + "\" must be \"HND\" or \"NHD\"");
}

ScalePlace ScalePlaceOf(const StridedMemory& scales, const std::string& scale_layout, const std::string& name) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(float));
  if (reinterpret_cast<std::uintptr_t>(scales.data) % kBytes != 0) {
    ThrowValueError(name + " lies at an address that is no multiple of " + std::to_string(kBytes) + " bytes");
  }
  const bool head_first = scale_layout == "HND";
  return {reinterpret_cast<float*>(const_cast<std::uint8_t*>(scales.data)), scales.strides[0] / kBytes,
          scales.strides[head_first ? 1 : 2] / kBytes, scales.strides[head_first ? 2 : 1] / kBytes};
}

const float* CheckScale(const paddle::optional<paddle::Tensor>& scale, const std::string& name, int64_t heads,
                        const paddle::Tensor& scaled, const std::string& scaled_name,
                        const std::vector<int64_t>& other) {
  if (!scale) return nullptr;
  if (scale->dtype() != paddle::DataType::FLOAT32) {
    ThrowValueError(name + " has dtype " + DtypeName(scale->dtype()) + "; float32 is expected");
  }
  const int64_t count = scale->numel();
  const bool is_other = scale->shape() == other;
  if (count != 1 && (heads == 0 || count != heads) && !is_other) {
    ThrowValueError(name + " has shape " + ShapeText(scale->shape()) + "; one value" +
                    (heads == 0 ? "" : " or one for each of the " + std::to_string(heads) + " heads") +
                    (other.empty() ? "" : ", or " + ShapeText(other) + ",") + " is expected");
  }
  if (!is_other) CheckContiguous(*scale, name);
  CheckSameDevice(*scale, name, scaled, scaled_name);
  return static_cast<const float*>(scale->data());
}

}  // namespace paddle_kv
