// What tests of the engines on a CUDA runtime of threads (fake_cuda) have: memory of both sides whose every byte is
// known, and transfers that are submitted in several calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "paddle_kv/transfer/engine_choice.h"
#include "paddle_kv/transfer/transfer_plan.h"
#include "queue_rig.h"

namespace paddle_kv {

constexpr EngineKind kEngines[] = {EngineKind::kAuto, EngineKind::kCopyEngine, EngineKind::kKernel,
                                   EngineKind::kStaging};
constexpr Direction kDirections[] = {Direction::kDeviceToHost, Direction::kHostToDevice};

inline std::int64_t next_number = 1000;

// Of the host: a tensor after the other, all layers of a block together, or those of each tensor of the layers.
enum class Order { kLayerFirst, kBlockFirst, kPageFirst };
constexpr Order kOrders[] = {Order::kLayerFirst, Order::kBlockFirst, Order::kPageFirst};

// Other bytes for each seed and place. Of one thread: a sanitizer that looked at each store would take longer than the
// transfers.
__attribute__((no_sanitize("thread"))) inline void FillWithBytes(std::uint64_t seed, std::uint8_t* bytes,
                                                                 std::size_t count) {
  for (std::size_t i = 0; i + 8 <= count; i += 8) {
    std::uint64_t bits = (seed << 40 | i) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 29) * 0xBF58476D1CE4E5B9u;
    bits ^= bits >> 32;
    __builtin_memcpy(bytes + i, &bits, 8);
  }
}

// Memory of both sides, each byte other than its neighbours; some bytes belong to nobody.
struct Pools {
  std::int64_t number = next_number++;
  std::int64_t layers;
  std::vector<std::uint8_t> device, host;

  Pools(const std::vector<std::int64_t>& sizes, std::int64_t layer_count, std::int64_t device_blocks,
        std::int64_t host_blocks, Order order, bool inside_device = false, bool on_other_gpu = false)
      : layers(layer_count) {
    constexpr std::int64_t kGap = 48;
    auto plan = std::make_shared<TransferPlan>();
    plan->device = 0;
    plan->inside_device = inside_device;
    plan->on_other_gpu = on_other_gpu;
    plan->device_blocks = device_blocks;
    plan->host_blocks = host_blocks;
    plan->layer_count = layers;
    plan->tensors_per_layer = static_cast<std::int64_t>(sizes.size());
    const std::int64_t block = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    struct Place {
      std::int64_t device, host, host_stride;
    };
    std::vector<Place> places;
    std::int64_t on_device = kGap, on_host = kGap;
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      std::int64_t before = 0;  // bytes of the tensors before, of a block
      for (const std::int64_t size : sizes) {
        if (order == Order::kLayerFirst) {
          places.push_back({on_device, on_host, size});
          on_host += size * host_blocks + kGap;
        } else if (order == Order::kBlockFirst) {
          places.push_back({on_device, kGap + layer * block + before, layers * block + kGap});
        } else {
          places.push_back({on_device, kGap + before * layers * host_blocks + layer * size, layers * size});
        }
        on_device += size * device_blocks + kGap;
        before += size;
      }
    }
    device.resize(on_device);
    host.resize(std::max(on_host, kGap + (block * layers + kGap) * host_blocks));
    Fill();
    for (std::size_t i = 0; i < places.size(); ++i) {
      const std::int64_t size = sizes[i % sizes.size()];
      plan->tensors.push_back(
          {device.data() + places[i].device, host.data() + places[i].host, size, places[i].host_stride, size});
    }
    CHECK(AddTransferPlan(number, plan));
  }
  ~Pools() { RemoveTransferPlan(number); }
  Pools(const Pools&) = delete;

  void Fill() {
    FillWithBytes(2 * number, device.data(), device.size());
    FillWithBytes(2 * number + 1, host.data(), host.size());
  }

  // Copies between the sides of `memory`, which lies as `device` and `host` do.
  struct Memory {
    std::vector<std::uint8_t> device, host;
    bool operator==(const Memory& other) const { return device == other.device && host == other.host; }
  };
  Memory Now() const { return {device, host}; }
  bool Are(const Memory& memory) const { return device == memory.device && host == memory.host; }
  void Apply(const Submission& given, Memory* memory) const {
    ForEachBlock(given, [&](std::int64_t on_device, std::int64_t on_host, std::int64_t bytes) {
      std::uint8_t* const of_device = memory->device.data() + on_device;
      std::uint8_t* const of_host = memory->host.data() + on_host;
      const bool to_host = given.direction == Direction::kDeviceToHost;
      std::memcpy(to_host ? of_host : of_device, to_host ? of_device : of_host, bytes);
    });
  }
  // What the targets hold now, whatever happens to the rest.
  void TakeTargets(const Submission& given, Memory* memory) const {
    ForEachBlock(given, [&](std::int64_t on_device, std::int64_t on_host, std::int64_t bytes) {
      if (given.direction == Direction::kDeviceToHost) {
        std::memcpy(memory->host.data() + on_host, host.data() + on_host, bytes);
      } else {
        std::memcpy(memory->device.data() + on_device, device.data() + on_device, bytes);
      }
    });
  }

  // Whether all blocks of a layer are as in `memory`, on both sides.
  bool HasLayer(std::int64_t layer, const Memory& memory) const {
    const auto plan = FindTransferPlan(number);
    bool has = true;
    for (std::int64_t t = 0; t < plan->tensors_per_layer; ++t) {
      const LayerTensor& tensor = plan->tensors[layer * plan->tensors_per_layer + t];
      const auto same = [&](const std::uint8_t* now, std::int64_t offset) {
        return std::memcmp(now + offset, (now == host.data() ? memory.host : memory.device).data() + offset,
                           tensor.block_bytes) == 0;
      };
      for (std::int64_t i = 0; i < plan->device_blocks; ++i) {
        has &= same(device.data(), tensor.device - device.data() + i * tensor.device_stride);
      }
      for (std::int64_t i = 0; i < plan->host_blocks; ++i) {
        has &= same(host.data(), tensor.host - host.data() + i * tensor.host_stride);
      }
    }
    return has;
  }

 private:
  template <class Use>
  void ForEachBlock(const Submission& given, Use use) const {
    const auto plan = FindTransferPlan(number);
    for (const LayerTensor& tensor : plan->tensors) {
      for (std::size_t i = 0; i < given.host_ids.size(); ++i) {
        use(tensor.device - device.data() + given.device_ids[i] * tensor.device_stride,
            tensor.host - host.data() + given.host_ids[i] * tensor.host_stride, tensor.block_bytes);
      }
    }
  }
};

