#include "paddle_kv/transfer/staging_fills.h"

#include <algorithm>
#include <utility>

namespace paddle_kv {
namespace {

constexpr std::int64_t kPartAlignment = 256;  // in a slot

std::vector<Pair> PairsByHost(const std::vector<Run>& runs, bool to_host) {
  std::vector<Pair> pairs;
  for (const Run& run : runs) {
    for (std::int64_t i = 0; i < run.length; ++i) {
      pairs.push_back(to_host ? Pair{run.target + i, run.source + i} : Pair{run.source + i, run.target + i});
    }
  }
  // One host block may go to several device blocks.
  std::sort(pairs.begin(), pairs.end(),
            [](const Pair& a, const Pair& b) { return a.host != b.host ? a.host < b.host : a.device < b.device; });
  return pairs;
}

// The part's blocks of each tensor, between the device and the slot.
template <class Use>
void ForEachTensor(const HostRow& row, std::uint8_t* staged, bool to_host, Use use) {
  for (const LayerTensor& tensor : row.tensors) {
    use(to_host ? BlockRows{tensor.device, staged, tensor.device_stride, row.bytes, tensor.block_bytes}
                : BlockRows{staged, tensor.device, row.bytes, tensor.device_stride, tensor.block_bytes});
    staged += tensor.block_bytes;
  }
}

void AddRows(const EngineWork& work, bool has_bulk_copies, Packed* packed) {
  for (std::int64_t layer = work.first_layer; layer < work.end_layer; layer += work.layers_per_band) {
    const std::int64_t end = std::min(layer + work.layers_per_band, work.end_layer);
    for (HostRow& row : HostRows(*work.plan, layer, end, kSlotBytes)) {
      const std::size_t first_piece = packed->pieces.size();
      if (has_bulk_copies && IsForCopyRows(row)) {
        const std::vector<RowPiece> pieces = PiecesOfRow(row);
        packed->pieces.insert(packed->pieces.end(), pieces.begin(), pieces.end());
      }
      const std::int64_t group = (layer - work.first_layer) / work.layers_per_event;
      packed->rows.push_back({std::move(row), group, first_piece, packed->pieces.size()});
    }
  }
}

// So that fills are about equal: two threads can only halve what has two halves.
std::int64_t BytesOfFill(const Packed& packed) {
  std::int64_t bytes = 0;
  for (const BandRow& of : packed.rows) bytes += of.row.bytes * static_cast<std::int64_t>(packed.pairs.size());
  const std::int64_t fills = std::max<std::int64_t>(1, (bytes + kSlotBytes - 1) / kSlotBytes);
  return (bytes + fills - 1) / fills;
}

// How the fill is scattered or gathered; slots are aligned as the device's memory is.
void ChooseKernel(bool has_bulk_copies, Packed* packed, Fill* fill) {
  fill->by_rows = true;
  fill->bulk = has_bulk_copies;
  std::size_t segments = 0;
  for (std::size_t p = fill->first_part; p < fill->end_part; ++p) {
    const Part& part = packed->parts[p];
    const BandRow& of = packed->rows[part.row];
    fill->by_rows &= of.end_piece > of.first_piece;
    auto* const staged = reinterpret_cast<std::uint8_t*>(part.slot_offset);
    ForEachTensor(of.row, staged, false, [&](const BlockRows& rows) { fill->bulk = fill->bulk && BulkCopyable(rows); });
    segments += of.row.tensors.size();
  }
  fill->first_segment = packed->segment_count;
  if (!fill->by_rows) packed->segment_count += segments;
  fill->end_segment = packed->segment_count;
}

}  // namespace

Packed Pack(const EngineWork& work, bool has_bulk_copies) {
  Packed packed;
  packed.pairs = PairsByHost(*work.runs, work.direction == Direction::kDeviceToHost);
  const auto pairs = static_cast<std::int64_t>(packed.pairs.size());
  if (pairs == 0) return packed;
  AddRows(work, has_bulk_copies, &packed);
  const std::int64_t share = BytesOfFill(packed);
  std::int64_t used = kSlotBytes;  // of the last fill, with what is left free between its parts
  std::int64_t filled = 0;         // without
  for (std::size_t r = 0; r < packed.rows.size(); ++r) {
    const std::int64_t bytes = packed.rows[r].row.bytes;
    for (std::int64_t pair = 0; pair < pairs;) {
      if (filled >= share || used + bytes > kSlotBytes) {
        packed.fills.push_back({packed.parts.size(), packed.parts.size(), false, false, 0, 0});
        used = filled = 0;
      }
      const std::int64_t up_to_share = (share - filled + bytes - 1) / bytes;
      const std::int64_t count = std::min({pairs - pair, up_to_share, (kSlotBytes - used) / bytes});
      packed.parts.push_back({r, used, pair, count});
      packed.fills.back().end_part = packed.parts.size();
      pair += count;
      filled += count * bytes;
      used += (count * bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
    }
  }
  for (Fill& fill : packed.fills) ChooseKernel(has_bulk_copies, &packed, &fill);
  return packed;
}

std::size_t Packed::TableBytes() const { return FirstPieceByte() + pieces.size() * sizeof(RowPiece); }

RowCopy Packed::RowsOf(const Fill& fill, bool to_host, const std::uint8_t* table) const {
  const auto* of_parts = reinterpret_cast<const RowPart*>(table + FirstPartByte());
  return {of_parts + fill.first_part, static_cast<int>(fill.end_part - fill.first_part), to_host};
}

SegmentCopy Packed::SegmentsOf(const Fill& fill, bool to_host, const std::uint8_t* table) const {
  SegmentCopy copy{};
  copy.segments = reinterpret_cast<const Segment*>(table + FirstSegmentByte()) + fill.first_segment;
  copy.segment_count = static_cast<int>(fill.end_segment - fill.first_segment);
  copy.segments_per_group = copy.segment_count;
  (to_host ? copy.source_ids : copy.target_ids) = reinterpret_cast<const std::int64_t*>(table);
  return copy;
}

void WriteTable(const Packed& packed, bool to_host, const std::function<std::uint8_t*(std::size_t)>& slot_of,
                const std::uint8_t* on_device, std::uint8_t* table) {
  auto* const ids = reinterpret_cast<std::int64_t*>(table);
  for (std::size_t i = 0; i < packed.pairs.size(); ++i) ids[i] = packed.pairs[i].device;
  auto* segment = reinterpret_cast<Segment*>(table + packed.FirstSegmentByte());
  auto* part_of = reinterpret_cast<RowPart*>(table + packed.FirstPartByte());
  const auto* ids_there = reinterpret_cast<const std::int64_t*>(on_device);
  const auto* pieces_there = reinterpret_cast<const RowPiece*>(on_device + packed.FirstPieceByte());
  for (std::size_t f = 0; f < packed.fills.size(); ++f) {
    const Fill& fill = packed.fills[f];
    for (std::size_t p = fill.first_part; p < fill.end_part; ++p) {
      const Part& part = packed.parts[p];
      const BandRow& of = packed.rows[part.row];
      std::uint8_t* const staged = slot_of(f) + part.slot_offset;
      const auto piece_count = static_cast<std::int32_t>(of.end_piece - of.first_piece);
      *part_of++ = {staged,
                    ids_there + part.first_pair,
                    pieces_there + of.first_piece,
                    static_cast<std::int32_t>(of.row.bytes),
                    piece_count,
                    part.pair_count * piece_count};
      if (fill.by_rows) continue;
      ForEachTensor(of.row, staged, to_host, [&](const BlockRows& rows) {
        *segment++ = CutSegment(rows, part.first_pair, part.pair_count, fill.bulk, Direction::kDeviceToDevice);
      });
    }
  }
  std::copy(packed.pieces.begin(), packed.pieces.end(), reinterpret_cast<RowPiece*>(table + packed.FirstPieceByte()));
}

}  // namespace paddle_kv
