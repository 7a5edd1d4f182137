#include "paddle_kv/cache_write/move_tokens.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "paddle_kv/common/bulk_copy.h"
#include "paddle_kv/common/parallel_for.h"

namespace paddle_kv {
namespace {

// Tokens that are moved together, head by head: of a packed block they share the cache lines, and their rows stay in
// the first-level cache.
constexpr std::int64_t kTileTokens = 64;

// Tokens of one sequence whose rows follow each other at one distance on both sides.
struct Run {
  std::int64_t count;
  std::int64_t sequence;
  std::int64_t on_rows;   // offset of the first row
  std::int64_t in_cache;  // likewise; -1: these tokens have no slot
  std::int64_t rows_step;
  std::int64_t cache_step;
};

// The rows of one head for the tokens of a run. `in_cache` is null where they have no slot.
struct RunOfHead {
  const Run& run;
  std::int64_t head;
  std::uint8_t* on_rows;
  std::uint8_t* in_cache;
};

struct TokenPlace {
  std::int64_t slot;  // -1: none
  std::int64_t sequence;
};

TokenPlace PlaceOfToken(const TokenMove& move, std::int64_t token) {
  const TokenMap& map = move.map;
  if (map.block_table == nullptr) return {token, 0};
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
  const std::int64_t sequence = SequenceOf(map, low);
  const std::int64_t position = PositionOf(map, low, token);
  if (position < 0) return {-1, sequence};
  const std::int64_t block = BlockInTable(map, low, position / move.cache.block_size, move.block_count);
  return {block < 0 ? -1 : block * move.cache.block_size + position % move.cache.block_size, sequence};
}

// Adds a token to the last run, or begins another one.
void AddToken(std::int64_t on_rows, std::int64_t in_cache, std::int64_t sequence, std::vector<Run>* runs) {
  if (!runs->empty()) {
    Run& last = runs->back();
    const bool alike = (in_cache < 0) == (last.in_cache < 0) && sequence == last.sequence;
    const std::int64_t rows_step = on_rows - last.on_rows - (last.count - 1) * last.rows_step;
    const std::int64_t cache_step = in_cache < 0 ? 0 : in_cache - last.in_cache - (last.count - 1) * last.cache_step;
    if (alike && (last.count == 1 || (rows_step == last.rows_step && cache_step == last.cache_step))) {
      last.rows_step = rows_step;
      last.cache_step = cache_step;
      ++last.count;
      return;
    }
  }
  runs->push_back({1, sequence, on_rows, in_cache, 0, 0});
}

// Calls use(run of a head) for all tokens and heads. `row_bytes` on both sides together.
template <class Use>
void ForEachRun(const TokenMove& move, std::int64_t row_bytes, const Use& use) {
  ParallelFor(move.tokens, move.tokens * move.heads * row_bytes, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Run> runs;
    for (std::int64_t first = begin; first < end; first += kTileTokens) {
      runs.clear();
      for (std::int64_t token = first; token < std::min(first + kTileTokens, end); ++token) {
        const TokenPlace place = PlaceOfToken(move, token);
        const std::int64_t in_cache = place.slot < 0 ? -1 : OffsetOfSlot(move.cache, place.slot);
        AddToken(OffsetOfSlot(move.rows, token), in_cache, place.sequence, &runs);
      }
      for (std::int64_t head = 0; head < move.heads; ++head) {
        std::uint8_t* const rows = move.rows.data + head * move.rows.head_stride;
        std::uint8_t* const cache = move.cache.data + head * move.cache.head_stride;
        for (const Run& run : runs) {
          use(RunOfHead{run, head, rows + run.on_rows, run.in_cache < 0 ? nullptr : cache + run.in_cache});
        }
      }
    }
  });
}

std::int64_t OffsetInRow(const RowPlace& place, std::int64_t offset) {
  return offset / place.group_bytes * place.group_stride + offset % place.group_bytes;
}

void ZeroRows(const RowPlace& place, const RunOfHead& rows, std::int64_t row_bytes) {
  const std::int64_t group = std::min(place.group_bytes, row_bytes);
  for (std::int64_t i = 0; i < rows.run.count; ++i) {
    for (std::int64_t g = 0; g < row_bytes / group; ++g) {
      std::memset(rows.on_rows + i * rows.run.rows_step + g * place.group_stride, 0, group);
    }
  }
}

enum class Way { kGather, kScatter };

// Copies `bytes` from one side to the other.
template <Way way, class Copy>
void CopyBytes(const Copy& copy, std::uint8_t* on_rows, std::uint8_t* in_cache, std::int64_t bytes) {
  copy(way == Way::kGather ? on_rows : in_cache, way == Way::kGather ? in_cache : on_rows, bytes);
}

// Rows that are contiguous on both sides.
template <Way way>
void CopyRows(const BulkCopy& copy, const RunOfHead& rows, std::int64_t row_bytes) {
  const Run& run = rows.run;
  if (run.rows_step == row_bytes && run.cache_step == row_bytes) {
    CopyBytes<way>(copy, rows.on_rows, rows.in_cache, run.count * row_bytes);
    return;
  }
  for (std::int64_t i = 0; i < run.count; ++i) {
    CopyBytes<way>(copy, rows.on_rows + i * run.rows_step, rows.in_cache + i * run.cache_step, row_bytes);
  }
}

// Rows in pieces of kBytes, each of which is contiguous on both sides. Along tokens first: so a packed block is walked
// from front to back. `kBytes` at compile time turns each copy into one load and one store.
template <Way way, int kBytes>
void CopyPieces(const TokenMove& move, const RunOfHead& rows, std::int64_t row_bytes) {
  const Run run = rows.run;
  const auto copy = [](std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes) {
    std::memcpy(to, from, bytes);
  };
  for (std::int64_t piece = 0; piece < row_bytes; piece += kBytes) {
    std::uint8_t* const on_rows = rows.on_rows + OffsetInRow(move.rows, piece);
    std::uint8_t* const in_cache = rows.in_cache + OffsetInRow(move.cache, piece);
    for (std::int64_t i = 0; i < run.count; ++i) {
      CopyBytes<way>(copy, on_rows + i * run.rows_step, in_cache + i * run.cache_step, kBytes);
    }
  }
}

template <Way way>
void CopyRun(const TokenMove& move, const BulkCopy& copy, const RunOfHead& rows, std::int64_t row_bytes) {
  const std::int64_t piece = std::min(move.rows.group_bytes, move.cache.group_bytes);
  if (piece >= row_bytes) {
    CopyRows<way>(copy, rows, row_bytes);
  } else if (piece % 16 == 0) {
    CopyPieces<way, 16>(move, rows, row_bytes);
  } else if (piece % 8 == 0) {
    CopyPieces<way, 8>(move, rows, row_bytes);
  } else if (piece % 4 == 0) {
    CopyPieces<way, 4>(move, rows, row_bytes);
  } else if (piece % 2 == 0) {
    CopyPieces<way, 2>(move, rows, row_bytes);
  } else {
    CopyPieces<way, 1>(move, rows, row_bytes);
  }
}

// Heads that follow each other on both sides are one row.
TokenMove WithMergedHeads(TokenMove move) {
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  const auto dense = [row_bytes](const RowPlace& place) {
    return place.head_stride == row_bytes && place.group_bytes >= row_bytes;
  };
  if (dense(move.rows) && dense(move.cache)) {
    move.head_size *= move.heads;
    move.rows.group_bytes = move.cache.group_bytes = move.head_size * move.element_bytes;
    move.heads = 1;
  }
  return move;
}

template <class Format, class Plain>
void Dequantize(const TokenMove& move, const Dequantization& how) {
  using Bits = typename Plain::Bits;
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Bits));
  const bool scale_per_head = how.pointer != nullptr && how.stride_per_head != 0;
  // What each of the 256 codes means, one table for each scale.
  std::vector<Bits> meaning((scale_per_head ? move.heads : 1) * 256);
  for (std::size_t i = 0; i < meaning.size(); ++i) {
    const float scale =
        how.pointer == nullptr ? how.value : how.pointer[static_cast<std::int64_t>(i / 256) * how.stride_per_head];
    meaning[i] = Plain::FromFloat(Format::Dequantize(static_cast<std::uint8_t>(i % 256), scale));
  }
  // The rows are contiguous. The cache is too, or it is walked along tokens as in CopyPieces.
  ForEachRun(move, move.head_size * (1 + kBytes), [&](const RunOfHead& rows) {
    if (rows.in_cache == nullptr) {
      ZeroRows(move.rows, rows, move.head_size * kBytes);
      return;
    }
    const Run run = rows.run;
    const Bits* const table = meaning.data() + (scale_per_head ? rows.head * 256 : 0);
    if (move.cache.group_bytes >= move.head_size) {
      for (std::int64_t i = 0; i < run.count; ++i) {
        std::uint8_t* const values = rows.on_rows + i * run.rows_step;
        const std::uint8_t* const codes = rows.in_cache + i * run.cache_step;
        for (std::int64_t d = 0; d < move.head_size; ++d) std::memcpy(values + d * kBytes, table + codes[d], kBytes);
      }
      return;
    }
    for (std::int64_t d = 0; d < move.head_size; ++d) {
      std::uint8_t* const values = rows.on_rows + d * kBytes;
      const std::uint8_t* const codes = rows.in_cache + OffsetInRow(move.cache, d);
      for (std::int64_t i = 0; i < run.count; ++i) {
        std::memcpy(values + i * run.rows_step, table + codes[i * run.cache_step], kBytes);
      }
    }
  });
}

