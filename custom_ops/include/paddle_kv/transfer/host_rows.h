// What of several tensors lies together on the host. Pools in block-first order have all layers of a block side by
// side, those in the order of SGLang's pages the keys of all layers, and those of one layer, where they are adopted,
// perhaps K and V: then a host block is one piece to the copy engine, however many tensors it belongs to.
#pragma once

#include <cstdint>
#include <vector>

#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

// How long rows should be, [device to host, host to device]: so that the copy engine and the thread that feeds it reach
// the link's rate, each block a copy. Beside a model a piece on its way to the host costs half a microsecond: on an
// H200 pieces of 256 KiB reached 48 GB/s, of 512 KiB 50, of 1 MiB 51. Nobody waits for the single layers of a save.
constexpr std::int64_t kStagedRowBytes[2] = {1 << 20, 128 << 10};
// The layers of a band of a load arrive together, and a model waits for the first of them: of few layers the rows are
// shorter, so that there are four bands.
constexpr std::int64_t kShortestLoadedRow = 64 << 10;
constexpr std::int64_t kBandsOfLoad = 4;
constexpr std::int64_t kLargestStagedRow = 8 << 20;  // a slot of staging
// What is in flight of a save finds its slots empty, but for rows of several MiB. A gather that waited on the device
// for a slot would slow the copies before it: by 6 % where its stream and theirs share a queue of the GPU, and which
// streams do nobody can choose.
constexpr std::int64_t kStagingSlots = 6;

// Blocks of these tensors, or of ranges of bytes of them, that lie side by side in each host block, in this order.
struct HostRow {
  std::uint8_t* host;  // of block 0
  std::int64_t host_stride;
  std::int64_t bytes;
  std::vector<LayerTensor> tensors;

  // Whether the rows of neighbouring blocks touch.
  bool IsDense() const { return bytes == host_stride; }
};

// All bytes of the layers, in rows as long as they lie together, but of largest_bytes at most.
std::vector<HostRow> HostRows(const TransferPlan& plan, std::int64_t first_layer, std::int64_t end_layer,
                              std::int64_t largest_bytes);

// How many layers make rows of smallest_bytes on average, if all layers are alike; 1 where more layers make rows no
// longer.
std::int64_t LayersOfRows(const TransferPlan& plan, std::int64_t smallest_bytes);

}  // namespace paddle_kv
