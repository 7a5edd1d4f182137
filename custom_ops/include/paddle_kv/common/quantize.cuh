// The conversions of float_formats.h for four elements at once, with the GPU's own instructions where these give the
// same bits. Quantising does so for all values, so that a NaN among them costs its warp nothing; an extreme scale, or a
// code that stands for no finite number, is converted one by one, as float_formats.h has it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "paddle_kv/common/element_type.h"
#include "paddle_kv/common/float_formats.h"

namespace paddle_kv {

// The smaller of two numbers, NaN if `a` is.
__device__ inline float SmallerOrNan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
#else
  return a > b ? b : a;
#endif
}

// Divides magnitudes by one scale many times, each quotient rounded as IEEE has it.
class ScaleDivider {
 public:
  __device__ explicit ScaleDivider(float scale)
      : scale_(scale),
        reciprocal_(1.0f / scale),
        largest_(scale * 0x1p17f),  // its quotient is above the largest number of every quantised format
        // Inside this range no step of Quotient() overflows or loses bits below the smallest float, as long as the
        // quotient is one that does not end as zero anyway.
        ordinary_(scale >= 0x1p-80f && scale <= 0x1p80f),
        power_of_two_((BitsOfFloat(scale) & 0x007FFFFFu) == 0) {}

  __device__ float scale() const { return scale_; }
  __device__ bool ordinary() const { return ordinary_; }

  // magnitude / scale for an ordinary scale, or some number of 2^17 and above where the quotient is. NaN stays NaN. Two
  // corrections by the exact remainder make the product with the correctly rounded reciprocal the correctly rounded
  // quotient.
  __device__ float Quotient(float magnitude) const {
    if (power_of_two_) return __fmul_rn(magnitude, reciprocal_);
    const float value = SmallerOrNan(magnitude, largest_);
    const float first = __fmul_rn(value, reciprocal_);
    const float second = __fmaf_rn(__fmaf_rn(-first, scale_, value), reciprocal_, first);
    return __fmaf_rn(__fmaf_rn(-second, scale_, value), reciprocal_, second);
  }

 private:
  float scale_;
  float reciprocal_;
  float largest_;
  bool ordinary_;
  bool power_of_two_;
};

// Elements of a plain format as float32. NaNs are NaNs, of any sign.
template <class Source>
__device__ inline float WidenOrdinary(typename Source::Bits bits) {
  return Source::ToFloat(bits);
}
template <>
__device__ inline float WidenOrdinary<Float16>(std::uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}

// Two floats that are not NaN, as bits of the target, the first in the low half.
template <class Target>
__device__ inline std::uint32_t NarrowPair(float low, float high) {
  return Target::FromFloat(low) | static_cast<std::uint32_t>(Target::FromFloat(high)) << 16;
}
template <>
__device__ inline std::uint32_t NarrowPair<Float16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return __half_as_ushort(__low2half(pair)) | static_cast<std::uint32_t>(__half_as_ushort(__high2half(pair))) << 16;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
__device__ inline std::uint32_t NarrowPair<BFloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return __bfloat16_as_ushort(__low2bfloat16(pair)) |
         static_cast<std::uint32_t>(__bfloat16_as_ushort(__high2bfloat16(pair))) << 16;
}
#endif

// The signs of four elements, each in the highest bit of a byte.
__device__ inline std::uint32_t SignBytes(const std::uint16_t (&bits)[4]) {
  const std::uint32_t low = bits[0] | static_cast<std::uint32_t>(bits[1]) << 16;
  const std::uint32_t high = bits[2] | static_cast<std::uint32_t>(bits[3]) << 16;
  return __byte_perm(low, high, 0x7531) & 0x80808080u;
}
__device__ inline std::uint32_t SignBytes(const std::uint32_t (&bits)[4]) {
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x73), __byte_perm(bits[2], bits[3], 0x73), 0x5410) & 0x80808080u;
}

// How each quantised format handles a group of four. Encode: from the magnitudes of quotients and the bytes of their
// signs.
template <class Format>
struct FourCodes;

template <int kMantissaBits, int kBias, std::uint32_t kLargestCode, std::uint32_t kNanCode, bool kHasInfinity>
struct FourCodes<Fp8<kMantissaBits, kBias, kLargestCode, kNanCode, kHasInfinity>> {
  using Format = Fp8<kMantissaBits, kBias, kLargestCode, kNanCode, kHasInfinity>;

