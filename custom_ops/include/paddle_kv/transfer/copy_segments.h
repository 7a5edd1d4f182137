// One kernel that copies the blocks of many tensors, one tensor after the other, and tells how far it is.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/transfer/block_rows.h"

namespace paddle_kv {

// Blocks of one tensor. Pair i is block source_ids[first_pair + i] to target_ids[first_pair + i]. Of the last members,
// CutSegment's business: a block is cut into pieces of piece_bytes (the last may be shorter), and pieces_per_item
// pieces are what a warp takes at once.
struct Segment {
  BlockRows rows;
  std::int64_t first_pair;
  std::int64_t pair_count;
  std::int64_t items;
  std::int32_t piece_bytes;
  std::int32_t pieces_per_block;
  std::int32_t pieces_per_item;
};

// All pointers but those inside the segments are to device memory. Null ids: pair i is block i of the segment.
struct SegmentCopy {
  const Segment* segments;
  int segment_count;
  const std::int64_t* source_ids;
  const std::int64_t* target_ids;
  // Each warp adds 1 to done[g] when all that it had to copy of group g is visible everywhere, for g < signal_count.
  std::uint32_t* done;
  int segments_per_group;
  int signal_count;
  int ctas;  // of the launch; 0: as many as are best over the link to the host
};

// Bulk copies need kernels that were compiled for sm_90 or newer, the shared memory of a server's GPU, and multiples of
// 16 everywhere. The device must be current.
constexpr int kBulkArchitecture = 90;
Status HasBulkCopies(int device, bool* has);
Status RunsWithBulkCopies(const void* kernel, int shared_bytes, int device, bool* runs);
bool BulkCopyable(const BlockRows& rows);

// `bulk` and `direction` are those of the launch.
Segment CutSegment(const BlockRows& rows, std::int64_t first_pair, std::int64_t pair_count, bool bulk,
                   Direction direction);

// How much each done[g] grows.
int WarpsOf(const SegmentCopy& copy, bool bulk, Direction direction);

Status LaunchCopySegments(const SegmentCopy& copy, bool bulk, Direction direction, const DeviceStream& where);

// The first launch of a kernel loads it, and may wait for all that the device is doing: this launches each of them with
// nothing to copy.
Status LoadCopySegments(const DeviceStream& where);

}  // namespace paddle_kv
