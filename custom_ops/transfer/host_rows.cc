#include "paddle_kv/transfer/host_rows.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace paddle_kv {

std::vector<HostRow> HostRows(const TransferPlan& plan, std::int64_t first_layer, std::int64_t end_layer,
                              std::int64_t largest_bytes) {
  std::vector<LayerTensor> tensors(plan.tensors.begin() + first_layer * plan.tensors_per_layer,
                                   plan.tensors.begin() + end_layer * plan.tensors_per_layer);
  std::sort(tensors.begin(), tensors.end(), [](const LayerTensor& a, const LayerTensor& b) {
    return std::tie(a.host_stride, a.host) < std::tie(b.host_stride, b.host);
  });
  std::vector<HostRow> rows;
  for (const LayerTensor& whole : tensors) {
    for (std::int64_t begin = 0, bytes = 0; begin < whole.block_bytes; begin += bytes) {
      bytes = std::min(largest_bytes, whole.block_bytes - begin);
      LayerTensor part = whole;
      part.device += begin;
      part.host += begin;
      part.block_bytes = bytes;
      const bool continues = !rows.empty() && rows.back().host_stride == part.host_stride &&
                             rows.back().host + rows.back().bytes == part.host &&
                             bytes <= largest_bytes - rows.back().bytes;
      if (!continues) rows.push_back({part.host, part.host_stride, 0, {}});
      rows.back().bytes += bytes;
      rows.back().tensors.push_back(part);
    }
  }
  return rows;
}

std::int64_t LayersOfRows(const TransferPlan& plan, std::int64_t smallest_bytes) {
  const auto average_bytes = [&](std::int64_t layers) {
    std::int64_t bytes = 0;
    std::int64_t count = 0;
    for (const HostRow& row : HostRows(plan, 0, layers, std::numeric_limits<std::int64_t>::max())) {
      bytes += row.bytes;
      ++count;
    }
    return bytes / std::max<std::int64_t>(1, count);
  };
  if (plan.layer_count < 2) return 1;
  const std::int64_t of_two = average_bytes(2);
  if (of_two <= average_bytes(1)) return 1;
  return std::clamp<std::int64_t>((2 * smallest_bytes + of_two - 1) / of_two, 1, plan.layer_count);
}

}  // namespace paddle_kv
