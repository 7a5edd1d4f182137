// register_transfer_plan, release_transfer_plan, transfer_layers: what the scheduler calls. On a GPU it submits by
// transfer/queue_api.h; transfer_layers is for a device cache in RAM.
#include "paddle_kv/swap/transfer_layers.h"

#include <memory>

#include "../common/guarded_kernel.h"
#include "../common/host_range.h"
#include "../common/validate.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

// Pointers in order [layer][tensor]; strides and block bytes in bytes, one for each tensor of a layer.
void RegisterTransferPlan(int64_t number, int64_t device, int64_t device_blocks, int64_t host_blocks,
                          const std::vector<int64_t>& device_pointers, const std::vector<int64_t>& host_pointers,
                          const std::vector<int64_t>& device_strides, const std::vector<int64_t>& host_strides,
                          const std::vector<int64_t>& block_bytes) {
  const std::size_t per_layer = block_bytes.size();
  if (per_layer == 0 || device_strides.size() != per_layer || host_strides.size() != per_layer ||
      device_pointers.size() % per_layer != 0 || host_pointers.size() != device_pointers.size()) {
    ThrowValueError("the lists of a transfer plan do not fit together");
  }
  for (const auto* pointers : {&device_pointers, &host_pointers}) {
    for (const int64_t pointer : *pointers) {
      if (pointer <= 0) ThrowValueError("a transfer plan names address " + std::to_string(pointer));
    }
  }
  for (std::size_t t = 0; t < per_layer; ++t) {
    if (block_bytes[t] < 0 || device_strides[t] < block_bytes[t] || host_strides[t] < block_bytes[t]) {
      ThrowValueError("tensor " + std::to_string(t) + " of a transfer plan has blocks of " +
                      std::to_string(block_bytes[t]) + " bytes at strides of " + std::to_string(device_strides[t]) +
                      " (device) and " + std::to_string(host_strides[t]) + " (host)");
    }
  }
  MappedMemory memory;
  for (std::size_t i = 0; i < host_pointers.size(); ++i) {
    const std::size_t t = i % per_layer;
    const int64_t bytes =
        host_blocks == 0 ? 0 : CheckedProduct(host_blocks - 1, host_strides[t], "host pool") + block_bytes[t];
    CheckHostRange(host_pointers[i], bytes, "host_pool",
                   std::to_string(host_blocks) + " blocks of layer " + std::to_string(i / per_layer),
                   static_cast<int>(device), Access::kWrite, &memory);
  }
  auto plan = std::make_shared<TransferPlan>();
  plan->device = static_cast<int>(device);
  plan->device_blocks = device_blocks;
  plan->host_blocks = host_blocks;
  plan->tensors_per_layer = static_cast<int64_t>(per_layer);
  plan->layer_count = static_cast<int64_t>(device_pointers.size() / per_layer);
  for (std::size_t i = 0; i < device_pointers.size(); ++i) {
    const std::size_t t = i % per_layer;
    plan->tensors.push_back({reinterpret_cast<std::uint8_t*>(device_pointers[i]),
                             reinterpret_cast<std::uint8_t*>(host_pointers[i]), device_strides[t], host_strides[t],
                             block_bytes[t]});
  }
  if (!AddTransferPlan(number, std::move(plan))) {
    ThrowValueError("plan = " + std::to_string(number) + " is already registered");
  }
}

void ReleaseTransferPlan(int64_t number) { RemoveTransferPlan(number); }

void TransferLayers(int64_t number, int64_t direction, const std::vector<int64_t>& device_ids,
                    const std::vector<int64_t>& host_ids, int64_t first_layer, int64_t end_layer) {
  const std::shared_ptr<const TransferPlan> plan = FindTransferPlan(number);
  if (plan == nullptr) ThrowValueError("plan = " + std::to_string(number) + " is not registered");
  if (plan->device >= 0) {
    ThrowValueError("plan = " + std::to_string(number) + " has its device cache on GPU " +
                    std::to_string(plan->device) + "; transfer_layers copies between caches in RAM");
  }
  if (direction != static_cast<int64_t>(Direction::kDeviceToHost) &&
      direction != static_cast<int64_t>(Direction::kHostToDevice)) {
    ThrowValueError("direction = " + std::to_string(direction) + " must be 0 (device to host) or 1 (host to device)");
  }
  if (first_layer < 0 || first_layer > end_layer || end_layer > plan->layer_count) {
    ThrowValueError("layers [" + std::to_string(first_layer) + ", " + std::to_string(end_layer) + ") must lie in [0, " +
                    std::to_string(plan->layer_count) + ")");
  }
  CheckSameLength(device_ids, "device_block_ids", host_ids, "host_block_ids");
  CheckIds(device_ids, "device_block_ids", plan->device_blocks);
  CheckIds(host_ids, "host_block_ids", plan->host_blocks);
  if (direction == static_cast<int64_t>(Direction::kDeviceToHost)) {
    CheckDistinct(host_ids, "host_block_ids");
  } else {
    CheckDistinct(device_ids, "device_block_ids");
  }
  TransferLayersCpu(*plan, static_cast<Direction>(direction), device_ids.data(), host_ids.data(),
                    static_cast<int64_t>(device_ids.size()), first_layer, end_layer);
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_register_transfer_plan)
    .Inputs({})
    .Outputs({})
    .Attrs({"number: int64_t", "device: int64_t", "device_blocks: int64_t", "host_blocks: int64_t",
            "device_pointers: std::vector<int64_t>", "host_pointers: std::vector<int64_t>",
            "device_strides: std::vector<int64_t>", "host_strides: std::vector<int64_t>",
            "block_bytes: std::vector<int64_t>"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::RegisterTransferPlan));

PD_BUILD_STATIC_OP(paddle_kv_release_transfer_plan)
    .Inputs({})
    .Outputs({})
    .Attrs({"number: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ReleaseTransferPlan));

PD_BUILD_STATIC_OP(paddle_kv_transfer_layers)
    .Inputs({})
    .Outputs({})
    .Attrs({"number: int64_t", "direction: int64_t", "device_ids: std::vector<int64_t>",
            "host_ids: std::vector<int64_t>", "first_layer: int64_t", "end_layer: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::TransferLayers));
