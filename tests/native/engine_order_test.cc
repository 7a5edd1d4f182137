// The queue with the engines themselves, on a CUDA runtime of threads (fake_cuda): what one transfer submits in several
// calls, from two threads and to several streams comes behind what it waits for, and before its events.
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_rig.h"
#include "fake_cuda.h"
#include "queue_rig.h"

namespace paddle_kv {
namespace {

using std::chrono::milliseconds;

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
      {{1 << 20}, 5, 9, Order::kLayerFirst},  // a layer is a call, and takes a little more than one slot
      {{1}, 80, 1, Order::kLayerFirst},       // parts that leave more free between them than they have
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

const Test kTests[] = {
    {"parts_come_behind_what_their_layer_waits_for_and_before_its_event",
     PartsComeBehindWhatTheirLayerWaitsForAndBeforeItsEvent},
    {"both_halves_come_before_what_follows_on_the_stream", BothHalvesComeBeforeWhatFollowsOnTheStream},
    {"a_slot_of_the_ring_is_not_used_again_too_early", ASlotOfTheRingIsNotUsedAgainTooEarly},
    {"gathers_find_their_slots_empty", GathersFindTheirSlotsEmpty},
    {"fills_of_both_threads_come_before_the_event", FillsOfBothThreadsComeBeforeTheEvent},
    {"layers_of_a_band_come_together_in_parts", LayersOfABandComeTogetherInParts},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
