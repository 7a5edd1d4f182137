// Rows of the tokens that sparse attention picks: from rows that are resident on the device, else from host memory,
// from where they become resident in the place of those that were picked longest ago.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/host_device.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

constexpr std::int32_t kAbsent = -1;  // in slot_of_token and in token_of_slot

// Entry i of the plan says where row i comes from: a slot, or one of these, or kFirstMiss - slot: host memory, from
// where the row goes to the slot too.
constexpr std::int32_t kZeros = -1;      // from nowhere
constexpr std::int32_t kElsewhere = -2;  // it is written beside the row of the same token that comes before it
constexpr std::int32_t kFirstMiss = -3;

// All tensors are contiguous. What is per request has `batch` in front.
struct TopkRows {
  const std::int32_t* token_ids;    // [k]
  const std::int32_t* block_table;  // [blocks_per_request], of host blocks
  const std::uint8_t* host;         // [host_blocks] blocks of `block_size` rows, `block_stride` bytes apart
  std::uint8_t* rows;               // [k]
  std::uint8_t* resident;           // [num_slots]
  std::int32_t* slot_of_token;      // [max_tokens]
  std::int32_t* token_of_slot;      // [num_slots]
  std::int32_t* lru_order;          // [num_slots], the slot of the token that was picked longest ago first
  std::int32_t* fresh;              // [] not 0: nothing is resident; 0 behind the call
  std::int32_t* scratch;            // [scratch_stride]
  std::int64_t batch;
  std::int64_t scratch_stride;
  std::int64_t block_stride;  // bytes
  std::int64_t row_bytes;
  std::int32_t k;
  std::int32_t blocks_per_request;
  std::int32_t max_tokens;
  std::int32_t num_slots;
  std::int32_t host_blocks;
  std::int32_t block_size;  // tokens
};

// Entries of scratch that the request needs, whatever they hold.
PADDLE_KV_HOST_DEVICE std::int64_t TopkScratch(std::int64_t num_slots, std::int64_t k) { return num_slots + 5 * k; }

// The row of a token in host memory; null: it has no block, or not one that is there.
PADDLE_KV_HOST_DEVICE const std::uint8_t* HostRowOf(const TopkRows& call, std::int64_t request, std::int32_t token) {
  const std::int32_t entry = token / call.block_size;
  if (entry >= call.blocks_per_request) return nullptr;
  const std::int32_t block = call.block_table[request * call.blocks_per_request + entry];
  if (block < 0 || block >= call.host_blocks) return nullptr;
  return call.host + block * call.block_stride + (token - entry * call.block_size) * call.row_bytes;
}

void GatherTopkRowsCpu(const TopkRows& call);
Status GatherTopkRowsCuda(const TopkRows& call, const DeviceStream& where);

}  // namespace paddle_kv
