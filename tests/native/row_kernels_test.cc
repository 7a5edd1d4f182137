// The kernels for whole rows, on the CPU, with random shapes, strides, slots and tables, against plain loops.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "device_code.h"
#include "paddle_kv/cache_write/gather_rows.h"
#include "paddle_kv/cache_write/write_rows.h"

namespace paddle_kv {
namespace {

constexpr int kCases = 400;

struct Random {
  std::mt19937_64 engine{1};
  std::int64_t Below(std::int64_t bound) { return static_cast<std::int64_t>(engine() % bound); }
  bool Once(std::int64_t in) { return Below(in) == 0; }
};

// Random bytes from an address that is a multiple of 16.
class Memory {
 public:
  Memory(std::int64_t bytes, Random* random) : bytes_(bytes + 16), size_(bytes) {
    for (std::uint8_t& byte : bytes_) byte = static_cast<std::uint8_t>(random->engine());
  }
  std::uint8_t* data() { return bytes_.data() + (16 - reinterpret_cast<std::uintptr_t>(bytes_.data()) % 16) % 16; }
  Range range() { return {data(), size_}; }
  std::vector<std::uint8_t> Copy() { return {data(), data() + size_}; }

 private:
  std::vector<std::uint8_t> bytes_;
  std::int64_t size_;
};

// Integers as one of the two types.
class Ids {
 public:
  Ids(const std::vector<std::int64_t>& values, bool is_int64) : wide_(values), narrow_(values.begin(), values.end()) {
    if (!is_int64) wide_.assign(narrow_.begin(), narrow_.end());
    is_int64_ = is_int64;
  }
  const void* data() const {
    return is_int64_ ? static_cast<const void*>(wide_.data()) : static_cast<const void*>(narrow_.data());
  }
  std::int64_t operator[](std::int64_t i) const { return wide_[i]; }

