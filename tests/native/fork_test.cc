// A process that forks while other threads are in the library: the child finds no lock of theirs.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "paddle_kv/common/mapped_memory.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {
namespace {

constexpr int kForks = 400;
constexpr unsigned kLongSeconds = 20;

// Calls `inside` in threads of this process and in each of its children.
template <class Inside>
void Forks(Inside inside) {
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!over) inside();
    });
  }
  for (int i = 0; i < kForks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(kLongSeconds);
      inside();
      _exit(0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
}

void PlansAreFree() {
  AddTransferPlan(1, std::make_shared<const TransferPlan>());
  Forks([] { CHECK(FindTransferPlan(1) != nullptr && FindTransferPlan(2) == nullptr); });
  RemoveTransferPlan(1);
}

void MappingsAreFree() {
  static const int word = 7;
  const auto address = reinterpret_cast<std::uintptr_t>(&word);
  Forks([address] { CHECK(MappedMemory().Allows(address, sizeof(word), Access::kRead)); });
}

}  // namespace

const Test kTests[] = {
    {"plans_are_free", PlansAreFree},
    {"mappings_are_free", MappingsAreFree},
};

}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