// With a scale for each row a table would cost more than it saves.
template <class Format, class Plain>
void DequantizeByToken(const TokenMove& move, const Dequantization& how) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(typename Plain::Bits));
  const bool in_one_group = move.cache.group_bytes >= move.head_size;
  ForEachRun(move, move.head_size * (1 + kBytes), [&](const RunOfHead& rows) {
    if (rows.in_cache == nullptr) {
      ZeroRows(move.rows, rows, move.head_size * kBytes);
      return;
    }
    const Run run = rows.run;
    const float* const scales = how.pointer + rows.head * how.stride_per_head;
    for (std::int64_t i = 0; i < run.count; ++i) {
      const float scale = scales[OffsetOfScales(how, move.cache, run.in_cache + i * run.cache_step, run.sequence)];
      std::uint8_t* const values = rows.on_rows + i * run.rows_step;
      const std::uint8_t* const codes = rows.in_cache + i * run.cache_step;
      for (std::int64_t d = 0; d < move.head_size; ++d) {
        const std::uint8_t code = codes[in_one_group ? d : OffsetInRow(move.cache, d)];
        const auto value = Plain::FromFloat(Format::Dequantize(code, scale));
        std::memcpy(values + d * kBytes, &value, kBytes);
      }
    }
  });
}

}  // namespace

