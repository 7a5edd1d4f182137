// Plans of which both sides lie on GPUs: what is refused, on a CUDA runtime of threads (fake_cuda).
// threads.
#include "paddle_kv/transfer/device_plan.h"

#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "queue_rig.h"
#include "recording_engine.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kBlocks = 5, kOtherBlocks = 7, kLayers = 3;
constexpr int kDevice = 1;

// Two tensors a layer. Each lies apart, so that what is past its end is nobody's.
struct Caches {
  std::vector<std::int64_t> pointers[2], strides[2], block_bytes{300, 20};
  PaddleKvDevicePlan plan{};

  explicit Caches(std::int64_t number) {
    static std::uintptr_t next = std::uintptr_t{1} << 40;
    strides[0] = {300, 24};
    strides[1] = {512, 20};
    for (int side = 0; side < 2; ++side) {
      const std::int64_t blocks = side == 0 ? kBlocks : kOtherBlocks;
      for (std::int64_t i = 0; i < 2 * kLayers; ++i) {
        const std::int64_t bytes = (blocks - 1) * strides[side][i % 2] + block_bytes[i % 2];
        AddMemory(next, bytes, {cudaMemoryTypeDevice, kDevice, nullptr});
        pointers[side].push_back(static_cast<std::int64_t>(next));
        next += 1 << 20;
      }
    }
    plan = {number,
            kDevice,
            kBlocks,
            kOtherBlocks,
            kLayers,
            2,
            0,
            pointers[0].data(),
            pointers[1].data(),
            strides[0].data(),
            strides[1].data(),
            block_bytes.data()};
  }
};

std::string Refusal(const Caches& caches) {
  std::shared_ptr<TransferPlan> plan;
  const std::string wrong = MakeDevicePlan(caches.plan, &plan);
  CHECK(wrong.empty() == (plan != nullptr));
  return wrong;
}

void APlanHasWhatItWasGiven() {
  CHECK(cudaSetDevice(kDevice) == cudaSuccess);
  Caches caches(0);
  std::shared_ptr<TransferPlan> plan;
  caches.plan.on_other_gpu = 1;
  CHECK(MakeDevicePlan(caches.plan, &plan).empty() && plan->on_other_gpu);
  caches.plan.on_other_gpu = 0;
  CHECK(MakeDevicePlan(caches.plan, &plan).empty() && !plan->on_other_gpu);
  CHECK(plan->device == kDevice && plan->inside_device && plan->device_blocks == kBlocks);
  CHECK(plan->host_blocks == kOtherBlocks && plan->layer_count == kLayers && plan->tensors_per_layer == 2);
  CHECK(plan->tensors.size() == 2 * kLayers);
  for (std::int64_t i = 0; i < 2 * kLayers; ++i) {
    const auto& tensor = plan->tensors[i];
    CHECK(Handle(tensor.device) == caches.pointers[0][i] && Handle(tensor.host) == caches.pointers[1][i]);
    CHECK(tensor.device_stride == caches.strides[0][i % 2] && tensor.host_stride == caches.strides[1][i % 2]);
    CHECK(tensor.block_bytes == caches.block_bytes[i % 2]);
  }
}

void WhatLiesElsewhereIsRefused() {
  CHECK(cudaSetDevice(kDevice) == cudaSuccess);
  for (int side = 0; side < 2; ++side) {
    const std::string name = side == 0 ? "device cache" : "the other cache";
    for (std::int64_t i = 0; i < 2 * kLayers; ++i) {
      Caches caches(0);
      ++caches.pointers[side][i];  // one byte of the last block is past the end
      CHECK(Refusal(caches).find(name + ": the ") == 0);
    }
    Caches more(0);
    ++(side == 0 ? more.plan.device_blocks : more.plan.other_blocks);
    CHECK(Refusal(more).find(name + ": the ") == 0);
    Caches of_host(0);
    const std::uintptr_t address = (std::uintptr_t{1} << 44) + side * (1 << 20);
    AddMemory(address, 1 << 16, {cudaMemoryTypeHost, 0, reinterpret_cast<void*>(address)});
    of_host.pointers[side][3] = static_cast<std::int64_t>(address);
    CHECK(Refusal(of_host).find(name + ": the ") == 0);
  }
}

void WhatCannotBeRightIsRefused() {
  CHECK(cudaSetDevice(kDevice) == cudaSuccess);
  const std::int64_t huge = INT64_C(1) << 62;
  const std::vector<std::function<void(Caches&)>> changes = {
      [](Caches& caches) { caches.plan.device = -1; },
      [](Caches& caches) { caches.plan.block_bytes = nullptr; },
      [](Caches& caches) { caches.plan.device_blocks = 0; },
      [](Caches& caches) { caches.plan.other_blocks = -1; },
      [](Caches& caches) { caches.plan.layer_count = 0; },
      [](Caches& caches) { caches.plan.tensors_per_layer = 0; },
      [&](Caches& caches) { caches.plan.layer_count = huge; },
      [&](Caches& caches) { caches.plan.device_blocks = huge; },
      [](Caches& caches) { caches.plan.layer_count = caches.plan.tensors_per_layer = INT64_C(1) << 40; },
      [](Caches& caches) { caches.plan.device_pointers = nullptr; },
      [](Caches& caches) { caches.plan.other_pointers = nullptr; },
      [](Caches& caches) { caches.plan.device_strides = nullptr; },
      [](Caches& caches) { caches.plan.other_strides = nullptr; },
      [](Caches& caches) { caches.pointers[0][2] = 0; },
      [](Caches& caches) { caches.pointers[1][5] = -8; },
      [](Caches& caches) { caches.block_bytes[1] = -1; },
      [](Caches& caches) { caches.strides[0][0] = 299; },  // blocks overlap
      [](Caches& caches) { caches.strides[1][1] = 19; },
      [&](Caches& caches) { caches.strides[1][0] = huge; },
  };
  for (const auto& change : changes) {
    Caches caches(0);
    change(caches);
    CHECK(!Refusal(caches).empty());
  }
}

void ANumberIsRegisteredOnce() {
  CHECK(cudaSetDevice(kDevice) == cudaSuccess);
  const Caches caches(71);
  const char* name = nullptr;
  int code = 1;
  CHECK(paddle_kv_queue_register_device_plan(nullptr) == -1);
  CHECK(std::string(paddle_kv_queue_error(&code, &name)) == "plan is null" && code == 0);
  Caches wrong(71);
  wrong.plan.device_blocks = 0;
  CHECK(paddle_kv_queue_register_device_plan(&wrong.plan) == -1);  // the number is free still
  CHECK(paddle_kv_queue_register_device_plan(&caches.plan) == 0);
  CHECK(FindTransferPlan(71) != nullptr && FindTransferPlan(71)->inside_device);
  CHECK(paddle_kv_queue_register_device_plan(&caches.plan) == -1);
  CHECK(std::string(paddle_kv_queue_error(&code, &name)) == "plan = 71 is already registered");
}

const Test kTests[] = {
    {"a_plan_has_what_it_was_given", APlanHasWhatItWasGiven},
    {"what_lies_elsewhere_is_refused", WhatLiesElsewhereIsRefused},
    {"what_cannot_be_right_is_refused", WhatCannotBeRightIsRefused},
    {"a_number_is_registered_once", ANumberIsRegisteredOnce},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
