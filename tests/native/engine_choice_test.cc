// Which engine is chosen, and what lies together on the host.
#include "paddle_kv/transfer/engine_choice.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "paddle_kv/transfer/host_rows.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {
namespace {

// The same for all sizes.
EngineCosts::OfSizes Flat(std::int64_t ns_per_mib) {
  EngineCosts::OfSizes of;
  of.fill(ns_per_mib);
  return of;
}

// So long for a piece, and so long for a MiB.
EngineCosts::OfSizes PieceAndBytes(std::int64_t piece_ns, std::int64_t ns_per_mib) {
  EngineCosts::OfSizes of;
  for (int i = 0; i < EngineCosts::kSizes; ++i) {
    of[i] = piece_ns * ((1 << 20) / (EngineCosts::kSmallestBytes << i)) + ns_per_mib;
  }
  return of;
}

constexpr std::int64_t kKiB = 1 << 10;

void CostsAreSummedOverThePieces() {
  const auto near = [](double cost, double expected) { return cost > expected * 0.999 && cost < expected * 1.001; };
  const auto cost = [](const EngineCosts::OfSizes& of, std::int64_t bytes, std::int64_t count) {
    Pieces pieces;
    pieces.Add(bytes, count);
    return pieces.Cost(of);
  };
  // By the bytes alone: in between, below and above what was measured too.
  for (const std::int64_t bytes : {1, 100, 4096, 5000, 24 << 10, 256 << 10, 3 << 20}) {
    CHECK(near(cost(Flat(20000), bytes, 7), 7 * 20000.0 * bytes / (1 << 20)));
  }
  // A time for each piece too.
  const auto both = PieceAndBytes(500, 20000);
  for (const std::int64_t bytes : {100, 4096, 6000, 24 << 10, 100 << 10, 256 << 10}) {
    CHECK(near(cost(both, bytes, 3), 3 * (500 + 20000.0 * bytes / (1 << 20))));
  }
  CHECK(near(cost(both, 512 << 10, 1), 2 * cost(both, 256 << 10, 1)));
  Pieces mixed;
  mixed.Add(4 * kKiB, 10), mixed.Add(1 << 20, 2), mixed.Add(4 * kKiB, 1), mixed.Add(0, 5), mixed.Add(5, 0);
  CHECK(near(mixed.Cost(Flat(20000)), 20000 * (11 * 4.0 / 1024 + 2)) && mixed.Count() == 13);
  CHECK(near(mixed.CostWithLeast(Flat(20000), 4 * kKiB + 1, 1000), 11 * 1000 + 2 * 20000.0));
  CHECK(near(mixed.CostWithLeast(Flat(20000), 4 * kKiB, 1000), mixed.Cost(Flat(20000))));
  CHECK(near(mixed.CostWithLeast(Flat(20000), 2 << 20, 10), mixed.Cost(Flat(20000))));  // a least, no more
}

void AutoTakesWhatCostsLeast() {
  for (int direction = 0; direction < 2; ++direction) {
    for (const bool beside : {false, true}) {
      EngineCosts costs;
      for (EngineCosts::Ways* ways : {costs.copy_engine, costs.kernel, costs.staging}) {
        for (int other = 0; other < 2; ++other) ways[other].alone = ways[other].beside = Flat(1000000);
      }
      const auto of = [&](EngineCosts::Ways(&ways)[2]) -> EngineCosts::OfSizes& {
        return beside ? ways[direction].beside : ways[direction].alone;
      };
      const auto chosen = [&](std::int64_t both, std::int64_t host) {
        PieceSizes sizes;
        sizes.both.Add(both, (16 << 20) / both);
        sizes.host.Add(host, (16 << 20) / host);
        sizes.blocks = (16 << 20) / both;
        return ChooseEngine(sizes, static_cast<Direction>(direction), beside, costs);
      };
      of(costs.copy_engine) = PieceAndBytes(1000, 19000);
      of(costs.staging) = PieceAndBytes(1000, 20000);
      of(costs.kernel) = Flat(30000);
      CHECK(chosen(256 * kKiB, 256 * kKiB) == EngineKind::kCopyEngine);
      CHECK(chosen(128 * kKiB, 128 * kKiB) == EngineKind::kCopyEngine);
      CHECK(chosen(64 * kKiB, 64 * kKiB) == EngineKind::kKernel);  // 35000
      CHECK(chosen(64 * kKiB, 256 * kKiB) == EngineKind::kStaging);
      CHECK(chosen(4 * kKiB, 256 * kKiB) == EngineKind::kStaging);
      CHECK(chosen(4 * kKiB, 64 * kKiB) == EngineKind::kKernel);
      // A block has a price in the slots, small as it is.
      CHECK(chosen(64, 256 * kKiB) == EngineKind::kKernel);
      of(costs.kernel) = Flat(25000);
      CHECK(chosen(4 * kKiB, 256 * kKiB) == EngineKind::kStaging);
      of(costs.kernel) = Flat(23000);
      CHECK(chosen(4 * kKiB, 128 * kKiB) == EngineKind::kKernel);
    }
  }
}

// Batches of the copy engine are slow where the pieces of a load have 4 to 28 KiB, whatever was measured.
void LoadsOfMiddlingPiecesAreNotTheCopyEngines() {
  EngineCosts costs;
  const auto chosen = [&](Direction direction, std::vector<std::pair<std::int64_t, std::int64_t>> pieces) {
    PieceSizes sizes;
    for (const auto& [bytes, count] : pieces) sizes.both.Add(bytes, count), sizes.host.Add(bytes, count);
    return ChooseEngine(sizes, direction, true, costs);
  };
  for (const bool measured : {false, true}) {
    if (measured) costs.copy_engine[1].beside = Flat(2000);
    for (const std::int64_t size : {4, 16, 24, 27}) {
      CHECK(chosen(Direction::kHostToDevice, {{size * kKiB, 50}}) == EngineKind::kKernel);
    }
    CHECK(chosen(Direction::kHostToDevice, {{32 * kKiB, 50}}) == EngineKind::kCopyEngine);
    // Half of the bytes in small ones, which an average would hide; and one of a hundred.
    CHECK(chosen(Direction::kHostToDevice, {{16 * kKiB, 400}, {64 * kKiB, 100}}) == EngineKind::kKernel);
    CHECK(chosen(Direction::kHostToDevice, {{16 * kKiB, 4}, {64 * kKiB, 100}}) == EngineKind::kCopyEngine);
    // Hardly any bytes, but as many calls.
    CHECK(chosen(Direction::kHostToDevice, {{512, 200}, {64 * kKiB, 100}}) == EngineKind::kKernel);
  }
  CHECK(chosen(Direction::kDeviceToHost, {{32 * kKiB, 50}}) == EngineKind::kCopyEngine);
  CHECK(chosen(Direction::kDeviceToHost, {{8 * kKiB, 400}, {256 * kKiB, 10}}) == EngineKind::kKernel);
}

// With the built-in costs, beside compute, half of the host's blocks in a random order: gathers slow the model more
// than the copy engine does, which is as quick here where the pieces are scattered, and slower where layers lie
// together.
void SavesGoTheWayThatSlowsTheModelLess() {
  const auto chosen = [](std::int64_t block_kib, std::int64_t host_row_kib) {
    PieceSizes sizes;
    for (std::int64_t length = 1; length < 8; ++length) {
      const std::int64_t runs = 65536 >> length;
      if (host_row_kib == 0) sizes.host.Add(length * block_kib * kKiB, runs);
      sizes.blocks += runs * length;
    }
    sizes.both.Add(block_kib * kKiB, sizes.blocks);
    if (host_row_kib != 0) sizes.host.Add(host_row_kib * kKiB, sizes.blocks * block_kib / host_row_kib);
    return ChooseEngine(sizes, Direction::kDeviceToHost, true, EngineCosts());
  };
  for (const std::int64_t size : {32, 40, 48, 64}) CHECK(chosen(size, 0) == EngineKind::kCopyEngine);
  for (const std::int64_t size : {16, 24}) CHECK(chosen(size, 0) == EngineKind::kStaging);
  for (const std::int64_t size : {4, 16, 32, 48}) CHECK(chosen(size, 1024) == EngineKind::kStaging);
  CHECK(chosen(64, 1024) == EngineKind::kCopyEngine);
}

void PiecesAreWhatIsContiguous() {
  TransferPlan plan;
  plan.tensors_per_layer = 2;
  plan.layer_count = 1;
  std::vector<std::uint8_t> host(1000);
  // The second: rows on the host.
  plan.tensors = {{nullptr, host.data(), 100, 100, 100}, {nullptr, host.data() + 900, 30, 50, 30}};
  // On the host 0 to 4 and 7; on the device in three pieces.
  const std::vector<Run> load = {{0, 10, 2}, {2, 20, 3}, {7, 30, 1}};
  std::vector<Run> save = load;
  for (Run& run : save) std::swap(run.source, run.target);
  for (const auto& [direction, runs] : {std::pair(Direction::kHostToDevice, load), {Direction::kDeviceToHost, save}}) {
    const PieceSizes sizes = SizesOfPieces(plan, direction, runs, 1);
    CHECK(sizes.both.Count() == 3 + 6 && sizes.host.Count() == 2 + 6);
    for (const Pieces& pieces : {sizes.both, sizes.host}) {
      CHECK(pieces.Cost(Flat(1 << 20)) > 779.9 && pieces.Cost(Flat(1 << 20)) < 780.1);  // the bytes
    }
    CHECK(sizes.blocks == 12);
    CHECK(sizes.both.AreLarge(30) && !sizes.both.AreLarge(31));  // 180 of 780 bytes are in pieces of 30
  }
  CHECK(SizesOfPieces(plan, Direction::kHostToDevice, {}, 1).both.Count() == 0);
}

// Four layers of K and V, blocks of 100 and 30 bytes: bands of two.
void LayersThatLieTogetherOnTheHostAreOnePiece() {
  constexpr std::int64_t kLayers = 4, kBlocks = 5, kBlock = 130;
  std::vector<std::uint8_t> host(kLayers * kBlocks * kBlock + 100);
  TransferPlan plan;
  plan.tensors_per_layer = 2;
  plan.layer_count = kLayers;
  const auto set = [&](std::int64_t layer_bytes, std::int64_t value_at, std::int64_t stride,
                       std::int64_t value_stride) {
    plan.tensors.clear();
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      std::uint8_t* const key = host.data() + layer * layer_bytes;
      plan.tensors.push_back({nullptr, key, 100, stride, 100});
      plan.tensors.push_back({nullptr, key + value_at, 30, value_stride, 30});
    }
  };
  const std::vector<Run> load = {{0, 3, 1}, {1, 0, 1}, {3, 1, 2}};  // on the host 0, 1, 3 and 4
  const auto rows = [&](std::int64_t first, std::int64_t end, std::int64_t largest) {
    return HostRows(plan, first, end, largest);
  };
  const auto sizes = [&] { return SizesOfPieces(plan, Direction::kHostToDevice, load, 2); };

