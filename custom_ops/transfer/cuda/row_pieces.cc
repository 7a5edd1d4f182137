#include <algorithm>

#include "paddle_kv/transfer/copy_rows.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kLargestPiece = 4 << 10;  // a stage of the kernel
constexpr std::int64_t kSmallestBlock = 1 << 10;
constexpr std::int64_t kAlignment = 16;

}  // namespace

std::vector<RowPiece> PiecesOfRow(const HostRow& row) {
  std::vector<RowPiece> pieces;
  std::int64_t offset = 0;
  for (const LayerTensor& tensor : row.tensors) {
    for (std::int64_t begin = 0; begin < tensor.block_bytes; begin += kLargestPiece) {
      const std::int64_t bytes = std::min(kLargestPiece, tensor.block_bytes - begin);
      pieces.push_back({tensor.device + begin, tensor.device_stride, static_cast<std::int32_t>(offset),
                        static_cast<std::int32_t>(bytes)});
      offset += bytes;
    }
  }
  return pieces;
}

bool IsForCopyRows(const HostRow& row) {
  const auto multiple = [](std::int64_t value) { return value % kAlignment == 0; };
  return std::all_of(row.tensors.begin(), row.tensors.end(), [&](const LayerTensor& tensor) {
    return multiple(reinterpret_cast<std::intptr_t>(tensor.device)) && multiple(tensor.device_stride) &&
           multiple(tensor.block_bytes) && tensor.block_bytes >= kSmallestBlock;
  });
}

}  // namespace paddle_kv
