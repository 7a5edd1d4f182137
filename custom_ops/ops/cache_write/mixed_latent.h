// "fp8_ds_mla": 656 bytes a token of an MLA cache, which are 512 codes of fp8_e4m3 in four groups, a float32 scale for
// each group, and 64 elements of rope in bfloat16.
#pragma once

#include <string>

#include "cache_layout.h"
#include "paddle_kv/cache_write/reshape_and_cache_dynamic.h"

namespace paddle_kv {

struct MixedLatent {
  static constexpr const char* kName = "fp8_ds_mla";
  static constexpr int64_t kRank = 512;
  static constexpr int64_t kGroups = 4;
  static constexpr int64_t kGroupSize = kRank / kGroups;
  static constexpr int64_t kRope = 64;
  static constexpr int64_t kWidth = kRank + kRope;
  static constexpr int64_t kElementBytes = 2;  // of the rope, and of what is written and read
  static constexpr int64_t kScalesAt = kRank;
  static constexpr int64_t kRopeAt = kScalesAt + kGroups * static_cast<int64_t>(sizeof(float));
  static constexpr int64_t kTokenBytes = kRopeAt + kRope * kElementBytes;

  // Where in the cache the codes lie, group by group as heads; their scales; the rope.
  RowPlace codes;
  ScalePlace scales;
  RowPlace rope;
};

// ValueError unless the cache is of uint8 with one head of rows of 656 bytes, each at a multiple of 4 bytes.
MixedLatent CheckMixedLatent(const CacheTensor& cache, const paddle::Tensor& tensor, const std::string& name);

}  // namespace paddle_kv