  static __device__ std::uint32_t Encode(const float (&quotients)[4], std::uint32_t signs) {
    std::uint32_t codes = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    std::uint16_t low, high;
    if (kMantissaBits == 3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(quotients[1]), "f"(quotients[0]));
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(quotients[3]), "f"(quotients[2]));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(quotients[1]), "f"(quotients[0]));
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(quotients[3]), "f"(quotients[2]));
    }
    codes = (low | static_cast<std::uint32_t>(high) << 16) & 0x7F7F7F7Fu;
    // NaN, and nothing else, has become 0x7F.
    if (kNanCode != 0x7F) codes -= (0x7F - kNanCode) * ((codes + 0x01010101u & 0x80808080u) >> 7);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) codes |= static_cast<std::uint32_t>(Format::Encode(quotients[i])) << (8 * i);
#endif
    return codes | signs;
  }

  static __device__ bool Decodable(std::uint32_t codes) { return !AnyFrom(codes, kLargestCode + 1); }

  // Every finite number of both formats is a half.
  static __device__ void Decode(std::uint32_t codes, float (&values)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const auto pair = static_cast<std::uint16_t>(codes >> (8 * i));
      std::uint32_t halves;
      if (kMantissaBits == 3) {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
      } else {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
      }
      values[i] = __half2float(__ushort_as_half(static_cast<std::uint16_t>(halves)));
      values[i + 1] = __half2float(__ushort_as_half(static_cast<std::uint16_t>(halves >> 16)));
    }
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t code = codes >> (8 * i);
      // The bits at the place where float32 has them make a number that is too small by a power of two.
      const float small = FloatOfBits((code & 0x7Fu) << (23 - kMantissaBits));
      const float magnitude = __fmul_rn(small, FloatOfBits(static_cast<std::uint32_t>(127 + 127 - kBias) << 23));
      values[i] = FloatOfBits(BitsOfFloat(magnitude) | (code & 0x80u) << 24);
    }
#endif
  }
  static __device__ float Scaled(float value, float scale) { return __fmul_rn(value, scale); }

 private:
  // Whether the magnitude of one of the four codes is at least `first`.
  static __device__ bool AnyFrom(std::uint32_t codes, std::uint32_t first) {
    return (((codes & 0x7F7F7F7Fu) + (0x80u - first) * 0x01010101u) & 0x80808080u) != 0;
  }
};

template <>
struct FourCodes<Int8> {
  static __device__ std::uint32_t Encode(const float (&quotients)[4], std::uint32_t signs) {
    std::uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t negative = signs << (24 - 8 * i) & kFloatSign;
      const float clipped = FloatOfBits(BitsOfFloat(fminf(quotients[i], 127.0f)) | negative);
      const std::uint32_t code = RoundToInteger(clipped) & 0xFFu;
      codes |= (quotients[i] == quotients[i] ? code : 0u) << (8 * i);
    }
    return codes;
  }
  static __device__ bool Decodable(std::uint32_t) { return true; }
  static __device__ void Decode(std::uint32_t codes, float (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(static_cast<std::int8_t>(codes >> (8 * i)));
  }
  static __device__ float Scaled(float value, float scale) { return __fmul_rn(value, scale); }
};

template <>
struct FourCodes<PaddleUint8> {
  static __device__ bool Decodable(std::uint32_t) { return true; }
  static __device__ void Decode(std::uint32_t codes, float (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = static_cast<float>(static_cast<std::int32_t>(codes >> (8 * i) & 0xFFu) - 128);
    }
  }
  static __device__ float Scaled(float value, float scale) { return value / __fmul_rn(scale, 127.0f); }
};

// Four elements to four codes, the first in the lowest byte.
template <class Source, class Format>
__device__ inline std::uint32_t QuantizeFour(const typename Source::Bits (&bits)[4], const ScaleDivider& divider) {
  std::uint32_t codes = 0;
  if constexpr (std::is_same<Format, PaddleUint8>::value) {  // multiplies, and has no NaN: one way for all values
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes |= static_cast<std::uint32_t>(Format::Quantize(Source::ToFloat(bits[i]), divider.scale())) << (8 * i);
    }
  } else {
    if (divider.ordinary()) {
      float quotients[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) quotients[i] = divider.Quotient(fabsf(WidenOrdinary<Source>(bits[i])));
      return FourCodes<Format>::Encode(quotients, SignBytes(bits));
    }
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {  // rare: no code for it in four places
      const auto element = i < 2 ? (i == 0 ? bits[0] : bits[1]) : (i == 2 ? bits[2] : bits[3]);
      codes |= static_cast<std::uint32_t>(Format::Quantize(Source::ToFloat(element), divider.scale())) << (8 * i);
    }
  }
  return codes;
}

