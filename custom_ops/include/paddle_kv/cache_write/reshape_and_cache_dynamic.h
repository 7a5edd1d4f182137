// Writes new tokens into quantised block caches with a scale of its own for each token and head.
#pragma once

#include <cstdint>

#include "paddle_kv/cache_write/write_tokens.h"

namespace paddle_kv {

// Where the scale of each slot and head is kept: strides in floats.
struct ScalePlace {
  float* data = nullptr;
  std::int64_t stride_per_block = 0;
  std::int64_t stride_per_head = 0;
  std::int64_t stride_per_token = 0;
};

// `tokens.parts[p].scale` is not used: it is computed and stored in scales[p]. A part without a place for scales is
// copied as it is. `tokens.stored` is one of the fp8 formats or int8.
struct DynamicTokenWrite {
  TokenWrite tokens;
  ScalePlace scales[kMostParts];
};

void ReshapeAndCacheDynamicCpu(const DynamicTokenWrite& write);
Status ReshapeAndCacheDynamicCuda(const DynamicTokenWrite& write, const DeviceStream& where);

// The largest number that a format stores.
template <class Format>
struct LargestOf;
template <>
struct LargestOf<Fp8E4m3> {
  static constexpr float kValue = 448.0f;
};
template <>
struct LargestOf<Fp8E5m2> {
  static constexpr float kValue = 57344.0f;
};
template <>
struct LargestOf<Int8> {
  static constexpr float kValue = 127.0f;
};

template <class Use>
auto DispatchDynamic(ElementType type, const Use& use) {
  switch (type) {
    case ElementType::kFp8E4m3:
      return use(Fp8E4m3{});
    case ElementType::kFp8E5m2:
      return use(Fp8E5m2{});
    default:
      return use(Int8{});
  }
}

// Magnitudes order like their bits. Those that are not finite do not count: they are clipped.
PADDLE_KV_HOST_DEVICE std::uint32_t FiniteMagnitude(float value) {
  const std::uint32_t magnitude = BitsOfFloat(value) & ~kFloatSign;
  return magnitude < kFloatInfinity ? magnitude : 0u;
}

// The scale that maps the largest magnitude of a row to the largest number of the format. 1 for a row of zeros. Never
// below the smallest normal float: quotients by less would be wrong.
template <class Format>
PADDLE_KV_HOST_DEVICE float ScaleOfRow(std::uint32_t largest_magnitude) {
  constexpr std::uint32_t kSmallestNormal = 0x00800000u;
  if (largest_magnitude == 0) return 1.0f;
  const float scale = FloatOfBits(largest_magnitude) / LargestOf<Format>::kValue;
  return BitsOfFloat(scale) < kSmallestNormal ? FloatOfBits(kSmallestNormal) : scale;
}

PADDLE_KV_HOST_DEVICE float* AddressOfScale(const ScalePlace& place, std::int64_t block_size, std::int64_t slot,
                                            std::int64_t head) {
  return place.data + slot / block_size * place.stride_per_block + head * place.stride_per_head +
         slot % block_size * place.stride_per_token;
}

}  // namespace paddle_kv
