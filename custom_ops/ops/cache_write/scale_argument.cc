#include "scale_argument.h"

#include <algorithm>

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
  CheckAligned(scales.data, kBytes, name);
  const bool head_first = scale_layout == "HND";
  return {reinterpret_cast<float*>(const_cast<std::uint8_t*>(scales.data)), scales.strides[0] / kBytes,
          scales.strides[head_first ? 1 : 2] / kBytes, scales.strides[head_first ? 2 : 1] / kBytes};
}

const float* CheckScale(const paddle::optional<paddle::Tensor>& scale, const std::string& name, int64_t heads,
                        const paddle::Tensor& scaled, const std::string& scaled_name,
                        const std::vector<std::vector<int64_t>>& others) {
  if (!scale) return nullptr;
  if (scale->dtype() != paddle::DataType::FLOAT32) {
    ThrowValueError(name + " has dtype " + DtypeName(scale->dtype()) + "; float32 is expected");
  }
  const int64_t count = scale->numel();
  const bool is_other = std::count(others.begin(), others.end(), scale->shape()) > 0;
  if (count != 1 && (heads == 0 || count != heads) && !is_other) {
    std::string text;
    for (const std::vector<int64_t>& shape : others) text += ", or " + ShapeText(shape);
    ThrowValueError(name + " has shape " + ShapeText(scale->shape()) + "; one value" +
                    (heads == 0 ? "" : " or one for each of the " + std::to_string(heads) + " heads") + text +
                    (others.empty() ? "" : ",") + " is expected");
  }
  if (!is_other) CheckContiguous(*scale, name);
  CheckSameDevice(*scale, name, scaled, scaled_name);
  CheckAligned(scale->data(), sizeof(float), name);
  return static_cast<const float*>(scale->data());
}

}  // namespace paddle_kv
