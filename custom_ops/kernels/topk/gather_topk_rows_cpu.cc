#include "paddle_kv/topk/gather_topk_rows.h"

#include <algorithm>
#include <cstring>

#include "paddle_kv/common/parallel_for.h"

namespace paddle_kv {
namespace {

constexpr std::int32_t kUnused = -1;

// What belongs to one request.
struct Request {
  Request(const TopkRows& call, std::int64_t number)
      : call(call),
        number(number),
        token_ids(call.token_ids + number * call.k),
        slot_of_token(call.slot_of_token + number * call.max_tokens),
        token_of_slot(call.token_of_slot + number * call.num_slots),
        lru_order(call.lru_order + number * call.num_slots),
        rows(call.rows + number * call.k * call.row_bytes),
        resident(call.resident + number * call.num_slots * call.row_bytes),
        used(call.scratch + number * call.scratch_stride),
        order(used + call.num_slots),
        victims(order + call.k) {}

  bool IsSlot(std::int32_t slot) const { return slot >= 0 && slot < call.num_slots; }
  bool IsToken(std::int32_t token) const { return token >= 0 && token < call.max_tokens; }

  const TopkRows& call;
  const std::int64_t number;
  const std::int32_t* const token_ids;
  std::int32_t* const slot_of_token;
  std::int32_t* const token_of_slot;
  std::int32_t* const lru_order;
  std::uint8_t* const rows;
  std::uint8_t* const resident;
  std::int32_t* const used;     // of each slot: kUnused, or not
  std::int32_t* const order;    // the slots that are used, in the order of the list
  std::int32_t* const victims;  // the slots that none of the listed tokens has, the oldest first
};

void Forget(const Request& of) {
  for (std::int32_t s = 0; s < of.call.num_slots; ++s) {
    if (of.IsToken(of.token_of_slot[s])) of.slot_of_token[of.token_of_slot[s]] = kAbsent;
    of.token_of_slot[s] = kAbsent;
    of.lru_order[s] = s;
  }
}

void Gather(const Request& of) {
  const TopkRows& call = of.call;
  const std::int64_t row_bytes = call.row_bytes;
  std::fill(of.used, of.used + call.num_slots, kUnused);
  for (std::int32_t i = 0; i < call.k; ++i) {
    const std::int32_t token = of.token_ids[i];
    const std::int32_t slot = of.IsToken(token) ? of.slot_of_token[token] : kAbsent;
    if (of.IsSlot(slot)) of.used[slot] = 0;
  }
  std::int32_t victim_count = 0;
  for (std::int32_t l = 0; l < call.num_slots; ++l) {
    const std::int32_t slot = of.lru_order[l];
    if (!of.IsSlot(slot) || of.used[slot] != kUnused) continue;
    if (victim_count < call.k) of.victims[victim_count] = slot;  // more cannot be needed
    of.lru_order[victim_count++] = slot;
  }
  std::int32_t used = 0;
  std::int32_t missed = 0;
  for (std::int32_t i = 0; i < call.k; ++i) {
    const std::int32_t token = of.token_ids[i];
    std::uint8_t* const row = of.rows + i * row_bytes;
    std::int32_t slot = of.IsToken(token) ? of.slot_of_token[token] : kAbsent;
    if (of.IsSlot(slot)) {
      if (of.used[slot] == 0) {
        of.used[slot] = 1;
        of.order[used++] = slot;
      }
      std::memcpy(row, of.resident + slot * row_bytes, row_bytes);
      continue;
    }
    const std::uint8_t* const from = of.IsToken(token) ? HostRowOf(call, of.number, token) : nullptr;
    if (from == nullptr || missed == std::min(victim_count, call.k)) {
      std::memset(row, 0, row_bytes);
      continue;
    }
    slot = of.victims[missed++];
    if (of.IsToken(of.token_of_slot[slot])) of.slot_of_token[of.token_of_slot[slot]] = kAbsent;
    of.token_of_slot[slot] = token;
    of.slot_of_token[token] = slot;
    of.used[slot] = 1;
    of.order[used++] = slot;
    std::memcpy(row, from, row_bytes);
    std::memcpy(of.resident + slot * row_bytes, row, row_bytes);
  }
  std::copy(of.lru_order + missed, of.lru_order + victim_count, of.lru_order);
  std::copy(of.order, of.order + used, of.lru_order + call.num_slots - used);
}

}  // namespace

void GatherTopkRowsCpu(const TopkRows& call) {
  ParallelFor(call.batch, call.batch * call.k * call.row_bytes, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t number = begin; number < end; ++number) {
      const Request request(call, number);
      if (call.fresh[number] != 0) Forget(request);
      call.fresh[number] = 0;
      Gather(request);
    }
  });
}

}  // namespace paddle_kv
