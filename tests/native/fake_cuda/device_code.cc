#include "device_code.h"

#include <ucontext.h>

#include <memory>
#include <string>

#include "check.h"

thread_local dim3 blockIdx(0), threadIdx(0), blockDim(0);

namespace paddle_kv {
namespace {

constexpr unsigned kLanes = 32;
constexpr std::size_t kStackBytes = 64 << 10;

struct Lane {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  dim3 place = dim3(0);
  bool ended = false;
  bool waited = false;
};

struct Warp {
  ucontext_t scheduler;
  std::vector<Lane> lanes = std::vector<Lane>(kLanes);
  unsigned count = 0;
  unsigned running = 0;
  int given[kLanes] = {};
  int together[kLanes] = {};  // what all lanes gave when they met last
  const std::function<void()>* thread = nullptr;
};

std::vector<Range> readable, writable;
Warp* warp = nullptr;
bool is_dependent = false;

void RunLane() {
  (*warp->thread)();
  warp->lanes[warp->running].ended = true;
  swapcontext(&warp->lanes[warp->running].context, &warp->scheduler);
}

// Waits for all lanes of the warp.
const int* Meet(int value) {
  warp->given[warp->running] = value;
  swapcontext(&warp->lanes[warp->running].context, &warp->scheduler);
  return warp->together;
}

void RunWarp() {
  for (unsigned ended = 0; ended < warp->count;) {
    std::copy(std::begin(warp->given), std::end(warp->given), warp->together);
    const unsigned ended_before = ended;
    for (unsigned i = 0; i < warp->count; ++i) {
      warp->running = warp->count - 1 - i;
      Lane& lane = warp->lanes[warp->running];
      threadIdx = lane.place;
      swapcontext(&warp->scheduler, &lane.context);
      ended += lane.ended;
    }
    CHECK(ended == ended_before || ended == warp->count);  // no lane waits for one that has ended
  }
}

}  // namespace

void AllowMemory(std::vector<Range> to_read, std::vector<Range> to_write) {
  readable = std::move(to_read);
  writable = std::move(to_write);
}

void CheckWord(const std::uint8_t* address, bool written) {
  CHECK(reinterpret_cast<std::uintptr_t>(address) % 16 == 0);
  CHECK(!is_dependent || warp->lanes[warp->running].waited);
  const std::vector<Range>& allowed = written ? writable : readable;
  CHECK(std::any_of(allowed.begin(), allowed.end(), [&](const Range& range) {
    return address >= range.first && address + 16 <= range.first + range.bytes;
  }));
}

void KernelBeforeIsAwaited() { warp->lanes[warp->running].waited = true; }

void RunGrid(dim3 grid, dim3 block, bool dependent, const std::function<void()>& thread) {
  CHECK(grid.x > 0 && grid.y == 1 && grid.z == 1);
  CHECK(block.x > 0 && block.y > 0 && block.z > 0 && block.x * block.y * block.z <= 1024 && block.z <= 64);
  static Warp& own = *new Warp;
  warp = &own;
  warp->thread = &thread;
  is_dependent = dependent;
  blockDim = block;
  const unsigned threads = block.x * block.y * block.z;
  for (unsigned cta = grid.x; cta-- > 0;) {
    for (unsigned first = 0; first < threads; first += kLanes) {
      blockIdx = dim3(cta, 0, 0);
      warp->count = std::min(kLanes, threads - first);
      for (unsigned i = 0; i < warp->count; ++i) {
        Lane& lane = warp->lanes[i];
        const unsigned number = first + i;
        lane.place = dim3(number % block.x, number / block.x % block.y, number / block.x / block.y);
        lane.ended = lane.waited = false;
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.data();
        lane.context.uc_stack.ss_size = lane.stack.size();
        makecontext(&lane.context, RunLane, 0);
      }
      RunWarp();
    }
  }
}

}  // namespace paddle_kv

unsigned __ballot_sync(unsigned mask, bool predicate) {
  CHECK(mask == 0xffffffffu && paddle_kv::warp->count == paddle_kv::kLanes);
  const int* const values = paddle_kv::Meet(predicate);
  unsigned bits = 0;
  for (unsigned i = 0; i < paddle_kv::kLanes; ++i) bits |= static_cast<unsigned>(values[i]) << i;
  return bits;
}

int __shfl_sync(unsigned mask, int value, unsigned lane) {
  CHECK(mask == 0xffffffffu && paddle_kv::warp->count == paddle_kv::kLanes);
  return paddle_kv::Meet(value)[lane % paddle_kv::kLanes];
}
