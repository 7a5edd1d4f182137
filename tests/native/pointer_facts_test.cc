// What is asked about addresses, page-locked memory, and which GPU gets a context by either, on a CUDA runtime of
// threads (fake_cuda).
#include "paddle_kv/common/pointer_facts.h"

#include <sys/mman.h>

#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "paddle_kv/common/cuda_device.h"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/page_locked.h"

namespace paddle_kv {
namespace {

constexpr std::uintptr_t kPage = 4096;

cudaPointerAttributes OnDevice(int device) { return {cudaMemoryTypeDevice, device, nullptr}; }
cudaPointerAttributes OnHost(std::uintptr_t address) {
  return {cudaMemoryTypeHost, 0, reinterpret_cast<void*>(address)};
}

template <class Work>
void InAThread(Work work) {
  std::thread(work).join();
}

// The process works on GPU 1. A thread begins with device 0 and without a context.
void AQuestionMakesNoContextOnAnotherGpu() {
  CHECK(cudaSetDevice(1) == cudaSuccess);
  const std::uintptr_t of_gpu = 100 * kPage, of_host = 200 * kPage, of_nobody = 300 * kPage;
  AddMemory(of_gpu, kPage, OnDevice(1));
  AddMemory(of_host, kPage, OnHost(of_host));
  InAThread([&] {
    PointerFacts facts;
    CHECK(DescribePointer(of_gpu + 8, &facts).ok());
    CHECK(facts.kind == MemoryKind::kDevice && facts.device == 1);
    CHECK(facts.range_known && facts.range_begin == of_gpu && facts.range_end == of_gpu + kPage);
    CHECK(DescribePointer(of_host + 8, &facts).ok());
    CHECK(facts.kind == MemoryKind::kHost && facts.range_known && facts.range_end == of_host + kPage);
    CHECK(DescribePointer(of_nobody, &facts).ok());
    CHECK(facts.kind == MemoryKind::kPageable && !facts.range_known);
    int device = -1;
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 0);
  });
  CHECK(!HasContext(0) && HasContext(1) && !HasContext(2));
  // Who has a device is asked there.
  InAThread([&] {
    CHECK(cudaSetDevice(2) == cudaSuccess);
    const int before = TimesMadeCurrent(1);
    PointerFacts facts;
    CHECK(DescribePointer(of_gpu, &facts).ok() && facts.device == 1);
    CHECK(TimesMadeCurrent(1) == before);
    int device = -1;
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 2);
  });
  CHECK(!HasContext(0));
}

// Page-locked from end to end, in however many pieces.
void AHostRangeIsAskedForFromEndToEnd() {
  CHECK(cudaSetDevice(1) == cudaSuccess);
  const std::uintptr_t first = 1000 * kPage;
  AddMemory(first, 2 * kPage, OnHost(first));
  AddMemory(first + 2 * kPage, kPage, OnHost(first + 2 * kPage));
  // A page of nobody, one on the GPU, one that the GPU has elsewhere, one as it should be.
  AddMemory(first + 4 * kPage, kPage, OnHost(first + 4 * kPage));
  AddMemory(first + 5 * kPage, kPage, OnDevice(1));
  AddMemory(first + 6 * kPage, kPage, OnHost(first + 6 * kPage));
  AddMemory(first + 7 * kPage, kPage, OnHost(77 * kPage));
  AddMemory(first + 8 * kPage, kPage, OnHost(first + 8 * kPage));
  const auto reachable = [&](std::uintptr_t begin, std::int64_t bytes) {
    bool is = false;
    CHECK(HostRangeIsReachable(reinterpret_cast<const void*>(begin), bytes, 1, &is).ok());
    return is;
  };
  CHECK(reachable(first, 3 * kPage) && reachable(first + 1, 3 * kPage - 1) && reachable(first + 2 * kPage - 1, 2));
  CHECK(!reachable(first, 3 * kPage + 1) && !reachable(first - 1, 2));
  CHECK(!reachable(first, 5 * kPage));              // a hole
  CHECK(!reachable(first + 4 * kPage, 3 * kPage));  // the GPU's between two of the host's
  CHECK(!reachable(first + 6 * kPage, 3 * kPage));
  CHECK(reachable(first + 8 * kPage, kPage) && reachable(first + 9 * kPage - 1, 1));
  CHECK(reachable(first + 3 * kPage, 0) && reachable(first + 3 * kPage, -1));  // nothing of it is touched
  SetDriverTellsRanges(false);                                                 // both ends have to do
  CHECK(reachable(first, 3 * kPage) && reachable(first, 5 * kPage) && reachable(first + 7, 1));
  CHECK(!reachable(first, 3 * kPage + 1) && !reachable(first - 1, 2));
  SetDriverTellsRanges(true);
  InAThread([&] { CHECK(reachable(first, 3 * kPage)); });
  CHECK(!HasContext(0));
}

