#include "paddle_kv/cache_write/move_tokens.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "paddle_kv/common/parallel_for.h"

namespace paddle_kv {
namespace {

// Tokens that share the cache lines of a packed block: they are done together, head by head.
constexpr std::int64_t kTokensTogether = 64;

std::int64_t SlotOfToken(const TokenMove& move, std::int64_t token) {
  const TokenMap& map = move.map;
  if (map.block_table == nullptr) return token;
  std::int64_t low = 0;
  std::int64_t high = map.sequences + 1;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (StartsAbove(map, middle, token)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return SlotInTable(map, low, token, move.cache.block_size, move.block_count);
}

// Calls row(rows of the token, cache row or null, head) for all tokens and heads. `row_bytes` on both sides together.
template <class Row>
void ForEachRow(const TokenMove& move, std::int64_t row_bytes, const Row& row) {
  ParallelFor(move.tokens, move.tokens * move.heads * row_bytes, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t slots[kTokensTogether];
    for (std::int64_t first = begin; first < end; first += kTokensTogether) {
      const std::int64_t count = std::min(kTokensTogether, end - first);
      for (std::int64_t i = 0; i < count; ++i) {
        slots[i] = SlotOfToken(move, first + i);
      }
      for (std::int64_t head = 0; head < move.heads; ++head) {
        for (std::int64_t i = 0; i < count; ++i) {
          std::uint8_t* const on_rows =
              move.rows.data + OffsetOfSlot(move.rows, first + i) + head * move.rows.head_stride;
          std::uint8_t* const in_cache =
              slots[i] < 0 ? nullptr
                           : move.cache.data + OffsetOfSlot(move.cache, slots[i]) + head * move.cache.head_stride;
          row(on_rows, in_cache, head);
        }
      }
    }
  });
}

// Calls element(target offset, source offset) along one row, for rows whose bytes do not lie side by side on both
// sides.
template <class Element>
void ForEachElement(const RowPlace& a, std::int64_t a_bytes, const RowPlace& b, std::int64_t b_bytes,
                    std::int64_t elements, const Element& element) {
  // Groups hold whole elements, so the offset is a step for each element and a jump for each group.
  const std::int64_t a_group = a.group_bytes / a_bytes;
  const std::int64_t b_group = b.group_bytes / b_bytes;
  const std::int64_t together = std::min({a_group, b_group, elements});
  for (std::int64_t first = 0; first < elements; first += together) {
    const std::int64_t a_first = first / a_group * a.group_stride + first % a_group * a_bytes;
    const std::int64_t b_first = first / b_group * b.group_stride + first % b_group * b_bytes;
    const std::int64_t count = std::min(together, elements - first);
    for (std::int64_t i = 0; i < count; ++i) element(a_first + i * a_bytes, b_first + i * b_bytes);
  }
}

// `kBytes` at compile time turns each memcpy into one load and one store.
template <int kBytes>
void CopyPieces(const RowPlace& target_place, std::uint8_t* target, const RowPlace& source_place,
                const std::uint8_t* source, std::int64_t row_bytes) {
  ForEachElement(target_place, kBytes, source_place, kBytes, row_bytes / kBytes,
                 [&](std::int64_t to, std::int64_t from) { std::memcpy(target + to, source + from, kBytes); });
}

void CopyRow(const RowPlace& target_place, std::uint8_t* target, const RowPlace& source_place,
             const std::uint8_t* source, std::int64_t row_bytes) {
  const std::int64_t smaller = std::min(target_place.group_bytes, source_place.group_bytes);
  if (smaller >= row_bytes) {
    std::memcpy(target, source, row_bytes);
    return;
  }
  switch (smaller) {
    case 16:
      return CopyPieces<16>(target_place, target, source_place, source, row_bytes);
    case 8:
      return CopyPieces<8>(target_place, target, source_place, source, row_bytes);
    case 4:
      return CopyPieces<4>(target_place, target, source_place, source, row_bytes);
    case 2:
      return CopyPieces<2>(target_place, target, source_place, source, row_bytes);
    default:
      return CopyPieces<1>(target_place, target, source_place, source, row_bytes);
  }
}

void ZeroRow(const RowPlace& place, std::uint8_t* row, std::int64_t row_bytes) {
  const std::int64_t group = std::min(place.group_bytes, row_bytes);
  for (std::int64_t i = 0; i < row_bytes / group; ++i) std::memset(row + i * place.group_stride, 0, group);
}

template <class Format, class Plain>
void Dequantize(const TokenMove& move, const Dequantization& how) {
  using Bits = typename Plain::Bits;
  const bool scale_per_head = how.pointer != nullptr && how.stride_per_head != 0;
  // What each of the 256 codes means, one table for each scale.
  std::vector<Bits> meaning((scale_per_head ? move.heads : 1) * 256);
  for (std::size_t i = 0; i < meaning.size(); ++i) {
    const float scale =
        how.pointer == nullptr ? how.value : how.pointer[static_cast<std::int64_t>(i / 256) * how.stride_per_head];
    meaning[i] = Plain::FromFloat(Format::Dequantize(static_cast<std::uint8_t>(i % 256), scale));
  }
  ForEachRow(move, move.head_size * static_cast<std::int64_t>(1 + sizeof(Bits)),
             [&](std::uint8_t* on_rows, const std::uint8_t* in_cache, std::int64_t head) {
               if (in_cache == nullptr) {
                 ZeroRow(move.rows, on_rows, move.head_size * static_cast<std::int64_t>(sizeof(Bits)));
                 return;
               }
               const Bits* const table = meaning.data() + (scale_per_head ? head * 256 : 0);
               ForEachElement(move.rows, sizeof(Bits), move.cache, 1, move.head_size,
                              [&](std::int64_t to, std::int64_t from) {
                                std::memcpy(on_rows + to, table + in_cache[from], sizeof(Bits));
                              });
             });
}

}  // namespace

void GatherTokensCpu(const TokenMove& move) {
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  ForEachRow(move, 2 * row_bytes, [&](std::uint8_t* on_rows, const std::uint8_t* in_cache, std::int64_t) {
    if (in_cache == nullptr) {
      ZeroRow(move.rows, on_rows, row_bytes);
    } else {
      CopyRow(move.rows, on_rows, move.cache, in_cache, row_bytes);
    }
  });
}

void ScatterTokensCpu(const TokenMove& move) {
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  ForEachRow(move, 2 * row_bytes, [&](const std::uint8_t* on_rows, std::uint8_t* in_cache, std::int64_t) {
    if (in_cache != nullptr) CopyRow(move.cache, in_cache, move.rows, on_rows, row_bytes);
  });
}

void DequantizeTokensCpu(const TokenMove& move, const Dequantization& how) {
  DispatchQuantized(how.format, [&](auto format) {
    DispatchPlain(how.plain, [&](auto plain) { Dequantize<decltype(format), decltype(plain)>(move, how); });
  });
}

}  // namespace paddle_kv
