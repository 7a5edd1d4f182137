// How staging cuts what one call moves into fills of its slots, and the table that its kernels read.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "paddle_kv/transfer/copy_rows.h"
#include "paddle_kv/transfer/copy_segments.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/host_rows.h"

namespace paddle_kv {

constexpr std::int64_t kSlotBytes = kLargestStagedRow;  // between two slots the link is idle for some microseconds

// Blocks in the order of the host.
struct Pair {
  std::int64_t host;
  std::int64_t device;
};

// A row, and the first of the groups that come with it.
struct BandRow {
  HostRow row;
  std::int64_t group;
  std::size_t first_piece;  // for the kernel of copy_rows.h; none if it is not for that
  std::size_t end_piece;
};

// Blocks [first_pair, first_pair + pair_count) of one row: side by side in a slot, from slot_offset on.
struct Part {
  std::size_t row;
  std::int64_t slot_offset;
  std::int64_t first_pair;
  std::int64_t pair_count;
};

// What one slot holds at one time.
struct Fill {
  std::size_t first_part;
  std::size_t end_part;
  // How it is scattered or gathered.
  bool by_rows;
  bool bulk;
  std::size_t first_segment;
  std::size_t end_segment;
};

struct Packed {
  std::vector<Pair> pairs;
  std::vector<BandRow> rows;
  std::vector<RowPiece> pieces;
  std::vector<Part> parts;
  std::vector<Fill> fills;
  std::size_t segment_count = 0;

  // The table: the device's ids, the segments, one RowPart a part, the pieces.
  std::size_t TableBytes() const;
  // Of a fill, with the table on the device.
  RowCopy RowsOf(const Fill& fill, bool to_host, const std::uint8_t* table) const;
  SegmentCopy SegmentsOf(const Fill& fill, bool to_host, const std::uint8_t* table) const;

  std::size_t FirstSegmentByte() const { return pairs.size() * sizeof(std::int64_t); }
  std::size_t FirstPartByte() const { return FirstSegmentByte() + segment_count * sizeof(Segment); }
  std::size_t FirstPieceByte() const { return FirstPartByte() + parts.size() * sizeof(RowPart); }
};

Packed Pack(const EngineWork& work, bool has_bulk_copies);

// Into `table`, whose copy for the kernels lies at `on_device`; slot_of: of the fill with a number.
void WriteTable(const Packed& packed, bool to_host, const std::function<std::uint8_t*(std::size_t)>& slot_of,
                const std::uint8_t* on_device, std::uint8_t* table);

}  // namespace paddle_kv
