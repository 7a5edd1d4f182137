#include <algorithm>
#include <cstring>

#include "paddle_kv/cache_write/reshape_and_cache_dynamic.h"
#include "paddle_kv/common/parallel_for.h"

namespace paddle_kv {
namespace {

template <class Source, class Format>
void WriteRow(const TokenPart& part, const std::uint8_t* source, std::uint8_t* target, float* scale_of_row) {
  using Bits = typename Source::Bits;
  const auto element = [&](std::int64_t e) {
    Bits bits;
    std::memcpy(&bits, source + e * part.source.element_stride, sizeof(bits));
    return Source::ToFloat(bits);
  };
  std::uint32_t largest = 0;
  for (std::int64_t e = 0; e < part.head_size; ++e) largest = std::max(largest, FiniteMagnitude(element(e)));
  const float scale = ScaleOfRow<Format>(largest);
  *scale_of_row = scale;
  const std::int64_t of_group = std::min(part.cache.group_bytes, part.head_size);
  for (std::int64_t e = 0, group = 0; e < part.head_size; ++group) {
    std::uint8_t* const codes = target + group * part.cache.group_stride;
    const std::int64_t count = std::min(of_group, part.head_size - e);
    for (std::int64_t i = 0; i < count; ++i, ++e) codes[i] = Format::Quantize(element(e), scale);
  }
}

template <class Bits>
void CopyRow(const TokenPart& part, const std::uint8_t* source, std::uint8_t* target) {
  for (std::int64_t e = 0; e < part.head_size; ++e) {
    std::memcpy(target + e * static_cast<std::int64_t>(sizeof(Bits)), source + e * part.source.element_stride,
                sizeof(Bits));
  }
}

template <class Source, class Format>
void WritePart(const TokenWrite& write, const TokenPart& part, const ScalePlace& scales) {
  const std::int64_t row_bytes = part.head_size * static_cast<std::int64_t>(sizeof(typename Source::Bits) + 1);
  ParallelFor(write.tokens, write.tokens * part.heads * row_bytes, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      const std::int64_t slot = write.slots.Of(token);
      if (slot < 0) continue;
      for (std::int64_t head = 0; head < part.heads; ++head) {
        const std::uint8_t* const source =
            part.source.data + token * part.source.token_stride + head * part.source.head_stride;
        std::uint8_t* const target = part.cache.data + OffsetOfSlot(part.cache, slot) + head * part.cache.head_stride;
        if (scales.data == nullptr) {
          CopyRow<typename Source::Bits>(part, source, target);
        } else {
          WriteRow<Source, Format>(part, source, target, AddressOfScale(scales, part.cache.block_size, slot, head));
        }
      }
    }
  });
}

}  // namespace

void ReshapeAndCacheDynamicCpu(const DynamicTokenWrite& write) {
  DispatchPlain(write.tokens.plain, [&](auto source) {
    DispatchDynamic(write.tokens.stored, [&](auto format) {
      for (int p = 0; p < write.tokens.part_count; ++p) {
        WritePart<decltype(source), decltype(format)>(write.tokens, write.tokens.parts[p], write.scales[p]);
      }
    });
  });
}

}  // namespace paddle_kv