// The three blocks of a layer are three calls of the copy engine, the second on another stream.
constexpr std::int64_t kPartBytes = 9 << 20;

inline Submission InParts(Direction direction) {
  Submission given;
  given.engine = EngineKind::kCopyEngine;
  given.direction = direction;
  given.device_ids = {2, 0, 1}, given.host_ids = {1, 2, 3};
  return given;
}

// Two tensors of 300 blocks that lie apart: more pieces than one thread submits.
inline Submission InHalves(Direction direction) {
  Submission given;
  given.engine = EngineKind::kCopyEngine;
  given.direction = direction;
  std::mt19937 random(7);
  given.device_ids.resize(300);
  std::iota(given.device_ids.begin(), given.device_ids.end(), 0);
  given.host_ids = given.device_ids;
  std::shuffle(given.device_ids.begin(), given.device_ids.end(), random);
  std::shuffle(given.host_ids.begin(), given.host_ids.end(), random);
  return given;
}

// Two layers of 600 blocks are one band, too long for one call, and the third layer another: of a load.
inline Submission OfABand(Direction direction, std::int64_t blocks = 600) {
  Submission given;
  given.engine = EngineKind::kStaging;
  given.direction = direction;
  std::mt19937 random(5);
  given.device_ids.resize(blocks);
  std::iota(given.device_ids.begin(), given.device_ids.end(), 0);
  given.host_ids = given.device_ids;
  std::shuffle(given.device_ids.begin(), given.device_ids.end(), random);
  std::shuffle(given.host_ids.begin(), given.host_ids.end(), random);
  return given;
}

// The same with a gap behind each host block: each is a copy of its own.
inline Submission WithGaps(Direction direction, std::int64_t blocks) {
  Submission given = OfABand(direction, blocks);
  for (std::int64_t& id : given.host_ids) id *= 2;
  return given;
}

}  // namespace paddle_kv