  set(kBlock, 100, kLayers * kBlock, kLayers * kBlock);  // block-first
  CHECK(rows(0, 4, 1000).size() == 1 && rows(0, 4, 1000)[0].bytes == 520 && rows(0, 4, 1000)[0].IsDense());
  CHECK(rows(1, 3, 1000).size() == 1 && rows(1, 3, 1000)[0].host == host.data() + kBlock);
  CHECK(!rows(1, 3, 1000)[0].IsDense() && rows(1, 3, 1000)[0].tensors.size() == 4);
  CHECK(rows(0, 4, 300).size() == 2 && rows(0, 4, 300)[1].host == host.data() + 2 * kBlock);
  CHECK(rows(0, 1, 40).size() == 4 && rows(0, 1, 40)[2].bytes == 20 && rows(0, 1, 40)[3].bytes == 30);
  CHECK(LayersOfRows(plan, 1) == 1 && LayersOfRows(plan, 130) == 1 && LayersOfRows(plan, 131) == 2);
  CHECK(LayersOfRows(plan, 261) == 3 && LayersOfRows(plan, 1 << 20) == kLayers);
  CHECK(sizes().both.Count() == 4 * 4 && sizes().host.Count() == 4 && sizes().blocks == 16);
  CHECK(SizesOfPieces(plan, Direction::kHostToDevice, load, 4).host.Count() == 2);  // neighbours touch