 private:
  std::vector<std::int64_t> wide_;
  std::vector<std::int32_t> narrow_;
  bool is_int64_;
};

// Rows of `heads` side by side in a token (NHD), or apart in a block (HND); some have gaps between tokens and blocks.
RowPlace CachePlace(bool apart, std::int64_t row_bytes, std::int64_t heads, std::int64_t block_size, Random* random) {
  RowPlace place{};
  place.block_size = block_size;
  place.group_stride = place.group_bytes = row_bytes;
  if (apart) {
    place.token_stride = row_bytes;
    place.head_stride = row_bytes * block_size;
    place.block_stride = place.head_stride * heads;
  } else {
    place.token_stride = row_bytes * heads + 16 * random->Below(2);
    place.head_stride = heads > 1 ? row_bytes : 0;
    place.block_stride = place.token_stride * block_size;
  }
  if (random->Once(2)) place.block_stride += 16 * random->Below(3);
  return place;
}

void Inserts() {
  Random random;
  int taken = 0;
  for (int i = 0; i < kCases; ++i) {
    const std::int64_t tokens = 1 + random.Below(40);
    const std::int64_t heads = random.Once(2) ? 1 : 1 + random.Below(6);
    const std::int64_t block_size = random.Once(4) ? 1 + random.Below(20) : std::int64_t{1} << random.Below(5);
    const std::int64_t blocks = 1 + random.Below(6);
    const std::int64_t limit = blocks * block_size;
    const std::int64_t slot_stride = random.Once(2) ? 1 : 1 + random.Below(3);
    const bool apart = random.Once(2);
    const bool is_int64 = random.Once(2);
    std::vector<std::int64_t> every(limit);
    for (std::int64_t slot = 0; slot < limit; ++slot) every[slot] = slot;
    std::shuffle(every.begin(), every.end(), random.engine);
    std::vector<std::int64_t> chosen(tokens * slot_stride, 0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::int64_t slot = t < limit ? every[t] : -1;
      if (random.Once(6)) slot = -1 - random.Below(9);
      if (random.Once(9)) slot = limit + random.Below(5);
      if (random.Once(9) && is_int64) slot = (std::int64_t{1} << 32) + random.Below(limit);
      chosen[t * slot_stride] = slot;
    }
    const Ids slots(chosen, is_int64);
    TokenWrite write{};
    write.part_count = 2;
    write.plain = write.stored = ElementType::kFloat16;
    write.tokens = tokens;
    write.slots = {slots.data(), slot_stride, limit, is_int64};
    std::vector<Memory> sources, caches;
    std::vector<std::vector<std::uint8_t>> expected;
    std::int64_t head_size = 0;
    for (int p = 0; p < kMostParts; ++p) {
      if (p == 0 || random.Once(2)) head_size = 8 * (1 + random.Below(random.Once(3) ? 160 : 20));
      if (random.Once(30)) head_size += 3;
      const std::int64_t row_bytes = 2 * head_size;
      const std::int64_t head_stride = row_bytes + 16 * random.Below(2);
      const std::int64_t token_stride = heads * head_stride + 16 * random.Below(3);
      RowPlace place = CachePlace(apart, row_bytes, heads, block_size, &random);
      sources.emplace_back(tokens * token_stride, &random);
      caches.emplace_back(blocks * place.block_stride, &random);
      place.data = caches[p].data();
      write.parts[p] = {{sources[p].data(), token_stride, heads > 1 ? head_stride : 0, 2}, place, heads, head_size, {}};
      expected.push_back(caches[p].Copy());
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t slot = slots[t * slot_stride];
        if (slot < 0 || slot >= limit) continue;
        for (std::int64_t h = 0; h < heads; ++h) {
          std::memcpy(&expected[p][OffsetOfSlot(place, slot) + h * place.head_stride],
                      sources[p].data() + t * token_stride + h * head_stride, row_bytes);
        }
      }
    }
    WholeRows rows;
    if (!AsWholeRows(write, &rows)) continue;
    ++taken;
    AllowMemory({sources[0].range(), sources[1].range()}, {caches[0].range(), caches[1].range()});
    CHECK(WriteWholeRows(rows, random.Once(2), {}).ok());
    for (int p = 0; p < kMostParts; ++p) CHECK(caches[p].Copy() == expected[p]);
  }
  CHECK(taken > kCases / 2);
}

void WhatIsNoWholeRowIsLeft() {
  Random random;
  Memory memory(4096, &random);
  const std::int64_t slot = 1;
  TokenWrite write{};
  write.part_count = 2;
  write.plain = write.stored = ElementType::kFloat16;
  write.tokens = 2;
  write.slots = {&slot, 0, 8, true};
  const TokenPart part{{memory.data(), 64, 0, 2}, {memory.data(), 4, 256, 64, 0, 64, 64}, 1, 32, {}};
  const auto taken = [&](auto change) {
    TokenWrite changed = write;
    changed.parts[0] = changed.parts[1] = part;
    change(&changed);
    WholeRows rows;
    return AsWholeRows(changed, &rows);
  };
  CHECK(taken([](TokenWrite*) {}));
  CHECK(!taken([](TokenWrite* w) { w->part_count = 1; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[1].source.data += 2; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[0].cache.data += 8; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[0].source.token_stride += 2; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[1].source.element_stride = 4; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[1].cache.group_bytes = 32; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[1].heads = 2; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[0].head_size = 31; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[0].source.token_stride = -64; }));
  CHECK(!taken([](TokenWrite* w) { w->parts[0].cache.block_stride = std::int64_t{1} << 32; }));
  CHECK(!taken([](TokenWrite* w) { w->slots.stride = -1; }));
  CHECK(!taken([](TokenWrite* w) { w->slots.limit = std::int64_t{1} << 32; }));
  CHECK(!taken([](TokenWrite* w) {
    for (TokenPart& p : w->parts) p.head_size = 1 << 14, p.cache.group_bytes = 1 << 15;  // more words than threads
  }));
  CHECK(!taken([](TokenWrite* w) {
    for (TokenPart& p : w->parts) p.cache.block_size = 3;  // and a gap between blocks
  }));
}

void Gathers() {
  Random random;
  int taken = 0;
  for (int i = 0; i < kCases; ++i) {
    const std::int64_t heads = random.Once(2) ? 1 : 1 + random.Below(5);
    const std::int64_t row_bytes = 16 * (1 + random.Below(random.Once(3) ? 40 : 20));
    const std::int64_t block_size = random.Once(9) ? 1 + random.Below(20) : std::int64_t{1} << random.Below(6);
    const std::int64_t blocks = 1 + random.Below(8);
    const std::int64_t sequences = 1 + random.Below(random.Once(3) ? 100 : 6);
    const std::int64_t of_sequence = 1 + random.Below(6);
    std::vector<std::int64_t> starts{random.Once(3) ? random.Below(5) : 0};
    for (std::int64_t s = 0; s < sequences; ++s) {
      const std::int64_t most = sequences > 20 ? 7 : of_sequence * block_size + 2;
      starts.push_back(starts.back() + (random.Once(4) ? 0 : random.Below(most)));
    }
    const std::int64_t tokens = 1 + random.Below(starts.back() + 6);
    std::vector<std::int64_t> entries(sequences * of_sequence);
    const bool wide = random.Once(2);
    for (std::int64_t& block : entries) {
      block = random.Below(blocks);
      if (random.Once(8)) block = -1 - random.Below(3);
      if (random.Once(12)) block = blocks + random.Below(3);
      if (random.Once(12) && wide) block = (std::int64_t{1} << 32) + random.Below(blocks);
    }
    const bool wide_lengths = random.Once(2);
    const Ids table(entries, wide), lengths(starts, wide_lengths);
    RowPlace place = CachePlace(random.Once(2), row_bytes, heads, block_size, &random);
    Memory cache(blocks * place.block_stride, &random), rows(tokens * heads * row_bytes, &random);
    place.data = cache.data();
    const std::int64_t token_bytes = heads * row_bytes;
    const RowPlace to{rows.data(), 1, token_bytes, token_bytes, heads > 1 ? row_bytes : 0, row_bytes, row_bytes};
    const TokenMove move{to,
                         place,
                         {table.data(), lengths.data(), nullptr, wide, wide_lengths, false, sequences, of_sequence},
                         blocks,
                         tokens,
                         heads,
                         row_bytes / 2,
                         2};
    std::vector<std::uint8_t> expected(tokens * token_bytes, 0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::int64_t above = 0;
      while (above <= sequences && lengths[above] <= t) ++above;
      if (above == 0 || above > sequences) continue;
      const std::int64_t position = t - lengths[above - 1];
      if (position >= of_sequence * block_size) continue;
      const std::int64_t block = table[(above - 1) * of_sequence + position / block_size];
      if (block < 0 || block >= blocks) continue;
      for (std::int64_t h = 0; h < heads; ++h) {
        std::memcpy(
            &expected[t * token_bytes + h * row_bytes],
            cache.data() + OffsetOfSlot(place, block * block_size + position % block_size) + h * place.head_stride,
            row_bytes);
      }
    }
    RowGather gather;
    if (!AsRowGather(move, &gather)) continue;
    ++taken;
    AllowMemory({cache.range()}, {rows.range()});
    CHECK(GatherRows(gather, {}).ok());
    CHECK(rows.Copy() == expected);
  }
  CHECK(taken > kCases / 2);
}

void WhatIsNoGatherOfWholeRowsIsLeft() {
  Random random;
  Memory memory(4096, &random);
  const std::int64_t zeros[2] = {};
  const RowPlace rows{memory.data(), 1, 64, 64, 0, 64, 64};
  const RowPlace cache{memory.data(), 4, 256, 64, 0, 64, 64};
  const TokenMove move{rows, cache, {zeros, zeros, nullptr, true, true, false, 1, 1}, 2, 4, 1, 32, 2};
  const auto taken = [&](auto change) {
    TokenMove changed = move;
    change(&changed);
    RowGather gather;
    return AsRowGather(changed, &gather);
  };
  CHECK(taken([](TokenMove*) {}));
  CHECK(!taken([](TokenMove* m) { m->map.block_table = nullptr; }));
  CHECK(!taken([](TokenMove* m) { m->map.starts = m->map.block_table; }));
  CHECK(!taken([](TokenMove* m) { m->map.sequences = 0; }));
  CHECK(!taken([](TokenMove* m) { m->block_count = 0; }));
  CHECK(!taken([](TokenMove* m) { m->rows.block_size = 2; }));
  CHECK(!taken([](TokenMove* m) { m->rows.group_bytes = 16; }));
  CHECK(!taken([](TokenMove* m) { m->cache.group_bytes = 16; }));
  CHECK(!taken([](TokenMove* m) { m->cache.block_size = 3; }));
  CHECK(!taken([](TokenMove* m) { m->cache.data += 8; }));
  CHECK(!taken([](TokenMove* m) { m->rows.data += 8; }));
  CHECK(!taken([](TokenMove* m) { m->cache.token_stride += 8; }));
  CHECK(!taken([](TokenMove* m) { m->cache.block_stride = std::int64_t{1} << 31; }));
  CHECK(!taken([](TokenMove* m) { m->cache.token_stride = -64; }));
  CHECK(!taken([](TokenMove* m) { m->tokens = std::int64_t{1} << 31; }));
  CHECK(!taken([](TokenMove* m) { m->map.blocks_per_sequence = std::int64_t{1} << 30; }));
  CHECK(!taken([](TokenMove* m) { m->head_size = 1 << 14, m->rows.group_bytes = m->cache.group_bytes = 1 << 15; }));
  CHECK(!taken([](TokenMove* m) { m->map.sequences = 1 << 16, m->map.blocks_per_sequence = 1 << 15; }));
}

// A mapping that runs backwards begins at its end.
void SlotsAreReadFromTheLowestAddress() {
  const std::vector<std::int64_t> values = {5, 900, 901, 2, 902, 903, 7, 904, 905, 4};
  for (const bool is_int64 : {false, true}) {
    const Ids ids(values, is_int64);
    const std::int64_t item_bytes = is_int64 ? 8 : 4;
    for (const std::int64_t stride : {-3, -1, 0, 1, 3}) {
      const std::int64_t tokens = 4;
      const std::int64_t first = stride < 0 ? -stride * (tokens - 1) : 0;
      const TokenSlots slots{static_cast<const std::uint8_t*>(ids.data()) + first * item_bytes, stride, 1000, is_int64};
      const SlotMemory memory = MemoryOfSlots(slots, tokens);
      CHECK(memory.lowest == ids.data());
      CHECK(memory.bytes == (std::max(stride, -stride) * (tokens - 1) + 1) * item_bytes);
      const std::vector<std::uint8_t> copy(memory.lowest, memory.lowest + memory.bytes);
      TokenSlots read = slots;
      read.slots = copy.data() + memory.first;
      for (std::int64_t t = 0; t < tokens; ++t) CHECK(read.Of(t) == values[first + t * stride]);
    }
  }
}

const Test kTests[] = {
    {"slots_are_read_from_the_lowest_address", SlotsAreReadFromTheLowestAddress},
    {"inserts", Inserts},
    {"no_whole_rows", WhatIsNoWholeRowIsLeft},
    {"gathers", Gathers},
    {"no_gather_of_whole_rows", WhatIsNoGatherOfWholeRowsIsLeft},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
