// Scales of the caller: a number in Python, or a float32 tensor on the device of what it scales.
#pragma once

#include <string>

#include "../common/element_type.h"
#include "../common/errors.h"
#include "../common/validate.h"
#include "cache_layout.h"

namespace paddle_kv {

// The address of the scales, null where a number was given. ValueError unless the tensor holds one value or, where
// `heads` is not 0, that many, or has the shape `other`.
inline const float* CheckScale(const paddle::optional<paddle::Tensor>& scale, const std::string& name, int64_t heads,
                               const paddle::Tensor& scaled, const std::string& scaled_name,
                               const std::vector<int64_t>& other = {}) {
  if (!scale) return nullptr;
  if (scale->dtype() != paddle::DataType::FLOAT32) {
    ThrowValueError(name + " has dtype " + DtypeName(scale->dtype()) + "; float32 is expected");
  }
  const int64_t count = scale->numel();
  if (count != 1 && (heads == 0 || count != heads) && scale->shape() != other) {
    ThrowValueError(name + " has shape " + ShapeText(scale->shape()) + "; one value" +
                    (heads == 0 ? "" : " or one for each of the " + std::to_string(heads) + " heads") +
                    (other.empty() ? "" : ", or " + ShapeText(other) + ",") + " is expected");
  }
  CheckSameDevice(*scale, name, scaled, scaled_name);
  return static_cast<const float*>(scale->data());
}

}  // namespace paddle_kv