void GatherTokensCpu(const TokenMove& given) {
  const TokenMove move = WithMergedHeads(given);
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  const BulkCopy copy(move.tokens * move.heads * row_bytes);
  ForEachRun(move, 2 * row_bytes, [&](const RunOfHead& rows) {
    if (rows.in_cache == nullptr) {
      ZeroRows(move.rows, rows, row_bytes);
    } else {
      CopyRun<Way::kGather>(move, copy, rows, row_bytes);
    }
  });
}

void ScatterTokensCpu(const TokenMove& given) {
  const TokenMove move = WithMergedHeads(given);
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  const BulkCopy copy(move.tokens * move.heads * row_bytes);
  ForEachRun(move, 2 * row_bytes, [&](const RunOfHead& rows) {
    if (rows.in_cache != nullptr) CopyRun<Way::kScatter>(move, copy, rows, row_bytes);
  });
}

void DequantizeTokensCpu(const TokenMove& move, const Dequantization& how) {
  DispatchQuantized(how.format, [&](auto format) {
    DispatchPlain(how.plain, [&](auto plain) {
      if (how.DiffersByToken()) {
        DequantizeByToken<decltype(format), decltype(plain)>(move, how);
      } else {
        Dequantize<decltype(format), decltype(plain)>(move, how);
      }
    });
  });
}

}  // namespace paddle_kv