// Four codes, the first in the lowest byte, to four elements.
template <class Format, class Target>
__device__ inline void DequantizeFour(std::uint32_t codes, float scale, typename Target::Bits (&elements)[4]) {
  const std::uint32_t magnitude = BitsOfFloat(scale) & ~kFloatSign;
  if (FourCodes<Format>::Decodable(codes) && magnitude != 0 && magnitude < kFloatInfinity) {
    float values[4];
    FourCodes<Format>::Decode(codes, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = FourCodes<Format>::Scaled(values[i], scale);
    if (sizeof(typename Target::Bits) == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) elements[i] = static_cast<typename Target::Bits>(BitsOfFloat(values[i]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const std::uint32_t pair = NarrowPair<Target>(values[i], values[i + 1]);
        elements[i] = static_cast<typename Target::Bits>(pair & 0xFFFFu);
        elements[i + 1] = static_cast<typename Target::Bits>(pair >> 16);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) elements[i] = 0;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {  // rare: no code for it in four places
    const auto code = static_cast<std::uint8_t>(codes >> (8 * i));
    const typename Target::Bits element = Target::FromFloat(Format::Dequantize(code, scale));
#pragma unroll
    for (int j = 0; j < 4; ++j) elements[j] = i == j ? element : elements[j];
  }
}

// One element, between formats that only the running kernel knows: for what is too badly aligned for words.
template <class Bits>
__device__ inline std::uint8_t QuantizeOne(Bits bits, ElementType plain, ElementType format, float scale) {
  float value;
  if constexpr (sizeof(Bits) == 4) {
    value = Float32::ToFloat(bits);
  } else {
    value = plain == ElementType::kFloat16 ? Float16::ToFloat(bits) : BFloat16::ToFloat(bits);
  }
  return DispatchQuantized(format, [&](auto codes) { return decltype(codes)::Quantize(value, scale); });
}

template <class Bits>
__device__ inline Bits DequantizeOne(std::uint8_t code, ElementType format, ElementType plain, float scale) {
  const float value = DispatchQuantized(format, [&](auto codes) { return decltype(codes)::Dequantize(code, scale); });
  if constexpr (sizeof(Bits) == 4) {
    return Float32::FromFloat(value);
  } else {
    return plain == ElementType::kFloat16 ? Float16::FromFloat(value) : BFloat16::FromFloat(value);
  }
}

// One 16-byte word of a plain format, and as many codes.
template <class Plain>
struct alignas(16) PlainWord {
  static constexpr int kElements = 16 / sizeof(typename Plain::Bits);
  typename Plain::Bits elements[kElements];
};
template <class Plain>
struct alignas(PlainWord<Plain>::kElements) CodeWord {
  std::uint32_t fours[PlainWord<Plain>::kElements / 4];
};

template <class Plain, class Format>
__device__ inline CodeWord<Plain> QuantizeWord(const PlainWord<Plain>& plain, const ScaleDivider& divider) {
  CodeWord<Plain> codes;
#pragma unroll
  for (int four = 0; four < PlainWord<Plain>::kElements / 4; ++four) {
    typename Plain::Bits bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = plain.elements[four * 4 + i];
    codes.fours[four] = QuantizeFour<Plain, Format>(bits, divider);
  }
  return codes;
}

template <class Format, class Plain>
__device__ inline PlainWord<Plain> DequantizeWord(const CodeWord<Plain>& codes, float scale) {
  PlainWord<Plain> plain;
#pragma unroll
  for (int four = 0; four < PlainWord<Plain>::kElements / 4; ++four) {
    typename Plain::Bits bits[4];
    DequantizeFour<Format, Plain>(codes.fours[four], scale, bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) plain.elements[four * 4 + i] = bits[i];
  }
  return plain;
}

}  // namespace paddle_kv
