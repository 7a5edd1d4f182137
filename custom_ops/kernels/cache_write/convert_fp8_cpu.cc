#include <vector>

#include "paddle_kv/cache_write/convert_fp8.h"
#include "paddle_kv/common/parallel_for.h"

namespace paddle_kv {
namespace {

// From so many elements on, a table of what each of the 65,536 patterns of a 16-bit format becomes has paid for itself.
constexpr std::int64_t kTableElements = 1 << 18;

float ScaleOf(const Scale& scale) { return scale.pointer == nullptr ? scale.value : *scale.pointer; }

template <class Use>
void DispatchFp8(ElementType format, const Use& use) {
  if (format == ElementType::kFp8E4m3) {
    use(Fp8E4m3{});
  } else {
    use(Fp8E5m2{});
  }
}

// to[i] = convert(from[i]).
template <class From, class To, class Convert>
void ForEachElement(const From* from, To* to, std::int64_t count, const Convert& convert) {
  ParallelFor(count, count * static_cast<std::int64_t>(sizeof(From) + sizeof(To)),
              [&](std::int64_t begin, std::int64_t end) {
                const From* __restrict__ const in = from;
                To* __restrict__ const out = to;
                for (std::int64_t i = begin; i < end; ++i) out[i] = convert(in[i]);
              });
}

template <class Plain, class Format>
void Encode(const typename Plain::Bits* source, std::uint8_t* codes, std::int64_t count, float scale) {
  using Bits = typename Plain::Bits;
  const auto convert = [scale](Bits bits) { return Format::Quantize(Plain::ToFloat(bits), scale); };
  if (sizeof(Bits) == 2 && count >= kTableElements) {
    std::vector<std::uint8_t> table(1 << 16);
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = convert(static_cast<Bits>(i));
    ForEachElement(source, codes, count, [code = table.data()](Bits bits) { return code[bits]; });
  } else {
    ForEachElement(source, codes, count, convert);
  }
}

template <class Format, class Plain>
void Decode(const std::uint8_t* codes, typename Plain::Bits* target, std::int64_t count, float scale) {
  using Bits = typename Plain::Bits;
  Bits meaning[256];
  for (int i = 0; i < 256; ++i) meaning[i] = Plain::FromFloat(Format::Dequantize(static_cast<std::uint8_t>(i), scale));
  ForEachElement(codes, target, count, [&meaning](std::uint8_t code) { return meaning[code]; });
}

}  // namespace

void EncodeFp8Cpu(const void* source, std::uint8_t* codes, std::int64_t count, ElementType plain, ElementType format,
                  const Scale& scale) {
  DispatchPlain(plain, [&](auto plain_format) {
    using Plain = decltype(plain_format);
    DispatchFp8(format, [&](auto code_format) {
      Encode<Plain, decltype(code_format)>(static_cast<const typename Plain::Bits*>(source), codes, count,
                                           ScaleOf(scale));
    });
  });
}

void DecodeFp8Cpu(const std::uint8_t* codes, void* target, std::int64_t count, ElementType format, ElementType plain,
                  const Scale& scale) {
  DispatchPlain(plain, [&](auto plain_format) {
    using Plain = decltype(plain_format);
    DispatchFp8(format, [&](auto code_format) {
      Decode<decltype(code_format), Plain>(codes, static_cast<typename Plain::Bits*>(target), count, ScaleOf(scale));
    });
  });
}

}  // namespace paddle_kv
