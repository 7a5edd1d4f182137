// The number formats of keys, values and caches, and how they are converted: the same bits on the host and on the GPU.
//
// Arithmetic is IEEE float32 in round to nearest even, wherever it runs. What the two sides do differently by nature is
// taken out of their hands: NaNs are made here with the sign of the value they stand for (the bits of a NaN that comes
// out of an addition depend on the processor), and products are never fused with the sum behind them.
#pragma once

#include <cstdint>
#include <cstring>

#include "paddle_kv/common/host_device.h"

namespace paddle_kv {

PADDLE_KV_HOST_DEVICE std::uint32_t BitsOfFloat(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PADDLE_KV_HOST_DEVICE float FloatOfBits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr std::uint32_t kFloatSign = 0x80000000u;
constexpr std::uint32_t kFloatInfinity = 0x7F800000u;
constexpr std::uint32_t kFloatNan = 0x7FC00000u;

// A quiet NaN if `result` is any NaN, with the sign of `value`; else `result`.
PADDLE_KV_HOST_DEVICE float WithNanOf(float value, float result) {
  return result == result ? result : FloatOfBits((BitsOfFloat(value) & kFloatSign) | kFloatNan);
}

// The compiler may turn a product and the sum behind it into one instruction with one rounding; not this one.
PADDLE_KV_HOST_DEVICE float RoundedProduct(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Rounds a magnitude below 2^22 units to whole units and returns their number. One unit is the spacing of the floats
// from `anchor` on, so the addition does the rounding; `anchor` is a power of two.
PADDLE_KV_HOST_DEVICE std::uint32_t UnitsAbove(float anchor, float magnitude) {
  return BitsOfFloat(magnitude + anchor) - BitsOfFloat(anchor);
}

// A format of sign, exponent and mantissa with fewer bits than float32; here only its finite magnitudes.
template <int kMantissaBits, int kBias>
struct SmallFloat {
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr std::uint32_t kSmallestNormal = static_cast<std::uint32_t>(127 + 1 - kBias) << 23;
  // Its spacing is the smallest subnormal of the format.
  static constexpr std::uint32_t kAnchor = static_cast<std::uint32_t>(127 + 1 - kBias + kDropped) << 23;

  // Rounds to nearest even. `magnitude` holds the bits of a float that is neither negative nor NaN.
  static PADDLE_KV_HOST_DEVICE std::uint32_t Round(std::uint32_t magnitude) {
    const std::uint32_t subnormal = UnitsAbove(FloatOfBits(kAnchor), FloatOfBits(magnitude));
    const std::uint32_t half_unit = (1u << (kDropped - 1)) - 1 + ((magnitude >> kDropped) & 1);
    const std::uint32_t normal =
        ((magnitude + half_unit) >> kDropped) - (static_cast<std::uint32_t>(127 - kBias) << kMantissaBits);
    return magnitude < kSmallestNormal ? subnormal : normal;
  }

  // Exact. `code` is a magnitude that is neither infinite nor NaN.
  static PADDLE_KV_HOST_DEVICE float Widen(std::uint32_t code) {
    const std::uint32_t shifted = code << kDropped;
    const float subnormal = FloatOfBits(shifted + kSmallestNormal) - FloatOfBits(kSmallestNormal);
    const float normal = FloatOfBits(shifted + (static_cast<std::uint32_t>(127 - kBias) << 23));
    return (code >> kMantissaBits) == 0 ? subnormal : normal;
  }
};

PADDLE_KV_HOST_DEVICE float WithSign(std::uint32_t negative, float magnitude) {
  return FloatOfBits(BitsOfFloat(magnitude) | (negative ? kFloatSign : 0u));
}

// ---- plain formats: what tokens and plain caches hold. A NaN becomes the format's quiet NaN of the same sign. ----

struct Float32 {
  using Bits = std::uint32_t;
  static PADDLE_KV_HOST_DEVICE float ToFloat(Bits bits) { return FloatOfBits(bits); }
  static PADDLE_KV_HOST_DEVICE Bits FromFloat(float value) { return BitsOfFloat(value); }
};

struct Float16 {
  using Bits = std::uint16_t;

  static PADDLE_KV_HOST_DEVICE float ToFloat(Bits bits) {
    const std::uint32_t magnitude = bits & 0x7FFFu;
    const float finite = SmallFloat<10, 15>::Widen(magnitude);
    const float special = FloatOfBits(magnitude == 0x7C00u ? kFloatInfinity : kFloatNan);
    return WithSign(bits & 0x8000u, magnitude < 0x7C00u ? finite : special);
  }

  static PADDLE_KV_HOST_DEVICE Bits FromFloat(float value) {
    const std::uint32_t bits = BitsOfFloat(value);
    const std::uint32_t magnitude = bits & ~kFloatSign;
    const std::uint32_t finite = SmallFloat<10, 15>::Round(magnitude);
    const std::uint32_t special = magnitude > kFloatInfinity ? 0x7E00u : 0x7C00u;
    // 65536 and above; what lies between the largest half, 65504, and 65536 is rounded like the rest.
    const std::uint32_t rounded = magnitude >= 0x47800000u ? special : finite;
    return static_cast<Bits>((bits >> 31 << 15) | rounded);
  }
};

struct BFloat16 {
  using Bits = std::uint16_t;

  static PADDLE_KV_HOST_DEVICE float ToFloat(Bits bits) { return FloatOfBits(static_cast<std::uint32_t>(bits) << 16); }

  static PADDLE_KV_HOST_DEVICE Bits FromFloat(float value) {
    const std::uint32_t bits = BitsOfFloat(value);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
    const std::uint32_t nan = (bits >> 31 << 15) | 0x7FC0u;
    return static_cast<Bits>((bits & ~kFloatSign) > kFloatInfinity ? nan : rounded);
  }
};

// ---- quantised formats: what one-byte caches hold. ----
//
// Quantize(value, scale): value / scale, clipped to plus or minus the largest (infinities too), rounded to nearest
// even. Dequantize(code, scale): code * scale, exact but for the rounding of that product to float32. PaddleUint8
// differs: see there.

// 8-bit floats. Encode and Decode are Quantize and Dequantize with scale 1. NaN stays NaN, with its sign.
template <int kMantissaBits, int kBias, std::uint32_t kLargestCode, std::uint32_t kNanCode, bool kHasInfinity>
struct Fp8 {
  using Bits = std::uint8_t;
  using Small = SmallFloat<kMantissaBits, kBias>;
  static constexpr std::uint32_t kFirstSpecialCode = kLargestCode + 1;

  static PADDLE_KV_HOST_DEVICE Bits Encode(float value) {
    const std::uint32_t bits = BitsOfFloat(value);
    const std::uint32_t magnitude = bits & ~kFloatSign;
    const std::uint32_t largest = BitsOfFloat(Small::Widen(kLargestCode));
    const std::uint32_t finite = Small::Round(magnitude < largest ? magnitude : largest);
    return static_cast<Bits>((bits >> 31 << 7) | (magnitude > kFloatInfinity ? kNanCode : finite));
  }

  static PADDLE_KV_HOST_DEVICE float Decode(Bits code) {
    const std::uint32_t magnitude = code & 0x7Fu;
    const float finite = Small::Widen(magnitude);
    const bool infinite = kHasInfinity && magnitude == kFirstSpecialCode;
    const float special = FloatOfBits(infinite ? kFloatInfinity : kFloatNan);
    return WithSign(code & 0x80u, magnitude < kFirstSpecialCode ? finite : special);
  }

  static PADDLE_KV_HOST_DEVICE Bits Quantize(float value, float scale) {
    return Encode(WithNanOf(value, value / scale));
  }

  static PADDLE_KV_HOST_DEVICE float Dequantize(Bits code, float scale) {
    const float value = Decode(code);
    return WithNanOf(value, RoundedProduct(value, scale));
  }
};

// Sign, 4 exponent bits, 3 mantissa bits. No infinities; 0x7F and 0xFF are NaN; largest 448.
using Fp8E4m3 = Fp8<3, 7, 0x7E, 0x7F, false>;
// Sign, 5 exponent bits, 2 mantissa bits, as IEEE has them. Largest 57344. Infinities (0x7C, 0xFC) are read, never
// written; of the NaNs, 0x7D to 0x7F and 0xFD to 0xFF, the middle ones are written.
using Fp8E5m2 = Fp8<2, 15, 0x7B, 0x7E, true>;

// Rounds [-127, 127] to whole numbers, to nearest even.
PADDLE_KV_HOST_DEVICE std::int32_t RoundToInteger(float value) {
  constexpr float kAnchor = 12582912.0f;  // 1.5 * 2^23: the floats around it are the whole numbers
  return static_cast<std::int32_t>(BitsOfFloat(value + kAnchor) - BitsOfFloat(kAnchor));
}

// Clips to [-127, 127]; NaN becomes 0.
PADDLE_KV_HOST_DEVICE float ClipTo127(float value) {
  const float clipped = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
  return value == value ? clipped : 0.0f;
}

// -127 .. 127; -128 is read, never written. NaN becomes 0.
struct Int8 {
  using Bits = std::uint8_t;
  static PADDLE_KV_HOST_DEVICE Bits Quantize(float value, float scale) {
    return static_cast<Bits>(RoundToInteger(ClipTo127(value / scale)));
  }
  static PADDLE_KV_HOST_DEVICE float Dequantize(Bits code, float scale) {
    const float value = static_cast<float>(static_cast<std::int8_t>(code));
    return WithNanOf(value, RoundedProduct(value, scale));
  }
};

// What Paddle's block_multihead_attention keeps in its quantised caches. The scale multiplies: value * scale * 127,
// clipped to +-127, rounded to nearest even (its quant_round_type 0), plus 128. NaN becomes 128, the code of zero.
// Back: (code - 128) / (scale * 127).
struct PaddleUint8 {
  using Bits = std::uint8_t;
  static PADDLE_KV_HOST_DEVICE Bits Quantize(float value, float scale) {
    const float scaled = RoundedProduct(RoundedProduct(value, scale), 127.0f);
    return static_cast<Bits>(RoundToInteger(ClipTo127(scaled)) + 128);
  }
  static PADDLE_KV_HOST_DEVICE float Dequantize(Bits code, float scale) {
    const float value = static_cast<float>(static_cast<std::int32_t>(code) - 128);
    return WithNanOf(value, value / RoundedProduct(scale, 127.0f));
  }
};

}  // namespace paddle_kv
