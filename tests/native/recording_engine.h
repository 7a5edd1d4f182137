// Engines that record what they are asked for, and plans, for tests of the queue. In one file of a program.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "paddle_kv/swap/transfer_blocks.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/engine_choice.h"
#include "paddle_kv/transfer/engine_events.cuh"
#include "paddle_kv/transfer/transfer_plan.h"
#include "queue_rig.h"

namespace paddle_kv {

// ---- the engine ----
struct Copied {
  std::int64_t stream;
  std::int64_t plan_blocks;  // device_blocks of the plan, by which tests tell plans apart
  std::int64_t first_layer;
  std::int64_t end_layer;
  EngineKind engine;
  std::int64_t blocks;
  bool records;
  bool beside_compute;
};

inline std::mutex log_mutex;
inline std::vector<Copied> copied;
inline std::function<Status(const EngineWork&, const DeviceStream&)> before_copy;  // set while nothing runs

inline std::vector<Copied> Log() {
  const std::lock_guard<std::mutex> lock(log_mutex);
  return copied;
}

inline void ClearLog() {
  const std::lock_guard<std::mutex> lock(log_mutex);
  copied.clear();
}

// Holds the thread of the queue in the first copy until Open(): what is submitted meanwhile finds it busy. Made and
// ended while nothing runs.
class BusyEngine {
 public:
  BusyEngine() {
    before_copy = [this](const EngineWork&, const DeviceStream&) {
      WaitUntil([this] { return open_.load(); });
      return Status{};
    };
  }
  void Open() { open_ = true; }
  ~BusyEngine() { before_copy = nullptr; }

 private:
  std::atomic<bool> open_{false};
};

class RecordingEngine : public Engine {
 public:
  explicit RecordingEngine(EngineKind kind) : kind_(kind) {}

  Status Copy(const EngineWork& work, const DeviceStream& where) override {
    {
      const std::lock_guard<std::mutex> lock(log_mutex);
      std::int64_t blocks = 0;
      for (const Run& run : *work.runs) blocks += run.length;
      copied.push_back({where.stream, work.plan->device_blocks, work.first_layer, work.end_layer, kind_, blocks,
                        work.record_events != nullptr, work.beside_compute});
    }
    auto* stream = reinterpret_cast<cudaStream_t>(where.stream);
    if (const Status status = RecordStart(work, stream); !status.ok()) return status;
    if (before_copy) {
      const Status status = before_copy(work, where);
      if (!status.ok()) return status;
    }
    const std::int64_t* event = work.record_events;
    for (std::int64_t layer = work.first_layer; layer < work.end_layer;) {
      const std::int64_t end = std::min(layer + work.layers_per_event, work.end_layer);
      // The arguments may go away on return.
      std::vector<std::int64_t> sources, targets;
      for (const Run& run : *work.runs) {
        for (std::int64_t i = 0; i < run.length; ++i) {
          sources.push_back(run.source + i);
          targets.push_back(run.target + i);
        }
      }
      std::vector<BlockRows> rows;
      for (std::int64_t l = layer; l < end && work.plan->tensors[0].device != nullptr; ++l) {
        for (const BlockRows& row : RowsOfLayer(*work.plan, l, work.direction)) rows.push_back(row);
      }
      Enqueue(stream, [rows, sources, targets] {
        TransferBlocksCpu(rows.data(), static_cast<std::int64_t>(rows.size()), sources.data(), targets.data(),
                          static_cast<std::int64_t>(sources.size()));
      });
      if (event != nullptr) cudaEventRecord(EventOf(*event++), stream);
      layer = end;
    }
    return {};
  }

 private:
  EngineKind kind_;
};

std::unique_ptr<Engine> MakeCopyEngine(int) { return std::make_unique<RecordingEngine>(EngineKind::kCopyEngine); }
std::unique_ptr<Engine> MakeKernelEngine(int) { return std::make_unique<RecordingEngine>(EngineKind::kKernel); }
std::unique_ptr<Engine> MakeStagingEngine(int) { return std::make_unique<RecordingEngine>(EngineKind::kStaging); }

// ---- what a test has ----
inline std::atomic<std::int64_t> next_plan{1};

// Pools in RAM, or (block_bytes alone) sizes without memory.
struct Plan {
  std::int64_t number = next_plan++;
  std::int64_t blocks, block_bytes, layers;
  std::vector<std::vector<std::uint8_t>> device, host;

  Plan(std::int64_t layer_count, std::int64_t bytes, bool in_ram, int on_device = 0, bool inside_device = false)
      : blocks(number + (in_ram ? 10 : 1 << 20)), block_bytes(bytes), layers(layer_count) {
    auto plan = std::make_shared<TransferPlan>();
    plan->device = on_device;
    plan->inside_device = inside_device;
    plan->device_blocks = plan->host_blocks = blocks;
    plan->layer_count = layers;
    plan->tensors_per_layer = 1;
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      device.emplace_back(in_ram ? blocks * bytes : 0);
      host.emplace_back(in_ram ? blocks * bytes : 0);
    }
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      // A block at a time: a sanitizer that looked at each store would take longer than the transfers.
      for (std::int64_t i = 0; in_ram && i < blocks; ++i) {
        std::memset(&device[layer][i * bytes], static_cast<std::uint8_t>(i * 3 + layer * 50 + 1), bytes);
        std::memset(&host[layer][i * bytes], static_cast<std::uint8_t>(i * 5 + layer * 70 + 2), bytes);
      }
      plan->tensors.push_back(
          {in_ram ? device[layer].data() : nullptr, in_ram ? host[layer].data() : nullptr, bytes, bytes, bytes});
    }
    CHECK(AddTransferPlan(number, plan));
  }
  ~Plan() { RemoveTransferPlan(number); }
  Plan(const Plan&) = delete;
};

}  // namespace paddle_kv
