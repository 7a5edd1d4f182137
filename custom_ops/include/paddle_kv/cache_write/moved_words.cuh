// What becomes of a word on its way between rows and a block cache (move_kernels.cuh). Stored: the word in the cache,
// Plain: in the rows. kGatherCtas: so many CTAs of a multiprocessor may take all registers; gathering waits for memory,
// and the more of them there are the less. kScalePerToken: each row has a scale of its own.
#pragma once

#include "paddle_kv/cache_write/move_tokens.h"
#include "paddle_kv/common/quantize.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {

template <int kBytes>
struct Moved {
  static constexpr int kGatherCtas = kBytes == 16 ? 8 : 1;
  static constexpr bool kScalePerToken = false;
  using Stored = typename WordOf<kBytes>::Type;
  using Plain = Stored;
  static constexpr int kStoredBytes = kBytes;
  static __device__ Plain Read(const Stored& word, const Dequantization&, float) { return word; }
};

template <class Format, class Target>
struct Dequantized {
  static constexpr int kGatherCtas = 5;
  static constexpr bool kScalePerToken = false;
  using Stored = CodeWord<Target>;
  using Plain = PlainWord<Target>;
  static constexpr int kStoredBytes = PlainWord<Target>::kElements;
  static __device__ Plain Read(const Stored& codes, const Dequantization&, float scale) {
    return DequantizeWord<Format, Target>(codes, scale);
  }
};

template <int kBytes>
struct DequantizedSingly {
  static constexpr int kGatherCtas = 1;
  static constexpr bool kScalePerToken = false;
  using Stored = std::uint8_t;
  using Plain = typename WordOf<kBytes>::Type;
  static constexpr int kStoredBytes = 1;
  static __device__ Plain Read(Stored code, const Dequantization& how, float scale) {
    return DequantizeOne<Plain>(code, how.format, how.plain, scale);
  }
};

template <class Codec>
struct ByToken : Codec {
  static constexpr bool kScalePerToken = true;
};

__device__ inline float ScaleOfHead(const Dequantization& how, unsigned head) {
  return how.pointer == nullptr ? how.value : how.pointer[head * how.stride_per_head];
}

// Where byte `offset` of a row lies from its start.
__device__ inline std::int64_t OffsetFromRow(const RowPlace& place, std::uint32_t offset) {
  if (offset < place.group_bytes) return offset;
  const auto group_bytes = static_cast<std::uint32_t>(place.group_bytes);
  return offset / group_bytes * place.group_stride + offset % group_bytes;
}

}  // namespace paddle_kv
