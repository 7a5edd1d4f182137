#include "token_map.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "../common/element_type.h"
#include "../common/errors.h"
#include "../common/launch.h"
#include "../common/validate.h"
#include "paddle_kv/common/cuda_device.h"

namespace paddle_kv {
namespace {

void CheckIdTensor(const paddle::Tensor& ids, const std::string& name, std::size_t rank, const std::string& expected,
                   const paddle::Tensor& cache) {
  const auto shape = ids.shape();
  if (shape.size() != rank) {
    ThrowValueError(name + " has shape " + ShapeText(shape) + "; " + expected + " is expected");
  }
  if (ids.dtype() != phi::DataType::INT32 && ids.dtype() != phi::DataType::INT64) {
    ThrowValueError(name + " has dtype " + DtypeName(ids.dtype()) + "; int32 or int64 is expected");
  }
  if (!ids.initialized()) return;
  CheckContiguous(ids, name);
  CheckSameDevice(ids, name, cache, "cache");
  CheckAligned(BytesOf(ids), static_cast<int64_t>(phi::SizeOf(ids.dtype())), name);
}

Ids ReadBack(const paddle::Tensor& tensor, const DeviceStream& where) {
  Ids ids(tensor.numel());
  if (ids.empty()) return ids;
  const bool is_int64 = tensor.dtype() == phi::DataType::INT64;
  std::vector<std::int64_t> copy(ids.size());
  const void* integers = tensor.data();
  if (OnGpu(tensor)) {
    const auto bytes = static_cast<int64_t>(ids.size() * phi::SizeOf(tensor.dtype()));
    LAUNCH_CUDA(where.device, CopyToHost(copy.data(), integers, bytes, where));
    integers = copy.data();
  }
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = IntegerAt(integers, is_int64, static_cast<std::int64_t>(i));
  return ids;
}

struct HostMap {
  Ids table;
  Ids lengths;
  Ids starts;  // empty: all are 0
};

void CheckValues(const HostMap& on_host, const TokenMap& map, const CacheShape& shape, int64_t tokens, BlockUse use) {
  const Ids& lengths = on_host.lengths;
  std::multimap<int64_t, std::pair<int64_t, int64_t>> written;  // block -> first position, behind the last one
  for (int64_t s = 0; s < map.sequences; ++s) {
    const std::string entry = "cu_seq_lens[" + std::to_string(s + 1) + "] = " + std::to_string(lengths[s + 1]);
    if (lengths[s] < 0 || lengths[s + 1] < lengths[s] || lengths[s + 1] > tokens) {
      ThrowValueError(entry + " behind " + std::to_string(lengths[s]) +
                      "; the ends of sequences must not be negative, not decrease, and not exceed the " +
                      std::to_string(tokens) + " tokens");
    }
    const int64_t start = on_host.starts.empty() ? 0 : on_host.starts[s];
    const int64_t capacity = map.blocks_per_sequence * shape.block_size;
    if (start < 0 || start > capacity) {
      ThrowIndexError("starts[" + std::to_string(s) + "] = " + std::to_string(start) + " must be in [0, " +
                      std::to_string(capacity) + "], the tokens of a row of block_table");
    }
    if (lengths[s + 1] == lengths[s]) continue;  // without tokens it has no block
    const int64_t end = start + lengths[s + 1] - lengths[s];
    const int64_t blocks = (end + shape.block_size - 1) / shape.block_size;
    if (blocks > map.blocks_per_sequence) {
      ThrowIndexError(entry + ": sequence " + std::to_string(s) + " has " + std::to_string(blocks) +
                      " blocks, block_table has " + std::to_string(map.blocks_per_sequence) + " for it");
    }
    for (int64_t b = start / shape.block_size; b < blocks; ++b) {
      const int64_t block = on_host.table[s * map.blocks_per_sequence + b];
      const std::string name = "block_table[" + std::to_string(s) + ", " + std::to_string(b) + "]";
      if (block >= shape.blocks) {
        ThrowIndexError(name + " = " + std::to_string(block) + " must be in [0, " + std::to_string(shape.blocks) + ")");
      }
      if (block < 0 || use == BlockUse::kRead) continue;
      const int64_t first = std::max(start - b * shape.block_size, int64_t{0});
      const int64_t behind = std::min(end - b * shape.block_size, shape.block_size);
      const auto [from, to] = written.equal_range(block);
      if (std::any_of(from, to,
                      [&](const auto& one) { return first < one.second.second && one.second.first < behind; }))
        ThrowValueError(name + " names block " + std::to_string(block) + " a second time; it would be written twice");
      if (first < behind) written.emplace(block, std::pair<int64_t, int64_t>{first, behind});
    }
  }
}

}  // namespace

TokenMap CheckTokenMap(const paddle::Tensor& block_table, const paddle::Tensor& cu_seq_lens,
                       const paddle::optional<paddle::Tensor>& starts, const paddle::Tensor& cache,
                       const CacheShape& shape, int64_t tokens, BlockUse use, const DeviceStream& where) {
  CheckIdTensor(block_table, "block_table", 2, "[sequences, blocks per sequence]", cache);
  CheckIdTensor(cu_seq_lens, "cu_seq_lens", 1, "[sequences + 1]", cache);
  if (starts) CheckIdTensor(*starts, "starts", 1, "[sequences]", cache);
  TokenMap map;
  map.sequences = block_table.shape()[0];
  map.blocks_per_sequence = block_table.shape()[1];
  if (cu_seq_lens.shape()[0] != map.sequences + 1) {
    ThrowValueError("cu_seq_lens has " + std::to_string(cu_seq_lens.shape()[0]) + " entries, block_table " +
                    std::to_string(map.sequences) + " rows; one entry more than rows is expected");
  }
  if (starts && starts->shape()[0] != map.sequences) {
    ThrowValueError("starts has " + std::to_string(starts->shape()[0]) + " entries, block_table " +
                    std::to_string(map.sequences) + " rows; one entry for each row is expected");
  }
  if (map.sequences == 0 || map.blocks_per_sequence == 0) {
    // No token has a block. An empty tensor has no address, which would mean "no table".
    map.sequences = 0;
  }
  map.block_table = map.sequences == 0 ? cu_seq_lens.data() : block_table.data();
  map.cu_seq_lens = cu_seq_lens.data();
  if (starts) {
    map.starts = starts->data();
    map.starts_is_int64 = starts->dtype() == phi::DataType::INT64;
  }
  map.block_table_is_int64 = block_table.dtype() == phi::DataType::INT64;
  map.cu_seq_lens_is_int64 = cu_seq_lens.dtype() == phi::DataType::INT64;
  if (!CheckRequested()) return map;
  if (OnGpu(cache)) {
    bool capturing = false;
    LAUNCH_CUDA(where.device, StreamIsCapturing(where, &capturing));
    if (capturing) return map;
  }
  const HostMap on_host{ReadBack(block_table, where), ReadBack(cu_seq_lens, where),
                        starts ? ReadBack(*starts, where) : Ids{}};
  CheckValues(on_host, map, shape, tokens, use);
  return map;
}

}  // namespace paddle_kv
