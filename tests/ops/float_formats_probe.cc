// The conversions of float_formats.h as functions on arrays, for test_float_formats.py.
#include "paddle_kv/common/float_formats.h"

using namespace paddle_kv;

#define PLAIN(Format)                                                                \
  void widen_##Format(const Format::Bits* from, float* to, std::int64_t count) {    \
    for (std::int64_t i = 0; i < count; ++i) to[i] = Format::ToFloat(from[i]);      \
  }                                                                                  \
  void narrow_##Format(const float* from, Format::Bits* to, std::int64_t count) {   \
    for (std::int64_t i = 0; i < count; ++i) to[i] = Format::FromFloat(from[i]);    \
  }
#define QUANTIZED(Format)                                                                            \
  void quantize_##Format(const float* from, std::uint8_t* to, std::int64_t count, float scale) {    \
    for (std::int64_t i = 0; i < count; ++i) to[i] = Format::Quantize(from[i], scale);              \
  }                                                                                                  \
  void dequantize_##Format(const std::uint8_t* from, float* to, std::int64_t count, float scale) {  \
    for (std::int64_t i = 0; i < count; ++i) to[i] = Format::Dequantize(from[i], scale);            \
  }

extern "C" {
PLAIN(Float16)
PLAIN(BFloat16)
PLAIN(Float32)
QUANTIZED(Fp8E4m3)
QUANTIZED(Fp8E5m2)
QUANTIZED(Int8)
QUANTIZED(PaddleUint8)
}
