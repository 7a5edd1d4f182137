// The queue with the engines themselves, on a CUDA runtime of threads (fake_cuda): every byte, in whatever order the
// streams run.
#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_rig.h"
#include "fake_cuda.h"
#include "paddle_kv/swap/transfer_layers.h"
#include "paddle_kv/transfer/copy_segments.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/transfer_plan.h"
#include "queue_rig.h"

namespace paddle_kv {
namespace {

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
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  gate->Open();
  for (const auto& transfer : transfers) {
    for (const auto& event : transfer->records) {
      WaitUntil([&] { return Query(event->handle()) == 0; });
    }
  }
  CHECK(pools.Are(expected));
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

const Test kTests[] = {
    {"any_sequence_ends_as_if_one_after_the_other", AnySequenceEndsAsIfOneAfterTheOther},
    {"large_transfers_too", LargeTransfersToo},
    {"long_lists", LongLists},
    {"many_pieces", ManyPieces},
    {"more_layers_than_counters", MoreLayersThanCounters},
    {"only_long_runs_are_strided_copies", OnlyLongRunsAreStridedCopies},
    {"a_capture_in_another_thread_is_not_broken", ACaptureInAnotherThreadIsNotBroken},
    {"bulk_copies_need_kernels_that_have_them", BulkCopiesNeedKernelsThatHaveThem},
    {"kernels_between_caches_are_wide_unless_the_model_runs", KernelsBetweenCachesAreWideUnlessTheModelRuns},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
