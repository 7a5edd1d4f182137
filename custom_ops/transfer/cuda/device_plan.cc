#include "paddle_kv/transfer/device_plan.h"

#include <cstdint>
#include <string>
#include <utility>

#include "paddle_kv/common/pointer_facts.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kMost = INT64_C(1) << 40;  // of whatever is counted: no product below can overflow
constexpr std::int64_t kMostBytes = INT64_C(1) << 46;

bool IsCount(std::int64_t value) { return value > 0 && value <= kMost; }

// Whether all of it is memory of a GPU.
std::string CheckRange(const char* side, std::int64_t first, std::int64_t bytes) {
  const auto end = static_cast<std::uintptr_t>(first) + static_cast<std::uintptr_t>(bytes);
  for (auto address = static_cast<std::uintptr_t>(first); address < end;) {
    PointerFacts facts;
    const Status status = DescribePointer(address, &facts);
    if (!status.ok()) return std::string(side) + ": " + status.text;
    if (facts.kind != MemoryKind::kDevice) {
      return std::string(side) + ": the " + std::to_string(bytes) + " bytes at " + std::to_string(first) +
             " are not all memory of a GPU";
    }
    address = NextToAsk(address, end, facts);
  }
  return {};
}

std::string CheckSide(const char* side, std::int64_t blocks, std::int64_t layers, std::int64_t tensors,
                      const std::int64_t* pointers, const std::int64_t* strides, const std::int64_t* block_bytes) {
  if (pointers == nullptr || strides == nullptr) return std::string(side) + " is null";
  for (std::int64_t i = 0; i < layers * tensors; ++i) {
    const std::int64_t own = block_bytes[i % tensors];
    const std::int64_t stride = strides[i % tensors];
    if (own < 0 || stride < own || stride > kMostBytes / blocks || pointers[i] <= 0) {
      return std::string(side) + ": pointer, stride or block bytes of tensor " + std::to_string(i) + " cannot be right";
    }
    const std::string wrong = CheckRange(side, pointers[i], (blocks - 1) * stride + own);
    if (!wrong.empty()) return wrong;
  }
  return {};
}

}  // namespace

std::string MakeDevicePlan(const PaddleKvDevicePlan& given, std::shared_ptr<TransferPlan>* made) {
  if (given.device < 0 || given.block_bytes == nullptr) return "device or block_bytes of a plan cannot be right";
  if (!IsCount(given.device_blocks) || !IsCount(given.other_blocks) || !IsCount(given.layer_count) ||
      !IsCount(given.tensors_per_layer) || given.layer_count > kMost / given.tensors_per_layer) {
    return "the numbers of blocks, layers and tensors of a plan must be positive";
  }
  for (const std::string& wrong :
       {CheckSide("device cache", given.device_blocks, given.layer_count, given.tensors_per_layer,
                  given.device_pointers, given.device_strides, given.block_bytes),
        CheckSide("the other cache", given.other_blocks, given.layer_count, given.tensors_per_layer,
                  given.other_pointers, given.other_strides, given.block_bytes)}) {
    if (!wrong.empty()) return wrong;
  }
  auto plan = std::make_shared<TransferPlan>();
  plan->device = static_cast<int>(given.device);
  plan->inside_device = true;
  plan->on_other_gpu = given.on_other_gpu != 0;
  plan->device_blocks = given.device_blocks;
  plan->host_blocks = given.other_blocks;
  plan->layer_count = given.layer_count;
  plan->tensors_per_layer = given.tensors_per_layer;
  for (std::int64_t i = 0; i < given.layer_count * given.tensors_per_layer; ++i) {
    const std::int64_t t = i % given.tensors_per_layer;
    plan->tensors.push_back({reinterpret_cast<std::uint8_t*>(given.device_pointers[i]),
                             reinterpret_cast<std::uint8_t*>(given.other_pointers[i]), given.device_strides[t],
                             given.other_strides[t], given.block_bytes[t]});
  }
  *made = std::move(plan);
  return {};
}

}  // namespace paddle_kv
