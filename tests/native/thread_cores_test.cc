// On which cores the library's threads run: by lists that a kernel could tell, and by what this process may use.
#include "paddle_kv/transfer/thread_cores.h"

#include <string>
#include <thread>

#include "check.h"

namespace paddle_kv {
namespace {

cpu_set_t Cores(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core : cores) CPU_SET(core, &set);
  return set;
}

bool IsSame(const cpu_set_t& a, const cpu_set_t& b) { return CPU_EQUAL(&a, &b) != 0; }

void ListsOfTheKernel() {
  CHECK(IsSame(ParseCores("0-3,8,10-11\n"), Cores({0, 1, 2, 3, 8, 10, 11})));
  CHECK(IsSame(ParseCores("7"), Cores({7})) && IsSame(ParseCores("1023"), Cores({1023})));
  for (const char* nonsense :
       {"", "\n", "x", "3-", "-3", "3-1", "1,x", "1;2", "1-2x", "1024", "0-1024", "99999999999999999999"}) {
    CHECK(IsSame(ParseCores(nonsense), Cores({})));
  }
}

void NearCoresThatNoThreadIsBoundTo() {
  const cpu_set_t all = Cores({0, 1, 2, 3}), none = Cores({});
  CHECK(IsSame(ChooseCores({all, all}, none), all));
  CHECK(IsSame(ChooseCores({all, Cores({2})}, none), Cores({0, 1, 3})));
  CHECK(IsSame(ChooseCores({Cores({0, 1}), Cores({2})}, none), Cores({0, 1})));
  CHECK(IsSame(ChooseCores({all}, Cores({2, 3, 4})), Cores({2, 3})));
  CHECK(IsSame(ChooseCores({all, Cores({2})}, Cores({2, 3})), Cores({3})));
  CHECK(IsSame(ChooseCores({all, Cores({2})}, Cores({2})), Cores({0, 1, 3})));  // better far than in the model's way
  CHECK(IsSame(ChooseCores({all}, Cores({7})), all));
  CHECK(IsSame(ChooseCores({Cores({2}), Cores({2})}, none), Cores({2})));  // the process has no other
  CHECK(IsSame(ChooseCores({Cores({1}), Cores({2})}, Cores({2})), Cores({2})));
  CHECK(IsSame(ChooseCores({}, all), none));
}

// A thread that is started by one which is bound to a core does not stay on that core, where there is another.
void AThreadLeavesTheCoreOfItsStarter() {
  cpu_set_t before;
  CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
  std::thread starter([&] {
    int core = 0;
    while (!CPU_ISSET(core, &before)) ++core;
    const cpu_set_t one = Cores({core});
    CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
    std::thread own([&] {
      cpu_set_t now;
      CHECK(sched_getaffinity(0, sizeof(now), &now) == 0 && IsSame(now, one));
      RunNear({"0000:FF:1f.7"});
      CHECK(sched_getaffinity(0, sizeof(now), &now) == 0);
      cpu_set_t expected = before;
      if (CPU_COUNT(&before) > 1) CPU_CLR(core, &expected);
      CHECK(IsSame(now, expected));
      std::thread([&] { CHECK(sched_getaffinity(0, sizeof(now), &now) == 0 && IsSame(now, expected)); }).join();
    });
    own.join();
  });
  starter.join();
  cpu_set_t now;
  CHECK(sched_getaffinity(0, sizeof(now), &now) == 0 && IsSame(now, before));
}

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) {
  using namespace paddle_kv;
  const Test tests[] = {
      {"lists_of_the_kernel", ListsOfTheKernel},
      {"near_cores_that_no_thread_is_bound_to", NearCoresThatNoThreadIsBoundTo},
      {"a_thread_leaves_the_core_of_its_starter", AThreadLeavesTheCoreOfItsStarter},
  };
  return RunTests(tests, argc, argv);
}
