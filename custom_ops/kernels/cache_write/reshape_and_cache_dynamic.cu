// Quantises new tokens with a scale for each token and head. A group of 8, 16 or 32 lanes does one row: finds its
// largest magnitude, then reads it again (from the L1 cache) and writes it. All parts in one launch.
#include "paddle_kv/cache_write/reshape_and_cache_dynamic.h"

#include <algorithm>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/quantize.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr int kThreads = 256;
  static constexpr unsigned kFewestLanes = 8;
  static constexpr unsigned kWarpLanes = 32;
};

struct DynamicShape {
  std::int64_t rows_of_first_part;
  std::int64_t rows;
  unsigned words_of_row[kMostParts];
  std::int64_t source_word_stride[kMostParts];
  unsigned lanes;
  bool whole_words;  // what a word becomes lies in one piece in the cache, aligned
};

// The source in 16-byte words.
template <class Source>
struct Words {
  static constexpr int kElements = PlainWord<Source>::kElements;
  static __device__ PlainWord<Source> Load(const std::uint8_t* address) {
    return *reinterpret_cast<const PlainWord<Source>*>(address);
  }
};

// The source element by element.
template <class Source>
struct Elements {
  static constexpr int kElements = 1;
  struct One {
    typename Source::Bits elements[1];
  };
  static __device__ One Load(const std::uint8_t* address) {
    return {*reinterpret_cast<const typename Source::Bits*>(address)};
  }
};

template <class Source, class Format, class Access>
__global__ void __launch_bounds__(Tuning::kThreads)
    WriteDynamic(const __grid_constant__ DynamicTokenWrite write, const __grid_constant__ DynamicShape shape) {
  const unsigned lanes = shape.lanes;
  const unsigned lane = threadIdx.x % lanes;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (Tuning::kThreads / lanes) + threadIdx.x / lanes;
  if (row >= shape.rows) return;
  const bool second = row >= shape.rows_of_first_part;
  if (second) row -= shape.rows_of_first_part;
  const TokenPart& part = write.tokens.parts[second];
  const std::int64_t token = row / part.heads;
  const std::int64_t head = row - token * part.heads;
  const std::int64_t slot = write.tokens.slots.Of(token);
  if (slot < 0) return;  // all lanes of the group
  const unsigned first_lane = threadIdx.x % Tuning::kWarpLanes / lanes * lanes;
  const unsigned group = lanes == Tuning::kWarpLanes ? 0xFFFFFFFFu : ((1u << lanes) - 1) << first_lane;

  const std::uint8_t* const source =
      part.source.data + token * part.source.token_stride + head * part.source.head_stride;
  const unsigned words = shape.words_of_row[second];
  const std::int64_t word_stride = shape.source_word_stride[second];
  std::uint8_t* const target = part.cache.data + OffsetOfSlot(part.cache, slot) + head * part.cache.head_stride;
  const ScalePlace& scales = write.scales[second];
  if (scales.data == nullptr) {  // all lanes of the group
    for (unsigned word = lane; word < words; word += lanes) {
      const auto plain = Access::Load(source + word * word_stride);
      std::uint8_t* const place = target + word * sizeof(plain);
      if (shape.whole_words) {
        Store(place, plain);
        continue;
      }
#pragma unroll
      for (int i = 0; i < Access::kElements; ++i) {
        Store(place + i * sizeof(plain.elements[0]), plain.elements[i]);
      }
    }
    return;
  }
  std::uint32_t largest = 0;
  for (unsigned word = lane; word < words; word += lanes) {
    const auto plain = Access::Load(source + word * word_stride);
#pragma unroll
    for (int i = 0; i < Access::kElements; ++i) {
      largest = max(largest, FiniteMagnitude(Source::ToFloat(plain.elements[i])));
    }
  }
  for (unsigned distance = lanes / 2; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(group, largest, distance));
  }
  const float scale = ScaleOfRow<Format>(largest);
  if (lane == 0) *AddressOfScale(scales, part.cache.block_size, slot, head) = scale;

  const ScaleDivider divider(scale);
  for (unsigned word = lane; word < words; word += lanes) {
    const auto plain = Access::Load(source + word * word_stride);
    const unsigned first = word * Access::kElements;
    if constexpr (Access::kElements > 1) {
      if (shape.whole_words) {
        *reinterpret_cast<CodeWord<Source>*>(target + first) = QuantizeWord<Source, Format>(plain, divider);
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < Access::kElements; ++i) {
      const std::int64_t element = first + i;
      target[element / part.cache.group_bytes * part.cache.group_stride + element % part.cache.group_bytes] =
          Format::Quantize(Source::ToFloat(plain.elements[i]), scale);
    }
  }
}

