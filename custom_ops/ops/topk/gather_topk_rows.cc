// gather_topk_rows: rows of picked tokens, resident or from host memory.
#include "paddle_kv/topk/gather_topk_rows.h"

#include <limits>
#include <utility>
#include <vector>

#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/host_range.h"
#include "../common/launch.h"
#include "../common/validate.h"
#include "paddle_kv/common/cuda_device.h"

namespace paddle_kv {
namespace {

using Shape = std::vector<int64_t>;

struct Named {
  const paddle::Tensor& tensor;
  const char* name;
};

void CheckShape(const Named& given, const Shape& expected, const char* meaning) {
  if (given.tensor.shape() == expected) return;
  ThrowValueError(std::string(given.name) + " has shape " + ShapeText(given.tensor.shape()) + "; " + meaning + " = " +
                  ShapeText(expected) + " is expected");
}

void CheckRank(const Named& given, std::size_t rank, const char* meaning) {
  if (given.tensor.shape().size() == rank) return;
  ThrowValueError(std::string(given.name) + " has shape " + ShapeText(given.tensor.shape()) + "; " + meaning +
                  " is expected");
}

void CheckBeside(const Named& given, const paddle::Tensor& resident) {
  if (DeviceOf(given.tensor) == DeviceOf(resident)) return;
  ThrowValueError(std::string(given.name) + " is on another device than resident; both must be on one");
}

void CheckInt32(const Named& given, const paddle::Tensor& resident) {
  if (given.tensor.dtype() != paddle::DataType::INT32) {
    ThrowValueError(std::string(given.name) + " has dtype " + DtypeName(given.tensor.dtype()) + "; int32 is expected");
  }
  CheckBeside(given, resident);
  CheckAligned(given.tensor.data(), sizeof(std::int32_t), given.name);
}

// A size that the kernels count in 32 bits.
std::int32_t Narrow(int64_t number, const char* name, int64_t least) {
  constexpr int64_t kMost = std::numeric_limits<std::int32_t>::max() - 8;
  if (number < least || number > kMost) {
    ThrowValueError(std::string(name) + " = " + std::to_string(number) + " must be in [" + std::to_string(least) +
                    ", " + std::to_string(kMost) + "]");
  }
  return static_cast<std::int32_t>(number);
}

int64_t BytesIn(const paddle::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(phi::SizeOf(tensor.dtype()));
}

std::vector<std::int32_t> ReadBack(const paddle::Tensor& tensor, const DeviceStream& where) {
  std::vector<std::int32_t> read(tensor.numel());
  if (OnGpu(tensor)) {
    LAUNCH_CUDA(where.device, CopyToHost(read.data(), tensor.data(), BytesIn(tensor), where));
  } else {
    const auto* first = static_cast<const std::int32_t*>(tensor.data());
    read.assign(first, first + tensor.numel());
  }
  return read;
}

// With PADDLE_KV_CHECK=1: IndexError for what becomes zeros otherwise although it is no padding.
void CheckValues(const TopkRows& call, const paddle::Tensor& token_ids, const paddle::Tensor& block_table,
                 const DeviceStream& where) {
  if (!CheckRequested()) return;
  if (OnGpu(token_ids)) {
    bool capturing = false;
    LAUNCH_CUDA(where.device, StreamIsCapturing(where, &capturing));
    if (capturing) return;  // nothing may wait for a stream that is being captured
  }
  const std::vector<std::int32_t> tokens = ReadBack(token_ids, where);
  const std::vector<std::int32_t> table = ReadBack(block_table, where);
  for (int64_t row = 0; row < call.batch * call.k; ++row) {
    const int64_t request = row / call.k;
    const std::int32_t token = tokens[row];
    const std::string name =
        "token_ids[" + std::to_string(request) + ", " + std::to_string(row % call.k) + "] = " + std::to_string(token);
    if (token < 0) continue;
    const std::int32_t entry = token / call.block_size;
    if (token >= call.max_tokens || entry >= call.blocks_per_request) {
      ThrowIndexError(name + " must be in [0, " + std::to_string(call.max_tokens) + "), the tokens of slot_of_token, " +
                      "and in one of the " + std::to_string(call.blocks_per_request) +
                      " blocks of block_table, or negative for no row");
    }
    const std::int32_t block = table[request * call.blocks_per_request + entry];
    if (block >= call.host_blocks) {
      ThrowIndexError("block_table[" + std::to_string(request) + ", " + std::to_string(entry) +
                      "] = " + std::to_string(block) + " must be in [0, " + std::to_string(call.host_blocks) +
                      "), the blocks at host_pointer");
    }
  }
}

}  // namespace

void GatherTopkRows(const paddle::Tensor& token_ids, const paddle::Tensor& block_table, const paddle::Tensor& resident,
                    const paddle::Tensor& slot_of_token, const paddle::Tensor& token_of_slot,
                    const paddle::Tensor& lru_order, const paddle::Tensor& fresh, const paddle::Tensor& scratch,
                    const paddle::Tensor& out, int64_t host_pointer, int64_t num_host_blocks,
                    int64_t block_stride_bytes, int64_t block_size, int64_t stream) {
  CheckRank({resident, "resident"}, 3, "[batch, num_slots, row elements]");
  CheckRank({token_ids, "token_ids"}, 2, "[batch, k]");
  CheckRank({block_table, "block_table"}, 2, "[batch, blocks of a request]");
  CheckRank({slot_of_token, "slot_of_token"}, 2, "[batch, max_tokens]");
  CheckRank({scratch, "scratch"}, 2, "[batch, entries]");
  const Shape shape = resident.shape();
  const int64_t batch = shape[0];
  const int64_t num_slots = shape[1];
  const int64_t k = token_ids.shape()[1];
  const int device = DeviceOf(resident);
  if (device == kPinned) ThrowValueError("resident is in pinned memory; a tensor on the GPU (or the CPU) is expected");
  const Named ids[] = {{token_ids, "token_ids"},
                       {block_table, "block_table"},
                       {slot_of_token, "slot_of_token"},
                       {token_of_slot, "token_of_slot"},
                       {lru_order, "lru_order"},
                       {fresh, "fresh"},
                       {scratch, "scratch"}};
  for (const Named& each : ids) CheckInt32(each, resident);
  CheckShape({token_ids, "token_ids"}, {batch, k}, "[batch, k]");
  CheckShape({block_table, "block_table"}, {batch, block_table.shape()[1]}, "[batch, blocks of a request]");
  CheckShape({slot_of_token, "slot_of_token"}, {batch, slot_of_token.shape()[1]}, "[batch, max_tokens]");
  CheckShape({token_of_slot, "token_of_slot"}, {batch, num_slots}, "[batch, num_slots]");
  CheckShape({lru_order, "lru_order"}, {batch, num_slots}, "[batch, num_slots]");
  CheckShape({fresh, "fresh"}, {batch}, "[batch]");
  CheckShape({out, "out"}, {batch, k, shape[2]}, "[batch, k, row elements]");
  if (out.dtype() != resident.dtype()) ThrowDtypesDiffer("out", out.dtype(), "resident", resident.dtype());
  CheckBeside({out, "out"}, resident);
  const auto item_bytes = static_cast<int64_t>(phi::SizeOf(resident.dtype()));
  CheckAligned(resident.data(), item_bytes, "resident");
  CheckAligned(out.data(), item_bytes, "out");
  if (num_slots < k) {
    ThrowValueError("resident has " + std::to_string(num_slots) + " slots for a request, token_ids has k = " +
                    std::to_string(k) + " tokens; at least as many slots are expected");
  }
  const int64_t entries = TopkScratch(num_slots, k);
  if (scratch.shape()[0] != batch || scratch.shape()[1] < entries) {
    ThrowValueError("scratch has shape " + ShapeText(scratch.shape()) +
                    "; [batch, num_slots + 5 * k] = " + ShapeText({batch, entries}) + ", or more columns, is expected");
  }
  TopkRows call{};
  call.batch = batch;
  call.scratch_stride = scratch.shape()[1];
  call.block_stride = block_stride_bytes;
  call.row_bytes = CheckedProduct(shape[2], item_bytes, "resident");
  call.k = Narrow(k, "k", 0);
  call.blocks_per_request = Narrow(block_table.shape()[1], "blocks of block_table", 0);
  call.max_tokens = Narrow(slot_of_token.shape()[1], "max_tokens", 0);
  call.num_slots = Narrow(num_slots, "num_slots", 0);
  call.host_blocks = Narrow(num_host_blocks, "num_host_blocks", 0);
  call.block_size = Narrow(block_size, "block_size", 1);
  const int64_t block_bytes = CheckedProduct(block_size, call.row_bytes, "block_size x bytes of one row");
  if (block_stride_bytes < block_bytes) {
    ThrowValueError("block_stride_bytes = " + std::to_string(block_stride_bytes) + " must be at least " +
                    std::to_string(block_bytes) + ", the bytes of one block");
  }
  std::vector<std::pair<const std::uint8_t*, int64_t>> memory = {{BytesOf(resident), BytesIn(resident)},
                                                                 {BytesOf(out), BytesIn(out)}};
  for (const Named& each : ids) memory.emplace_back(BytesOf(each.tensor), BytesIn(each.tensor));
  if (num_host_blocks > 0) {
    const int64_t host_bytes =
        CheckedProduct(num_host_blocks - 1, block_stride_bytes, "num_host_blocks x block_stride_bytes") + block_bytes;
    MappedMemory mapped;
    CheckHostRange(host_pointer, host_bytes, "host_pointer",
                   "num_host_blocks = " + std::to_string(num_host_blocks) + " blocks", device, Access::kRead, &mapped);
    call.host = reinterpret_cast<const std::uint8_t*>(host_pointer);
    memory.emplace_back(call.host, host_bytes);
  }
  CheckApart(std::move(memory), "host_pointer, out, resident, scratch and the tensors of ids");
  const auto integers = [](const paddle::Tensor& tensor) { return reinterpret_cast<std::int32_t*>(BytesOf(tensor)); };
  call.token_ids = integers(token_ids);
  call.block_table = integers(block_table);
  call.rows = BytesOf(out);
  call.resident = BytesOf(resident);
  call.slot_of_token = integers(slot_of_token);
  call.token_of_slot = integers(token_of_slot);
  call.lru_order = integers(lru_order);
  call.fresh = integers(fresh);
  call.scratch = integers(scratch);
  const DeviceStream where = device >= 0 ? WhereOf(resident, stream) : DeviceStream{};
  CheckValues(call, token_ids, block_table, where);
  if (device >= 0) {
    LAUNCH_CUDA(where.device, GatherTopkRowsCuda(call, where));
  } else {
    GatherTopkRowsCpu(call);
  }
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_gather_topk_rows)
    .Inputs({"token_ids", "block_table", "resident", "slot_of_token", "token_of_slot", "lru_order", "fresh", "scratch",
             "out"})
    .Outputs({})
    .Attrs({"host_pointer: int64_t", "num_host_blocks: int64_t", "block_stride_bytes: int64_t", "block_size: int64_t",
            "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::GatherTopkRows));
