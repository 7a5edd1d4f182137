// One kernel between slots, in which the rows of host blocks lie (host_rows.h), and the tensors of the device cache.
#pragma once

#include <cstdint>
#include <vector>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/transfer/host_rows.h"

namespace paddle_kv {

// What a warp moves at once: some bytes of one tensor's blocks.
struct RowPiece {
  std::uint8_t* device;  // of block 0
  std::int64_t device_stride;
  std::int32_t offset;  // in a row
  std::int32_t bytes;
};

// Rows that lie one behind the other in a slot; pair i is row i and device block ids[i].
struct RowPart {
  std::uint8_t* slot;
  const std::int64_t* ids;
  const RowPiece* pieces;
  std::int32_t row_bytes;
  std::int32_t piece_count;
  std::int64_t items;  // pairs times pieces
};

// All pointers are to device memory.
struct RowCopy {
  const RowPart* parts;
  int part_count;
  bool to_slot;
};

// Needs bulk copies (copy_segments.h).
std::vector<RowPiece> PiecesOfRow(const HostRow& row);

// Whether the kernel can move the row, and is the right one for it: pieces of few bytes are better taken several at
// once.
bool IsForCopyRows(const HostRow& row);

Status LaunchCopyRows(const RowCopy& copy, const DeviceStream& where);
Status LoadCopyRows(const DeviceStream& where);  // as LoadCopySegments

}  // namespace paddle_kv
