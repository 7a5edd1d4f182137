// The queue with the engines themselves, on a CUDA runtime of threads (fake_cuda): every byte, in whatever order the
// streams run, and what is left behind when any one call fails.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "paddle_kv/swap/transfer_layers.h"
#include "paddle_kv/transfer/copy_segments.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/transfer_plan.h"
#include "queue_rig.h"

namespace {

// The nth allocation of the library in threads other than the first throws, or all from that one on; -1: none.
std::atomic<int> failing_allocation{-1};
std::atomic<bool> all_fail_then{false};
std::atomic<int> allocations{0};
const std::thread::id main_thread = std::this_thread::get_id();

void FailAllocation(int nth, bool and_all_others = false) {
  allocations = 0;
  all_fail_then = and_all_others;
  failing_allocation = nth;
}

}  // namespace

// Out of line: the compiler would miss the pair of malloc and free.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  if (failing_allocation >= 0 && InsideFakeCuda::depth == 0 && std::this_thread::get_id() != main_thread) {
    const int number = allocations++;
    if (number == failing_allocation || (all_fail_then && number > failing_allocation)) throw std::bad_alloc();
  }
  if (void* memory = std::malloc(std::max<std::size_t>(bytes, 1))) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace paddle_kv {
namespace {

using std::chrono::milliseconds;

constexpr EngineKind kEngines[] = {EngineKind::kAuto, EngineKind::kCopyEngine, EngineKind::kKernel,
                                   EngineKind::kStaging};
constexpr Direction kDirections[] = {Direction::kDeviceToHost, Direction::kHostToDevice};

std::int64_t next_number = 1000;

// Of the host: a tensor after the other, all layers of a block together, or those of each tensor of the layers.
enum class Order { kLayerFirst, kBlockFirst, kPageFirst };
constexpr Order kOrders[] = {Order::kLayerFirst, Order::kBlockFirst, Order::kPageFirst};

// Other bytes for each seed and place. Of one thread: a sanitizer that looked at each store would take longer than the
// transfers.
__attribute__((no_sanitize("thread"))) void FillWithBytes(std::uint64_t seed, std::uint8_t* bytes, std::size_t count) {
  for (std::size_t i = 0; i + 8 <= count; i += 8) {
    std::uint64_t bits = (seed << 40 | i) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 29) * 0xBF58476D1CE4E5B9u;
    bits ^= bits >> 32;
    __builtin_memcpy(bytes + i, &bits, 8);
  }
}

bool AllAre(std::uint8_t byte, const std::vector<std::uint8_t>& bytes) {
  return bytes.front() == byte && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
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
    host.resize(on_host + (block * layers + kGap) * host_blocks);
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

// Some distinct ids below `end`; sometimes with neighbours.
std::vector<std::int64_t> SomeIds(std::int64_t end, std::int64_t count, std::mt19937* random) {
  std::vector<std::int64_t> ids(end);
  std::iota(ids.begin(), ids.end(), 0);
  if ((*random)() % 2 == 0) {
    std::shuffle(ids.begin(), ids.end(), *random);
  } else {
    std::rotate(ids.begin(), ids.begin() + (*random)() % end, ids.end());
  }
  ids.resize(count);
  return ids;
}

bool Meet(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  return std::any_of(a.begin(), a.end(), [&](auto id) { return std::find(b.begin(), b.end(), id) != b.end(); });
}

// Transfers of one grouping on several streams, each behind those before it that move one of its blocks.
void AnySequence(Pools* pools, std::int64_t device_blocks, std::int64_t host_blocks, int count, std::mt19937* random) {
  OpenStream loads, saves, urgent(true);
  Pools::Memory expected = pools->Now();
  std::vector<Submission> given;
  std::vector<std::unique_ptr<Transfer>> transfers;
  std::vector<std::int64_t> streams;
  const std::int64_t layers_per_event = 1 + (*random)() % pools->layers;
  const std::int64_t groups = (pools->layers - 1) / layers_per_event + 1;
  for (int i = 0; i < count; ++i) {
    Submission submission;
    submission.direction = kDirections[(*random)() % 2];
    submission.engine = kEngines[(*random)() % 4];
    submission.layers_per_event = layers_per_event;
    const std::int64_t blocks = (*random)() % (std::min(device_blocks, host_blocks) + 1);
    submission.device_ids = SomeIds(device_blocks, blocks, random);
    submission.host_ids = SomeIds(host_blocks, blocks, random);
    const bool to_host = submission.direction == Direction::kDeviceToHost;
    streams.push_back((to_host ? saves : (*random)() % 3 == 0 ? urgent : loads).handle());
    submission.waits.assign(groups, {});
    for (std::size_t before = 0; before < given.size(); ++before) {
      if (streams[before] == streams.back() || !(Meet(given[before].device_ids, submission.device_ids) ||
                                                 Meet(given[before].host_ids, submission.host_ids))) {
        continue;
      }
      for (std::int64_t g = 0; g < groups; ++g) {
        submission.waits[g].push_back(transfers[before]->records[g]->handle());
      }
    }
    pools->Apply(submission, &expected);
    transfers.push_back(std::make_unique<Transfer>(*pools, streams.back(), submission));
    given.push_back(submission);
  }
  for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
  CHECK(pools->Are(expected));
}

void AnySequenceEndsAsIfOneAfterTheOther() {
  SetLongestDelay(200);
  for (int seed = 0; seed < 40; ++seed) {
    SetCounterWaitsFail(seed % 4 == 3);
    std::mt19937 random(seed);
    std::vector<std::int64_t> sizes;
    const auto tensors = 1 + random() % 3;
    for (std::size_t t = 0; t < tensors; ++t)
      sizes.push_back(random() % 4 == 0 ? 16 << random() % 8 : 1 + random() % 900);
    const std::int64_t device_blocks = 1 + random() % 12, host_blocks = 1 + random() % 12;
    Pools pools(sizes, 1 + random() % 5, device_blocks, host_blocks, kOrders[random() % 3]);
    AnySequence(&pools, device_blocks, host_blocks, 10, &random);
  }
  SetCounterWaitsFail(false);
  SetLongestDelay(0);
}

// Several calls of the copy engine for a layer, the ring of staging several times round.
void LargeTransfersToo() {
  SetLongestDelay(2000);
  for (int seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    Pools pools({(3 << 20) + 8, 1 << 20}, 3, 11, 9, kOrders[seed % 3]);
    AnySequence(&pools, 11, 9, 6, &random);
  }
  SetLongestDelay(0);
}

// More than the smallest table holds, one after the other while none has been read.
void LongLists() {
  constexpr std::int64_t kBlocks = 9001;
  for (const EngineKind engine : kEngines) {
    for (const Direction direction : kDirections) {
      Pools pools({16, 5}, 2, kBlocks, kBlocks, Order::kLayerFirst);
      Pools::Memory expected = pools.Now();
      OpenStream stream;
      Gate gate(stream.stream);
      std::mt19937 random(3);
      std::vector<std::unique_ptr<Transfer>> transfers;
      for (const std::int64_t count : {kBlocks, kBlocks - 5000}) {
        Submission given;
        given.engine = engine;
        given.direction = direction;
        given.device_ids = SomeIds(kBlocks, count, &random);
        given.host_ids = SomeIds(kBlocks, count, &random);
        pools.Apply(given, &expected);
        transfers.push_back(std::make_unique<Transfer>(pools, stream.handle(), given));
      }
      CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
      gate.Open();
      for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
      CHECK(pools.Are(expected));
    }
  }
}

// So many pieces that the copy engine submits them in halves, by two threads.
void ManyPieces() {
  SetLongestDelay(300);
  for (int seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    Pools pools({48, 130}, 3, 400, 390, kOrders[seed % 3]);
    AnySequence(&pools, 400, 390, 6, &random);
  }
  SetLongestDelay(0);
}

// The waits for the former counters are still to be met when there are more.
void MoreLayersThanCounters() {
  Pools pools({48}, 700, 6, 6, Order::kLayerFirst);
  Pools::Memory expected = pools.Now();
  OpenStream stream;
  auto gate = std::make_unique<Gate>(stream.stream);
  std::vector<std::unique_ptr<Transfer>> transfers;
  Submission load;
  load.engine = EngineKind::kKernel;
  for (const std::int64_t layers_per_event : {3, 1, 50, 1}) {
    load.device_ids = {2, 0, 5}, load.host_ids = {1, static_cast<std::int64_t>(transfers.size()), 4};
    load.layers_per_event = layers_per_event;
    pools.Apply(load, &expected);
    transfers.push_back(std::make_unique<Transfer>(pools, stream.handle(), load));
  }
  std::this_thread::sleep_for(milliseconds(20));
  gate->Open();
  for (const auto& transfer : transfers) {
    for (const auto& event : transfer->records) {
      WaitUntil([&] { return Query(event->handle()) == 0; });
    }
  }
  CHECK(pools.Are(expected));
}

// Two transfers of five blocks, held up until both are submitted, of which the first has a failure in wait. Who has
// seen its last event may use its blocks. Everything else is as without it.
template <class Fail>
void AFailureLeavesTheRestAlone(EngineKind engine, Direction direction, Order order, Fail fail) {
  const int events_before = EventsAlive();
  {
    Pools pools({272, 48}, 4, 12, 12, order);
    Submission first, second;
    first.engine = second.engine = engine;
    first.direction = second.direction = direction;
    first.device_ids = {0, 1, 2, 3, 7}, first.host_ids = {4, 5, 6, 7, 2};
    second.device_ids = {9, 4, 6, 5, 8}, second.host_ids = {0, 8, 1, 11, 9};
    Event mark;
    cudaStream_t compute = MakeFakeStream();
    const Pools::Memory before = pools.Now();
    Pools::Memory with_second = before, with_both = before;
    pools.Apply(second, &with_second);
    with_both = with_second;
    pools.Apply(first, &with_both);
    int result = 1;
    {
      OpenStream stream;
      {
        Gate computing(compute);
        cudaEventRecord(mark.event, compute);
        first.waits = {{}, {}, {mark.handle()}, {}};
        Gate gate(stream.stream);
        fail(true);
        Transfer one(pools, stream.handle(), first);
        CHECK(paddle_kv_queue_flush(stream.handle(), 20'000'000) == 0);
        fail(false);
        Transfer two(pools, stream.handle(), second);
        CHECK(paddle_kv_queue_flush(stream.handle(), 20'000'000) == 0);
        std::this_thread::sleep_for(milliseconds(1));
        CHECK(Query(one.last()) == 1);
        gate.Open();
        std::this_thread::sleep_for(milliseconds(1));
        CHECK(Query(one.last()) == 1);  // a failure or not: behind what it had to wait for
        computing.Open();
        result = one.Wait();
        // Nothing of the first moves any more.
        Pools::Memory then = before;
        pools.TakeTargets(first, &then);
        CHECK(two.Wait() == 0);
        Pools::Memory now = pools.Now();
        for (auto* memory : {&now.device, &now.host}) {
          const bool on_host = memory == &now.host;
          const auto& with = on_host ? with_second.host : with_second.device;
          const auto& all = on_host ? with_both.host : with_both.device;
          const auto& at_end_of_first = on_host ? then.host : then.device;
          for (std::size_t i = 0; i < memory->size(); ++i) {
            if (with[i] == all[i]) CHECK((*memory)[i] == with[i]);             // not of the first
            if (with[i] != all[i]) CHECK((*memory)[i] == at_end_of_first[i]);  // of the first alone
            CHECK((*memory)[i] == with[i] || (*memory)[i] == all[i]);
          }
        }
        if (result == 0) CHECK(now == with_both);
      }
    }
    DestroyFakeStream(compute);
  }
  CHECK(EventsAlive() == events_before && StreamsAlive() == 0 && BytesAlive() == 0);
}

template <class Test>
void ForEachKind(Test test) {
  for (const EngineKind engine : kEngines) {
    for (const Direction direction : kDirections) {
      for (const Order order : {Order::kLayerFirst, Order::kBlockFirst}) test(engine, direction, order);
    }
  }
}

void AnyCallMayFail() {
  ForEachKind([](EngineKind engine, Direction direction, Order order) {
    for (const cudaError_t error : {cudaErrorLaunchFailure, cudaErrorMemoryAllocation}) {
      bool failed = true;
      for (int nth = 0; failed; ++nth) {
        AFailureLeavesTheRestAlone(engine, direction, order, [&](bool begin) {
          if (!begin) failed = CallsSinceFailCall() > nth;
          FailCall(begin ? nth : -1, error);
        });
      }
    }
  });
}

void AnyAllocationMayFail() {
  ForEachKind([](EngineKind engine, Direction direction, Order order) {
    for (const bool and_all_others : {false, true}) {
      bool failed = true;
      for (int nth = 0; failed; ++nth) {
        AFailureLeavesTheRestAlone(engine, direction, order, [&](bool begin) {
          if (!begin) failed = allocations > nth;
          FailAllocation(begin ? nth : -1, and_all_others);
        });
      }
    }
  });
}

// The three blocks of a layer are three calls of the copy engine, the second on another stream.
constexpr std::int64_t kPartBytes = 9 << 20;

Submission InParts(Direction direction) {
  Submission given;
  given.engine = EngineKind::kCopyEngine;
  given.direction = direction;
  given.device_ids = {2, 0, 1}, given.host_ids = {1, 2, 3};
  return given;
}

void PartsComeBehindWhatTheirLayerWaitsForAndBeforeItsEvent() {
  SetLongestDelay(5000);
  cudaStream_t compute = MakeFakeStream();
  for (const bool second_stream : {true, false}) {
    SetStreamsFail(!second_stream);
    Pools pools({kPartBytes}, 2, 3, 4, Order::kLayerFirst);
    OpenStream stream;
    Submission load = InParts(Direction::kHostToDevice);
    const Pools::Memory before = pools.Now();
    Pools::Memory after = before;
    pools.Apply(load, &after);
    const auto gate = std::make_unique<Gate>(compute);
    Event mark;
    cudaEventRecord(mark.event, compute);
    load.waits = {{mark.handle()}, {}};
    Transfer transfer(pools, stream.handle(), load);
    if (second_stream) WaitUntil([] { return StreamsAlive() == 1; });
    std::this_thread::sleep_for(milliseconds(50));
    CHECK(StreamsAlive() == (second_stream ? 1 : 0));
    CHECK(pools.Are(before));
    gate->Open();
    const std::int64_t layer_bytes = static_cast<std::int64_t>(after.device.size()) / pools.layers;
    for (std::int64_t layer = 0; layer < pools.layers; ++layer) {
      WaitUntil([&] { return Query(transfer.records[layer]->handle()) == 0; });
      CHECK(std::memcmp(pools.device.data() + layer * layer_bytes, after.device.data() + layer * layer_bytes,
                        layer_bytes) == 0);
    }
    CHECK(pools.Are(after));
  }
  CHECK(StreamsAlive() == 0);
  SetStreamsFail(false);
  SetLongestDelay(0);
  DestroyFakeStream(compute);
}

// Two tensors of 300 blocks that lie apart: more pieces than one thread submits.
Submission InHalves(Direction direction) {
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

// One of the two streams is slow, and what follows is too short for a second one.
void BothHalvesComeBeforeWhatFollowsOnTheStream() {
  for (const bool second_is_slow : {true, false}) {
    Pools pools({80, 48}, 1, 300, 400, Order::kLayerFirst);
    Pools::Memory expected = pools.Now();
    SetDelayOfMade(second_is_slow ? 500 : 0);
    OpenStream stream;
    SetDelay(stream.stream, second_is_slow ? 0 : 500);
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (int round = 0; round < 4; ++round) {
      Submission given = InHalves(round % 2 == 0 ? Direction::kHostToDevice : Direction::kDeviceToHost);
      if (round % 2 == 1) given.device_ids.resize(100), given.host_ids.resize(100);
      for (auto& id : given.host_ids) id += round % 2 == 1 ? 100 : 0;
      pools.Apply(given, &expected);
      transfers.push_back(std::make_unique<Transfer>(pools, stream.handle(), given));
    }
    for (const auto& transfer : transfers) CHECK(transfer->Wait() == 0);
    CHECK(pools.Are(expected));
  }
  SetDelayOfMade(0);
}

// Two layers of 600 blocks are one band, too long for one call, and the third layer another: of a load.
Submission OfABand(Direction direction, std::int64_t blocks = 600) {
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
Submission WithGaps(Direction direction, std::int64_t blocks) {
  Submission given = OfABand(direction, blocks);
  for (std::int64_t& id : given.host_ids) id *= 2;
  return given;
}

// fail(n) lets the nth of them fail, -1 none, and returns how many there were before.
template <class Fail>
void NothingMovesBehindTheEventOfAFailure(Fail fail) {
  struct Case {
    std::vector<std::int64_t> sizes;
    std::int64_t layers, device_blocks, host_blocks;
    Order order;
    std::function<Submission(Direction)> given;
    int delay_us, step;  // the latter where calls are copies, most of them
  };
  const std::vector<Case> cases = {
      {{kPartBytes}, 1, 3, 4, Order::kLayerFirst, InParts, 3000, 1},
      {{80, 48}, 1, 300, 300, Order::kLayerFirst, InHalves, 50, 149},
      // Fills of staging, two at a time by two threads.
      {{12 << 10}, 2, 590, 1180, Order::kBlockFirst, [](Direction way) { return WithGaps(way, 590); }, 100, 197},
  };
  const int events_before = EventsAlive();
  for (const Case& one : cases) {
    SetLongestDelay(one.delay_us);
    for (const Direction direction : kDirections) {
      Pools pools(one.sizes, one.layers, one.device_blocks, one.host_blocks, one.order);
      const bool to_host = direction == Direction::kDeviceToHost;
      auto& target = to_host ? pools.host : pools.device;
      std::memset(target.data(), 0xAA, target.size());
      const Submission given = one.given(direction);
      Pools::Memory expected = pools.Now();
      pools.Apply(given, &expected);
      bool failed = true;
      for (int nth = 0; failed; nth += nth > 9 ? one.step : 1) {
        {
          OpenStream stream;
          fail(nth);
          Transfer transfer(pools, stream.handle(), given);
          const int result = transfer.Wait();
          failed = fail(-1) > nth;
          CHECK(result == 0 || failed);
          if (result == 0) CHECK(pools.Are(expected));
          std::memset(target.data(), 0xAA, target.size());
          cudaStreamSynchronize(stream.stream);
        }
        CHECK(StreamsAlive() == 0 && BytesAlive() == 0);
        CHECK(AllAre(0xAA, target));
      }
    }
  }
  SetLongestDelay(0);
  CHECK(EventsAlive() == events_before);
}

void NothingMovesBehindTheEventOfAFailedCall() {
  NothingMovesBehindTheEventOfAFailure([](int nth) {
    const int calls = CallsSinceFailCall();
    FailCall(nth, cudaErrorLaunchFailure);
    return calls;
  });
}

void NothingMovesBehindTheEventOfAFailedAllocation() {
  NothingMovesBehindTheEventOfAFailure([](int nth) {
    const int made = allocations;
    FailAllocation(nth);
    return made;
  });
}

// What empties the slots is slow: the scatters of the engine's stream, or the copies out of them on the other one. A
// slot holds one block: more are in flight than the ring has.
void ASlotOfTheRingIsNotUsedAgainTooEarly() {
  for (const Direction direction : kDirections) {
    const bool to_host = direction == Direction::kDeviceToHost;
    Pools pools({9 << 19}, 1, 20, 20, Order::kLayerFirst);
    Submission given;
    given.engine = EngineKind::kStaging;
    given.direction = direction;
    for (std::int64_t i = 0; i < 18; ++i) given.device_ids.push_back(19 - i), given.host_ids.push_back(i + 1);
    Pools::Memory expected = pools.Now();
    pools.Apply(given, &expected);
    SetDelayOfMade(to_host ? 0 : 10'000);
    OpenStream stream;
    SetDelay(stream.stream, to_host ? 10'000 : 0);
    Transfer transfer(pools, stream.handle(), given);
    CHECK(transfer.Wait() == 0);
    CHECK(pools.Are(expected));
  }
  SetDelayOfMade(0);
}

// Its stream would wait on the device, beside the copies.
void GathersFindTheirSlotsEmpty() {
  struct Case {
    std::vector<std::int64_t> sizes;
    std::int64_t layers, blocks;
    Order order;
  };
  std::vector<Case> cases = {
      {{1 << 20}, 5, 9, Order::kLayerFirst},       // a layer is a call, and takes a little more than one slot
      {{1}, 80, 1, Order::kLayerFirst},            // parts that leave more free between them than they have
      {{1000}, 640, 100, Order::kLayerFirst},
      {{48, 1 << 10}, 90, 300, Order::kPageFirst},
  };
  for (const std::int64_t bytes : {1 << 20, 3 << 18, 5 << 17, 20 << 10}) {
    cases.push_back({{bytes}, 1, 5 * ((16 << 20) / bytes), Order::kBlockFirst});
  }
  for (const Case& one : cases) {
    Pools pools(one.sizes, one.layers, one.blocks, one.blocks, one.order);
    const Submission given = OfABand(Direction::kDeviceToHost, one.blocks);
    Pools::Memory expected = pools.Now();
    pools.Apply(given, &expected);
    OpenStream stream;
    SetDelay(stream.stream, 2000);
    const int before = HeldWaits();
    Transfer transfer(pools, stream.handle(), given);
    CHECK(transfer.Wait() == 0);
    CHECK(HeldWaits() - before <= 1);  // for what comes before the transfer
    CHECK(pools.Are(expected));
  }
}

// Two fills of so many rows that two threads submit them, each to a stream; those that the engine made are slow.
void FillsOfBothThreadsComeBeforeTheEvent() {
  struct Case {
    std::vector<std::int64_t> sizes;
    std::int64_t layers, blocks;
    Order order;
    bool by_two;
  };
  const Case cases[] = {
      {{12 << 10}, 2, 590, Order::kBlockFirst, true},
      {{16 << 10, 16 << 10}, 1, 288, Order::kLayerFirst, true},  // hardly more than one slot holds
      {{24 << 10}, 2, 280, Order::kBlockFirst, false},           // as many bytes, but the link is busy for longer
  };
  for (const Case& one : cases) {
    for (const Direction direction : kDirections) {
      Pools pools(one.sizes, one.layers, one.blocks + 10, 2 * one.blocks, one.order);
      const Submission given = WithGaps(direction, one.blocks);
      Pools::Memory expected = pools.Now();
      pools.Apply(given, &expected);
      SetDelayOfMade(200);
      OpenStream stream;
      Transfer transfer(pools, stream.handle(), given);
      CHECK(transfer.Wait() == 0);
      CHECK(pools.Are(expected));
      // Of scatters, of the second thread, and of the tables of loads.
      CHECK(StreamsAlive() == 1 + one.by_two + (direction == Direction::kHostToDevice));
    }
  }
  SetDelayOfMade(0);
}

// Of blocks that follow each other, but whose rows lie apart on the host: each of three layers waits for something.
void OnlyLongRunsAreStridedCopies() {
  for (const EngineKind engine : {EngineKind::kCopyEngine, EngineKind::kStaging}) {
    for (const Direction direction : kDirections) {
      for (const std::int64_t count : {31, 32}) {
        Pools pools({96}, 3, 40, 40, Order::kBlockFirst);
        Submission given;
        given.engine = engine;
        given.direction = direction;
        given.device_ids.resize(count);
        std::iota(given.device_ids.begin(), given.device_ids.end(), 2);
        given.host_ids = given.device_ids;
        Pools::Memory expected = pools.Now();
        pools.Apply(given, &expected);
        const int before = StridedCopiesMade();
        OpenStream stream;
        Event mark;
        cudaEventRecord(mark.event, stream.stream);
        given.waits.assign(3, {mark.handle()});
        Transfer transfer(pools, stream.handle(), given);
        CHECK(transfer.Wait() == 0);
        CHECK(pools.Are(expected));
        CHECK(StridedCopiesMade() - before == 3 * (count / 32));
      }
    }
  }
}

void LayersOfABandComeTogetherInParts() {
  SetLongestDelay(2000);
  for (const Direction direction : kDirections) {
    for (const bool in_steps : {false, true}) {
      Pools pools({60 << 10}, 3, 600, 610, Order::kBlockFirst);
      OpenStream stream;
      Submission given = OfABand(direction);
      Event mark;
      cudaStream_t compute = MakeFakeStream();
      auto gate = std::make_unique<Gate>(compute);
      cudaEventRecord(mark.event, compute);
      if (in_steps) given.waits = {{}, {mark.handle()}, {}};  // the first layer cannot be of a band with the second
      const Pools::Memory before = pools.Now();
      Pools::Memory after = before;
      pools.Apply(given, &after);
      Transfer transfer(pools, stream.handle(), given);
      if (in_steps) {
        WaitUntil([&] { return Query(transfer.records[0]->handle()) == 0; });
        CHECK(Query(transfer.records[1]->handle()) == 1);
      }
      gate->Open();
      for (std::int64_t layer = 0; layer < pools.layers; ++layer) {
        WaitUntil([&] { return Query(transfer.records[layer]->handle()) == 0; });
        CHECK(pools.HasLayer(layer, after));
      }
      CHECK(pools.Are(after));
      DestroyFakeStream(compute);
    }
  }
  SetLongestDelay(0);
}

// The copy engine then moves all blocks of the band, those too that staging had been given.
void AFullDeviceLeavesBandsToTheCopyEngine() {
  std::vector<std::int64_t> costs(12 * EngineCosts::kSizes, 1000);
  std::fill(costs.begin() + 8 * EngineCosts::kSizes, costs.end(), 1);  // of staging
  CHECK(paddle_kv_queue_set_costs(0, costs.data()) == 0);
  for (const Direction direction : kDirections) {
    Pools pools({60 << 10}, 3, 600, 610, Order::kBlockFirst);
    Submission given = OfABand(direction);
    given.engine = EngineKind::kAuto;
    Pools::Memory after = pools.Now();
    pools.Apply(given, &after);
    bool failed = true;
    for (int nth = 0; failed; nth += nth < 9 ? 3 : 650) {  // most calls are copies
      pools.Fill();
      OpenStream stream;
      FailCall(nth, cudaErrorMemoryAllocation);
      Transfer transfer(pools, stream.handle(), given);
      CHECK(paddle_kv_queue_flush(stream.handle(), 20'000'000) == 0);
      failed = CallsSinceFailCall() > nth;
      FailCall(-1, cudaErrorMemoryAllocation);
      if (transfer.Wait() == 0) CHECK(pools.Are(after));
    }
  }
}

// In the strictest mode what one thread may not do breaks the capture of the other.
void ACaptureInAnotherThreadIsNotBroken() {
  for (const EngineKind engine : kEngines) {
    Pools pools({4096, 300}, 5, 8, 8, Order::kLayerFirst);
    cudaStream_t compute = MakeFakeStream(), stream = MakeFakeStream();
    BeginFakeCapture();
    std::thread([&] {
      CHECK(paddle_kv_queue_open(0, Handle(stream), 0) == 0);
      Submission load;
      load.engine = engine;
      load.device_ids = {5, 0, 3}, load.host_ids = {1, 2, 7};
      Transfer transfer(pools, Handle(stream), load);
      for (const auto& event : transfer.records) {
        CHECK(paddle_kv_queue_wait_stream(0, Handle(compute), event->handle(), -1) == 0);
      }
      CHECK(transfer.Wait() == 0);
      CHECK(paddle_kv_queue_close(Handle(stream)) == 0);
    }).join();
    CHECK(EndFakeCapture());
    CHECK(StreamsAlive() == 0 && BytesAlive() == 0);
    DestroyFakeStream(stream);
    DestroyFakeStream(compute);
  }
}

// The driver compiles the PTX of an older build for a newer GPU: machine code of that, without its instructions.
void BulkCopiesNeedKernelsThatHaveThem() {
  const auto has = [](int ptx, int binary, int shared_bytes) {
    SetKernelArchitectures(ptx, binary);
    SetSharedMemory(shared_bytes);
    bool found = false;
    CHECK(HasBulkCopies(0, &found).ok());
    SetKernelArchitectures(90, 90);
    SetSharedMemory(227 << 10);
    return found;
  };
  CHECK(has(90, 90, 227 << 10) && has(100, 100, 227 << 10) && has(90, 120, 227 << 10));
  CHECK(!has(80, 90, 227 << 10) && !has(89, 100, 227 << 10) && !has(80, 80, 227 << 10));
  CHECK(!has(90, 90, 99 << 10));
}

// The fake GPU has 100 multiprocessors.
void KernelsBetweenCachesAreWideUnlessTheModelRuns() {
  const auto ctas = [](const Pools& pools, bool beside_compute) {
    cudaStream_t stream = MakeFakeStream();
    const auto plan = FindTransferPlan(pools.number);
    const std::vector<Run> runs = {{0, 0, 3}};
    Event event;
    const std::int64_t record = event.handle();
    EngineWork work = {plan.get(), Direction::kDeviceToHost, &runs, 0, pools.layers, pools.layers, pools.layers,
                       &record};
    work.beside_compute = beside_compute;
    CHECK(MakeKernelEngine(0)->Copy(work, {0, Handle(stream)}).ok());
    WaitFor(event.event);
    DestroyFakeStream(stream);
    return CtasOfLastKernel();
  };
  constexpr Order kOrder = Order::kLayerFirst;
  const Pools host({64}, 2, 4, 4, kOrder), same({64}, 2, 4, 4, kOrder, true), other({64}, 2, 4, 4, kOrder, true, true);
  CHECK(ctas(host, false) == 0 && ctas(host, true) == 0);
  CHECK(ctas(same, false) == 100 && ctas(other, false) == 100);
  CHECK(ctas(same, true) <= 8 && ctas(other, true) <= 8 && ctas(same, true) > 0 && ctas(other, true) > 0);
}

// Nobody would catch there what is thrown.
void WhatHasLandedNeedsNoMemory() {
  Pools pools({64}, 1, 4, 4, Order::kLayerFirst);
  OpenStream stream;
  Submission load;
  load.engine = EngineKind::kCopyEngine;
  std::vector<std::unique_ptr<Transfer>> transfers;
  {
    Gate gate(stream.stream);
    for (int i = 0; i < 5; ++i) transfers.push_back(std::make_unique<Transfer>(pools, stream.handle(), load));
    CHECK(paddle_kv_queue_flush(stream.handle(), -1) == 0);
  }
  cudaStreamSynchronize(stream.stream);
  FailAllocation(0);
  Transfer next(pools, stream.handle(), load);
  CHECK(next.Wait() == -1);
  FailAllocation(-1);
}

const Test kTests[] = {
    {"any_sequence_ends_as_if_one_after_the_other", AnySequenceEndsAsIfOneAfterTheOther},
    {"large_transfers_too", LargeTransfersToo},
    {"long_lists", LongLists},
    {"many_pieces", ManyPieces},
    {"more_layers_than_counters", MoreLayersThanCounters},
    {"any_call_may_fail", AnyCallMayFail},
    {"any_allocation_may_fail", AnyAllocationMayFail},
    {"parts_come_behind_what_their_layer_waits_for_and_before_its_event",
     PartsComeBehindWhatTheirLayerWaitsForAndBeforeItsEvent},
    {"both_halves_come_before_what_follows_on_the_stream", BothHalvesComeBeforeWhatFollowsOnTheStream},
    {"nothing_moves_behind_the_event_of_a_failed_call", NothingMovesBehindTheEventOfAFailedCall},
    {"nothing_moves_behind_the_event_of_a_failed_allocation", NothingMovesBehindTheEventOfAFailedAllocation},
    {"a_slot_of_the_ring_is_not_used_again_too_early", ASlotOfTheRingIsNotUsedAgainTooEarly},
    {"gathers_find_their_slots_empty", GathersFindTheirSlotsEmpty},
    {"fills_of_both_threads_come_before_the_event", FillsOfBothThreadsComeBeforeTheEvent},
    {"only_long_runs_are_strided_copies", OnlyLongRunsAreStridedCopies},
    {"layers_of_a_band_come_together_in_parts", LayersOfABandComeTogetherInParts},
    {"a_full_device_leaves_bands_to_the_copy_engine", AFullDeviceLeavesBandsToTheCopyEngine},
    {"a_capture_in_another_thread_is_not_broken", ACaptureInAnotherThreadIsNotBroken},
    {"bulk_copies_need_kernels_that_have_them", BulkCopiesNeedKernelsThatHaveThem},
    {"kernels_between_caches_are_wide_unless_the_model_runs", KernelsBetweenCachesAreWideUnlessTheModelRuns},
    {"what_has_landed_needs_no_memory", WhatHasLandedNeedsNoMemory},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
