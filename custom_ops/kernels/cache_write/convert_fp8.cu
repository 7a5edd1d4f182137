// One thread converts 16-byte words of the plain side, a few of them in flight at once. Addresses that do not allow
// that are converted element by element.
#include "paddle_kv/cache_write/convert_fp8.h"

#include <algorithm>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/quantize.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr int kThreads = 256;
  static constexpr int kWordsPerThread = 4;
};

__device__ float ScaleOf(const Scale& scale) { return scale.pointer == nullptr ? scale.value : *scale.pointer; }

// What a kernel converts: elements [0, words * elements of a word) in whole words, the rest up to `count` singly.
struct Span {
  std::int64_t words;
  std::int64_t count;
};

// Both kernels: SourceWord is what a thread loads at once, with as many elements as it then stores.
template <class SourceWord, int kElements, class Source, class Target, class ConvertWord, class Convert>
__device__ __forceinline__ void ConvertSpan(const Source* source, Target* target, const Span& span,
                                            const ConvertWord& convert_word, const Convert& convert) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * Tuning::kThreads * Tuning::kWordsPerThread;
  std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * Tuning::kThreads * Tuning::kWordsPerThread + threadIdx.x;
  for (; first < span.words; first += stride) {
    SourceWord held[Tuning::kWordsPerThread];
#pragma unroll
    for (int k = 0; k < Tuning::kWordsPerThread; ++k) {
      const std::int64_t word = first + k * Tuning::kThreads;
      if (word < span.words) held[k] = LoadStreaming<SourceWord>(source + word * kElements);
    }
#pragma unroll
    for (int k = 0; k < Tuning::kWordsPerThread; ++k) {
      const std::int64_t word = first + k * Tuning::kThreads;
      if (word < span.words) StoreStreaming(target + word * kElements, convert_word(held[k]));
    }
  }
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * Tuning::kThreads + threadIdx.x;
  for (std::int64_t i = span.words * kElements + thread; i < span.count;
       i += gridDim.x * std::int64_t{Tuning::kThreads}) {
    target[i] = convert(source[i]);
  }
}

template <class Plain, class Format>
__global__ void __launch_bounds__(Tuning::kThreads)
    Encode(const typename Plain::Bits* source, std::uint8_t* codes, Span span, Scale scale) {
  using Word = PlainWord<Plain>;
  const ScaleDivider divider(ScaleOf(scale));
  ConvertSpan<Word, Word::kElements>(
      source, codes, span, [&](const Word& word) { return QuantizeWord<Plain, Format>(word, divider); },
      [&](typename Plain::Bits value) { return Format::Quantize(Plain::ToFloat(value), divider.scale()); });
}

template <class Format, class Plain>
__global__ void __launch_bounds__(Tuning::kThreads)
    Decode(const std::uint8_t* codes, typename Plain::Bits* target, Span span, Scale given) {
  using Word = CodeWord<Plain>;
  const float scale = ScaleOf(given);
  ConvertSpan<Word, PlainWord<Plain>::kElements>(
      codes, target, span, [&](const Word& word) { return DequantizeWord<Format, Plain>(word, scale); },
      [&](std::uint8_t code) { return Plain::FromFloat(Format::Dequantize(code, scale)); });
}

template <class Plain>
Span SpanOf(const void* plain, const void* codes, std::int64_t count) {
  constexpr int kElements = PlainWord<Plain>::kElements;
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(plain) % 16 == 0 && reinterpret_cast<std::uintptr_t>(codes) % kElements == 0;
  return {aligned ? count / kElements : 0, count};
}

int GridOf(const Span& span) {
  constexpr std::int64_t kWordsPerCta = Tuning::kThreads * Tuning::kWordsPerThread;
  const std::int64_t items = span.words > 0 ? span.words : span.count;
  return static_cast<int>(std::min((items + kWordsPerCta - 1) / kWordsPerCta, kLargestGrid));
}

template <class Use>
void DispatchFp8(ElementType format, const Use& use) {
  if (format == ElementType::kFp8E4m3) {
    use(Fp8E4m3{});
  } else {
    use(Fp8E5m2{});
  }
}

}  // namespace

Status EncodeFp8Cuda(const void* source, std::uint8_t* codes, std::int64_t count, ElementType plain, ElementType format,
                     const Scale& scale, const DeviceStream& where) {
  if (count == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  DispatchPlain(plain, [&](auto plain_format) {
    using Plain = decltype(plain_format);
    const Span span = SpanOf<Plain>(source, codes, count);
    DispatchFp8(format, [&](auto code_format) {
      Encode<Plain, decltype(code_format)><<<GridOf(span), Tuning::kThreads, 0, StreamOf(where)>>>(
          static_cast<const typename Plain::Bits*>(source), codes, span, scale);
    });
  });
  return LaunchStatus("Encode");
}

Status DecodeFp8Cuda(const std::uint8_t* codes, void* target, std::int64_t count, ElementType format, ElementType plain,
                     const Scale& scale, const DeviceStream& where) {
  if (count == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  DispatchPlain(plain, [&](auto plain_format) {
    using Plain = decltype(plain_format);
    const Span span = SpanOf<Plain>(target, codes, count);
    DispatchFp8(format, [&](auto code_format) {
      Decode<decltype(code_format), Plain><<<GridOf(span), Tuning::kThreads, 0, StreamOf(where)>>>(
          codes, static_cast<typename Plain::Bits*>(target), span, scale);
    });
  });
  return LaunchStatus("Decode");
}

}  // namespace paddle_kv
