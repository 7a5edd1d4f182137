// What the process may read and write, with a kernel that answers for one mapping, and with one that only lists them.
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "check.h"

namespace {

bool kernel_answers = true;
int questions = 0;

int AskKernel(int descriptor, unsigned long request, void* query) {
  ++questions;
  if (kernel_answers) return ioctl(descriptor, request, query);
  errno = ENOTTY;
  return -1;
}

}  // namespace

#define ioctl AskKernel
#include "../../custom_ops/kernels/common/mapped_memory.cc"
#undef ioctl

namespace paddle_kv {
namespace {

const std::uintptr_t kPage = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));

void CheckPages() {
  void* const mapped = mmap(nullptr, 6 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(mapped != MAP_FAILED);
  auto* const pages = static_cast<std::uint8_t*>(mapped);
  const auto address = reinterpret_cast<std::uintptr_t>(mapped);
  CHECK(mprotect(pages + kPage, kPage, PROT_READ) == 0);
  CHECK(mprotect(pages + 3 * kPage, kPage, PROT_NONE) == 0);
  CHECK(munmap(pages + 5 * kPage, kPage) == 0);
  const auto bytes = static_cast<std::int64_t>(kPage);
  for (int round = 0; round < 2; ++round) {
    MappedMemory memory;
    CHECK(memory.Allows(address, bytes, Access::kWrite) && memory.Allows(address + 7, bytes - 7, Access::kWrite));
    CHECK(memory.Allows(address, 3 * bytes, Access::kRead) && !memory.Allows(address, bytes + 1, Access::kWrite));
    CHECK(!memory.Allows(address + kPage, 1, Access::kWrite) && memory.Allows(address + 2 * kPage, 5, Access::kWrite));
    CHECK(!memory.Allows(address, 3 * bytes + 1, Access::kRead) &&
          !memory.Allows(address + 3 * kPage, 1, Access::kRead));
    CHECK(memory.Allows(address + 4 * kPage, bytes, Access::kRead));
    CHECK(!memory.Allows(address + 4 * kPage, bytes + 1, Access::kRead));
    CHECK(!memory.Allows(0x1000, 1, Access::kRead) && !memory.Allows(0, 1, Access::kRead));
    CHECK(!memory.Allows(UINTPTR_MAX - 3, 8, Access::kRead) && memory.Allows(0x1000, 0, Access::kWrite));
  }
  CHECK(mprotect(pages + 4 * kPage, kPage, PROT_READ) == 0);  // another call sees what has changed
  CHECK(!MappedMemory().Allows(address + 4 * kPage, 1, Access::kWrite));
  CHECK(munmap(pages, 5 * kPage) == 0);
  CHECK(!MappedMemory().Allows(address, 1, Access::kRead));
}

void WhereTheKernelAnswers() {
  kernel_answers = true;
  CheckPages();
}

void WhereTheKernelOnlyLists() {
  kernel_answers = false;
  CheckPages();
}

void AMappingIsAskedForOnce() {
  kernel_answers = true;
  static std::uint8_t here[100];
  MappedMemory memory;
  questions = 0;
  for (int i = 0; i < 100; ++i) {
    CHECK(memory.Allows(reinterpret_cast<std::uintptr_t>(here) + i, 1, Access::kWrite));
    CHECK(memory.Allows(reinterpret_cast<std::uintptr_t>(&kPage), 1, Access::kRead));
  }
  CHECK(questions <= 2);
}

void AForkedChildAsksForItself() {
  kernel_answers = true;
  const auto where = [] { return mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); };
  CHECK(MappedMemory().Allows(reinterpret_cast<std::uintptr_t>(&kernel_answers), 1, Access::kWrite));
  const pid_t child = fork();
  if (child == 0) {
    void* const own = where();
    const bool sees = MappedMemory().Allows(reinterpret_cast<std::uintptr_t>(own), 1, Access::kWrite);
    munmap(own, kPage);
    const bool is_gone = !MappedMemory().Allows(reinterpret_cast<std::uintptr_t>(own), 1, Access::kWrite);
    _exit(sees && is_gone ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

const Test kTests[] = {
    {"where_the_kernel_answers", WhereTheKernelAnswers},
    {"where_the_kernel_only_lists", WhereTheKernelOnlyLists},
    {"a_mapping_is_asked_for_once", AMappingIsAskedForOnce},
    {"a_forked_child_asks_for_itself", AForkedChildAsksForItself},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