// Also beside a capture, which forbids to free memory.
void PageLockedMemoryMakesNoContextOnAnotherGpu() {
  CHECK(cudaSetDevice(1) == cudaSuccess);
  BeginFakeCapture();
  InAThread([] {
    std::vector<unsigned char> memory(500, 0xa5);
    CHECK(paddle_kv_page_lock_add(memory.data(), 500) == 0 && BytesAlive() == 500);
    CHECK(paddle_kv_page_lock_remove(memory.data()) == 0 && BytesAlive() == 0);
    CHECK(memory == std::vector<unsigned char>(500, 0xa5));
  });
  CHECK(EndFakeCapture());
  InAThread([] {
    char memory[1000];
    int code = 0;
    for (int nth = 0; code == 0; ++nth) {
      FailCall(nth, cudaErrorMemoryAllocation);
      code = paddle_kv_page_lock_add(memory, 1000);
      CHECK(CallsSinceFailCall() > nth);
      FailCall(-1, cudaSuccess);
      if (code == 0) CHECK(paddle_kv_page_lock_remove(memory) == 0);
    }
    CHECK(code == cudaErrorMemoryAllocation && BytesAlive() == 0 && cudaGetLastError() == cudaSuccess);
    CHECK(paddle_kv_page_lock_remove(memory) == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess);
  });
  CHECK(!HasContext(0) && HasContext(1));
}

// More than a thread takes for itself: in parts, the last of which is not whole, and none of which may be left out.
void EachPageIsTakenAndStaysAsItIs() {
  constexpr std::size_t kBytes = (std::size_t{5} << 20) + 3 * 4096 + 100;
  char* const memory =
      static_cast<char*>(mmap(nullptr, kBytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(memory != MAP_FAILED && madvise(memory, kBytes + 4096, MADV_NOHUGEPAGE) == 0);
  constexpr std::size_t kPages = kBytes / 4096 + 1;
  memory[7 * 4096] = 0x5a;
  CHECK(paddle_kv_page_lock_add(memory, kBytes) == 0);
  std::vector<unsigned char> present(kPages + 1);
  CHECK(mincore(memory, kBytes + 4096, present.data()) == 0);
  for (std::size_t page = 0; page < kPages; ++page) CHECK(present[page] & 1);
  CHECK(!(present[kPages] & 1) && memory[7 * 4096] == 0x5a && memory[8 * 4096] == 0);
  CHECK(paddle_kv_page_lock_remove(memory) == 0 && munmap(memory, kBytes + 4096) == 0);
}

void DevicesArePushedAndPopped() {
  CHECK(cudaSetDevice(1) == cudaSuccess);
  const int retained = TimesRetained(3);
  for (int round = 0; round < 3; ++round) {
    InAThread([] {
      int device = -1;
      const auto current = [&] { return cudaGetDevice(&device) == cudaSuccess ? device : -1; };
      {
        const DeviceGuard outer(3);
        CHECK(outer.status().ok() && current() == 3);
        {
          const DeviceGuard inner(2), none(99), negative(-1);
          CHECK(inner.status().ok() && current() == 2);
          CHECK(none.status().code == cudaErrorInvalidDevice && !negative.status().ok());
        }
        CHECK(current() == 3);
      }
      CHECK(current() == 0);
    });
  }
  CHECK(TimesRetained(3) - retained <= 1);  // the library's own is one for all
  CHECK(!HasContext(0));
}

// Behind all others: it makes one.
void WithoutAnyContextTheCurrentDeviceGetsOne() {
  InAThread([] {
    PointerFacts facts;
    CHECK(DescribePointer(5 * kPage, &facts).ok() && facts.kind == MemoryKind::kPageable);
  });
  CHECK(HasContext(0) || HasContext(1));
}

const Test kTests[] = {
    {"a_question_makes_no_context_on_another_gpu", AQuestionMakesNoContextOnAnotherGpu},
    {"a_host_range_is_asked_for_from_end_to_end", AHostRangeIsAskedForFromEndToEnd},
    {"page_locked_memory_makes_no_context_on_another_gpu", PageLockedMemoryMakesNoContextOnAnotherGpu},
    {"each_page_is_taken_and_stays_as_it_is", EachPageIsTakenAndStaysAsItIs},
    {"devices_are_pushed_and_popped", DevicesArePushedAndPopped},
    {"without_any_context_the_current_device_gets_one", WithoutAnyContextTheCurrentDeviceGetsOne},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
