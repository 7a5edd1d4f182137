// register_transfer_plan, release_transfer_plan, transfer_layers: what the scheduler calls. The pointers of all layers
// are registered once and named by a number afterwards, because a list of 160 tensors costs 160 us a call.
#include "paddle_kv/swap/transfer_layers.h"

#include <map>
#include <memory>
#include <mutex>

#include "../common/guarded_kernel.h"
#include "../common/host_range.h"
#include "../common/launch.h"
#include "../common/validate.h"

namespace paddle_kv {
namespace {

// Calls come from several threads: Paddle releases the GIL while an operator runs.
std::mutex plans_mutex;
std::map<int64_t, std::shared_ptr<const TransferPlan>> plans;

std::shared_ptr<const TransferPlan> PlanOf(int64_t number) {
  const std::lock_guard<std::mutex> lock(plans_mutex);
  const auto found = plans.find(number);
  if (found == plans.end()) ThrowValueError("plan = " + std::to_string(number) + " is not registered");
  return found->second;
}

}  // namespace

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
  for (std::size_t i = 0; i < host_pointers.size(); ++i) {
    const std::size_t t = i % per_layer;
    const int64_t bytes =
        host_blocks == 0 ? 0 : CheckedProduct(host_blocks - 1, host_strides[t], "host pool") + block_bytes[t];
    CheckHostRange(host_pointers[i], bytes, "host_pool",
                   std::to_string(host_blocks) + " blocks of layer " + std::to_string(i / per_layer),
                   static_cast<int>(device));
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
  const std::lock_guard<std::mutex> lock(plans_mutex);
  if (!plans.emplace(number, std::move(plan)).second) {
    ThrowValueError("plan = " + std::to_string(number) + " is already registered");
  }
}

void ReleaseTransferPlan(int64_t number) {
  const std::lock_guard<std::mutex> lock(plans_mutex);
  plans.erase(number);
}

void TransferLayers(int64_t number, int64_t direction, const std::vector<int64_t>& device_ids,
                    const std::vector<int64_t>& host_ids, int64_t first_layer, int64_t end_layer,
                    int64_t layers_per_event, const std::vector<int64_t>& wait_events,
                    const std::vector<int64_t>& waits_per_group, int64_t start_event,
                    const std::vector<int64_t>& record_events, int64_t stream) {
  const std::shared_ptr<const TransferPlan> plan = PlanOf(number);
  if (direction != static_cast<int64_t>(Direction::kDeviceToHost) &&
      direction != static_cast<int64_t>(Direction::kHostToDevice)) {
    ThrowValueError("direction = " + std::to_string(direction) + " must be 0 (device to host) or 1 (host to device)");
  }
  if (first_layer < 0 || first_layer > end_layer || end_layer > plan->layer_count) {
    ThrowValueError("layers [" + std::to_string(first_layer) + ", " + std::to_string(end_layer) + ") must lie in [0, " +
                    std::to_string(plan->layer_count) + ")");
  }
  if (layers_per_event < 1) {
    ThrowValueError("layers_per_event = " + std::to_string(layers_per_event) + " must be at least 1");
  }
  CheckSameLength(device_ids, "device_block_ids", host_ids, "host_block_ids");
  CheckIds(device_ids, "device_block_ids", plan->device_blocks);
  CheckIds(host_ids, "host_block_ids", plan->host_blocks);
  if (direction == static_cast<int64_t>(Direction::kDeviceToHost)) {
    CheckDistinct(host_ids, "host_block_ids");
  } else {
    CheckDistinct(device_ids, "device_block_ids");
  }
  const LayerRange range{first_layer,     end_layer,   layers_per_event, wait_events,
                         waits_per_group, start_event, record_events};
  const auto way = static_cast<Direction>(direction);
  const auto block_count = static_cast<int64_t>(device_ids.size());
  if (plan->device < 0) {
    TransferLayersCpu(*plan, way, device_ids.data(), host_ids.data(), block_count, range);
    return;
  }
  const int64_t groups = (end_layer - first_layer + layers_per_event - 1) / layers_per_event;
  int64_t waits = 0;
  bool counts_are_sound = true;
  for (const int64_t count : waits_per_group) {
    counts_are_sound = counts_are_sound && count >= 0;
    waits += count;
  }
  if (static_cast<int64_t>(waits_per_group.size()) != groups || static_cast<int64_t>(record_events.size()) != groups ||
      !counts_are_sound || waits != static_cast<int64_t>(wait_events.size())) {
    ThrowValueError("the event lists do not fit the " + std::to_string(groups) + " groups of layers");
  }
  LAUNCH_CUDA(plan->device,
              TransferLayersCuda(*plan, way, device_ids.data(), host_ids.data(), block_count, range, stream));
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
            "host_ids: std::vector<int64_t>", "first_layer: int64_t", "end_layer: int64_t", "layers_per_event: int64_t",
            "wait_events: std::vector<int64_t>", "waits_per_group: std::vector<int64_t>", "start_event: int64_t",
            "record_events: std::vector<int64_t>", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::TransferLayers));
