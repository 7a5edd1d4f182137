// Scales of the caller: a number in Python, or a float32 tensor on the device of what it scales.
#pragma once

#include <string>
#include <vector>

#include "../common/paddle_api.h"
#include "cache_layout.h"
#include "paddle_kv/cache_write/reshape_and_cache_dynamic.h"

namespace paddle_kv {

// The shape of scales of which each token and head has one: "HND" [blocks, heads, block size], "NHD" [blocks, block
// size, heads]; ValueError for another order.
std::vector<int64_t> ScaleShape(const CacheShape& cache, const std::string& scale_layout);

// Where such scales lie. ValueError if their addresses are no multiples of 4 bytes.
ScalePlace ScalePlaceOf(const StridedMemory& scales, const std::string& scale_layout, const std::string& name);

// The address of the scales, null where a number was given. ValueError unless the tensor holds one value or, where
// `heads` is not 0, that many, or has one of the shapes `others`; it may have strides only if it has one of them.
const float* CheckScale(const paddle::optional<paddle::Tensor>& scale, const std::string& name, int64_t heads,
                        const paddle::Tensor& scaled, const std::string& scaled_name,
                        const std::vector<std::vector<int64_t>>& others = {});

}  // namespace paddle_kv
