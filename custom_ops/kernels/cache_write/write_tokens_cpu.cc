#include "paddle_kv/cache_write/write_tokens.h"

#include <algorithm>
#include <cstring>

#include "paddle_kv/common/bulk_copy.h"
#include "paddle_kv/common/parallel_for.h"

namespace paddle_kv {
namespace {

// Tokens that share the cache lines of a packed block: they are done together, head by head.
constexpr std::int64_t kTokensTogether = 64;

// Calls row(source row, cache row, head) for each head of each token that has a slot.
template <class Row>
void ForEachRow(const TokenWrite& write, const TokenPart& part, std::int64_t row_bytes, const Row& row) {
  const bool one_row = part.cache.group_bytes >= part.head_size * ElementBytes(write.stored);
  const std::int64_t together = one_row ? 1 : kTokensTogether;
  ParallelFor(write.tokens, write.tokens * part.heads * row_bytes, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t slots[kTokensTogether];
    for (std::int64_t first = begin; first < end; first += together) {
      const std::int64_t count = std::min(together, end - first);
      for (std::int64_t i = 0; i < count; ++i) slots[i] = write.slots.Of(first + i);
      for (std::int64_t head = 0; head < part.heads; ++head) {
        for (std::int64_t i = 0; i < count; ++i) {
          if (slots[i] < 0) continue;
          row(part.source.data + (first + i) * part.source.token_stride + head * part.source.head_stride,
              part.cache.data + OffsetOfSlot(part.cache, slots[i]) + head * part.cache.head_stride, head);
        }
      }
    }
  });
}

// Heads that lie side by side on both sides are one long row.
TokenPart WithJoinedHeads(const TokenWrite& write, TokenPart part) {
  const std::int64_t element_bytes = ElementBytes(write.plain);
  const std::int64_t stored_bytes = part.head_size * ElementBytes(write.stored);
  const bool one_scale = part.scale.pointer == nullptr || part.scale.stride_per_head == 0;
  if (part.source.element_stride == element_bytes && part.source.head_stride == part.head_size * element_bytes &&
      part.cache.head_stride == stored_bytes && part.cache.group_bytes >= stored_bytes && one_scale) {
    part.head_size *= part.heads;
    part.cache.group_bytes = stored_bytes * part.heads;
    part.heads = 1;
  }
  return part;
}

// Calls element(source offset, cache offset) along one row.
template <class Element>
void ForEachElement(const TokenPart& part, std::int64_t stored_bytes, const Element& element) {
  const std::int64_t of_group = std::min(part.cache.group_bytes / stored_bytes, part.head_size);
  std::int64_t done = 0;
  for (std::int64_t group = 0; done < part.head_size; ++group) {
    const std::int64_t count = std::min(of_group, part.head_size - done);
    for (std::int64_t i = 0; i < count; ++i, ++done) {
      element(done * part.source.element_stride, group * part.cache.group_stride + i * stored_bytes);
    }
  }
}

// The groups of one row in words of `kBytes`: with a size known at compile time each memcpy is one load and one store.
template <std::int64_t kBytes>
void CopyGroups(const TokenPart& part, const std::uint8_t* source, std::uint8_t* target, std::int64_t words,
                std::int64_t word_stride) {
  for (std::int64_t w = 0; w < words; ++w) {
    std::memcpy(target + w * part.cache.group_stride, source + w * word_stride, kBytes);
  }
}

// `Bits` is the word of one element.
template <class Bits>
void Copy(const TokenWrite& write, const TokenPart& part) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Bits));
  const std::int64_t row_bytes = part.head_size * kBytes;
  const std::int64_t group_bytes = part.cache.group_bytes;
  const bool dense = part.source.element_stride == kBytes;
  const BulkCopy copy(write.tokens * part.heads * row_bytes);
  const auto row = [&](const std::uint8_t* source, std::uint8_t* target, std::int64_t) {
    if (dense && group_bytes >= row_bytes) {
      copy(target, source, row_bytes);
    } else if (group_bytes == kBytes) {
      CopyGroups<kBytes>(part, source, target, part.head_size, part.source.element_stride);
    } else if (dense && group_bytes == 16) {
      CopyGroups<16>(part, source, target, row_bytes / 16, 16);
    } else {
      ForEachElement(part, kBytes, [&](std::int64_t from, std::int64_t to) {
        std::memcpy(target + to, source + from, sizeof(Bits));
      });
    }
  };
  ForEachRow(write, part, 2 * row_bytes, row);
}

template <class Source, class Format>
void Quantize(const TokenWrite& write, const TokenPart& part) {
  using Bits = typename Source::Bits;
  const std::int64_t row_bytes = part.head_size * static_cast<std::int64_t>(sizeof(Bits) + 1);
  const bool one_row = part.cache.group_bytes >= part.head_size;
  const bool dense = part.source.element_stride == static_cast<std::int64_t>(sizeof(Bits));
  ForEachRow(write, part, row_bytes, [&](const std::uint8_t* source, std::uint8_t* target, std::int64_t head) {
    const float scale = part.scale.Of(head);
    const auto code_at = [&](std::int64_t from) {
      Bits bits;
      std::memcpy(&bits, source + from, sizeof(bits));
      return Format::Quantize(Source::ToFloat(bits), scale);
    };
    if (one_row && dense) {  // strides known at compile time: the compiler makes vector code of this
      for (std::int64_t e = 0; e < part.head_size; ++e)
        target[e] = code_at(e * static_cast<std::int64_t>(sizeof(Bits)));
    } else {
      ForEachElement(part, 1, [&](std::int64_t from, std::int64_t to) { target[to] = code_at(from); });
    }
  });
}

}  // namespace

void WriteTokensCpu(const TokenWrite& write) {
  for (int p = 0; p < write.part_count; ++p) {
    const TokenPart part = WithJoinedHeads(write, write.parts[p]);
    if (write.plain == write.stored) {
      if (ElementBytes(write.plain) == 4) {
        Copy<std::uint32_t>(write, part);
      } else {
        Copy<std::uint16_t>(write, part);
      }
      continue;
    }
    DispatchPlain(write.plain, [&](auto source) {
      DispatchQuantized(write.stored, [&](auto format) { Quantize<decltype(source), decltype(format)>(write, part); });
    });
  }
}

}  // namespace paddle_kv