template <class Source, class Format, class Access>
Status Launch(const DynamicTokenWrite& write, bool whole_words, const DeviceStream& where) {
  DynamicShape shape{};
  shape.whole_words = whole_words;
  unsigned most_words = 1;
  for (int p = 0; p < write.tokens.part_count; ++p) {
    const TokenPart& part = write.tokens.parts[p];
    shape.words_of_row[p] = static_cast<unsigned>(part.head_size / Access::kElements);
    shape.source_word_stride[p] = Access::kElements * part.source.element_stride;
    most_words = std::max(most_words, shape.words_of_row[p]);
    shape.rows += write.tokens.tokens * part.heads;
    if (p == 0) shape.rows_of_first_part = shape.rows;
  }
  if (shape.rows == 0) return {};
  shape.lanes = Tuning::kFewestLanes;
  while (shape.lanes < Tuning::kWarpLanes && shape.lanes < most_words) shape.lanes *= 2;
  const std::int64_t rows_of_cta = Tuning::kThreads / shape.lanes;
  const std::int64_t grid = (shape.rows + rows_of_cta - 1) / rows_of_cta;
  if (grid >= std::int64_t{1} << 31) return ToStatus(cudaErrorInvalidConfiguration, "WriteDynamic");
  WriteDynamic<Source, Format, Access>
      <<<static_cast<unsigned>(grid), Tuning::kThreads, 0, StreamOf(where)>>>(write, shape);
  return LaunchStatus("WriteDynamic");
}

}  // namespace

Status ReshapeAndCacheDynamicCuda(const DynamicTokenWrite& write, const DeviceStream& where) {
  const TokenWrite& tokens = write.tokens;
  if (tokens.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  std::uint64_t source_bits = 0;
  std::uint64_t code_bits = 0;    // of the addresses of codes
  std::uint64_t copied_bits = 0;  // of those of copied words
  bool one_row = true;
  bool dense = true;
  for (int p = 0; p < tokens.part_count; ++p) {
    const TokenPart& part = tokens.parts[p];
    const std::int64_t row_bytes = part.head_size * ElementBytes(tokens.plain);
    source_bits |= reinterpret_cast<std::uintptr_t>(part.source.data) | static_cast<std::uint64_t>(row_bytes);
    if (tokens.tokens > 1) source_bits |= static_cast<std::uint64_t>(part.source.token_stride);
    if (part.heads > 1) source_bits |= static_cast<std::uint64_t>(part.source.head_stride);
    (write.scales[p].data == nullptr ? copied_bits : code_bits) |=
        reinterpret_cast<std::uintptr_t>(part.cache.data) |
        static_cast<std::uint64_t>(part.cache.block_stride | part.cache.token_stride | part.cache.head_stride);
    one_row = one_row && part.cache.group_bytes >= part.head_size;
    dense = dense && part.source.element_stride == ElementBytes(tokens.plain);
  }
  return DispatchPlain(tokens.plain, [&](auto source) {
    return DispatchDynamic(tokens.stored, [&](auto format) {
      using Source = decltype(source);
      using Format = decltype(format);
      const bool whole_words = one_row && code_bits % PlainWord<Source>::kElements == 0 && copied_bits % 16 == 0;
      return dense && source_bits % 16 == 0 ? Launch<Source, Format, Words<Source>>(write, whole_words, where)
                                            : Launch<Source, Format, Elements<Source>>(write, false, where);
    });
  });
}

}  // namespace paddle_kv