  set(kBlocks * kBlock, kBlocks * 100, 100, 30);  // layer-first
  CHECK(rows(0, 2, 1000).size() == 4 && rows(0, 2, 1000)[0].IsDense());
  CHECK(LayersOfRows(plan, 1 << 20) == 1);
  CHECK(sizes().both.Count() == 4 * 3 && sizes().host.Count() == 4 * 2 && sizes().blocks == 16);

  set(kBlock, 100, kLayers * kBlock, kLayers * kBlock);  // keys of all layers, then values
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    plan.tensors[2 * layer].host = host.data() + layer * 100, plan.tensors[2 * layer].host_stride = 400;
    plan.tensors[2 * layer + 1].host = host.data() + 2000 + layer * 30, plan.tensors[2 * layer + 1].host_stride = 120;
  }
  CHECK(rows(0, 4, 1000).size() == 2 && rows(0, 4, 1000)[0].bytes == 120 && rows(0, 4, 1000)[1].bytes == 400);
  CHECK(LayersOfRows(plan, 200) == 4 && LayersOfRows(plan, 130) == 2);

  plan.layer_count = 1;
  CHECK(LayersOfRows(plan, 1 << 20) == 1);
}

const Test kTests[] = {
    {"costs_are_summed_over_the_pieces", CostsAreSummedOverThePieces},
    {"auto_takes_what_costs_least", AutoTakesWhatCostsLeast},
    {"loads_of_middling_pieces_are_not_the_copy_engines", LoadsOfMiddlingPiecesAreNotTheCopyEngines},
    {"saves_go_the_way_that_slows_the_model_less", SavesGoTheWayThatSlowsTheModelLess},
    {"pieces_are_what_is_contiguous", PiecesAreWhatIsContiguous},
    {"layers_that_lie_together_on_the_host_are_one_piece", LayersThatLieTogetherOnTheHostAreOnePiece},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
