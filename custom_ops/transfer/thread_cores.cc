#include "paddle_kv/transfer/thread_cores.h"

#include <dirent.h>

#include <cctype>
#include <cstdlib>
#include <fstream>

namespace paddle_kv {
namespace {

cpu_set_t NoCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return cores;
}

// Those of all threads of this process; of none that ends meanwhile.
std::vector<cpu_set_t> CoresOfThreads() {
  std::vector<cpu_set_t> found;
  DIR* const tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return found;
  while (const dirent* task = readdir(tasks)) {
    const pid_t thread = std::atoi(task->d_name);
    cpu_set_t cores;
    if (thread > 0 && sched_getaffinity(thread, sizeof(cores), &cores) == 0) found.push_back(cores);
  }
  closedir(tasks);
  return found;
}

cpu_set_t CoresNear(const std::vector<std::string>& pci_addresses) {
  cpu_set_t near = NoCores();
  for (const std::string& address : pci_addresses) {
    std::string name = address;
    for (char& letter : name) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    std::ifstream file("/sys/bus/pci/devices/" + name + "/local_cpulist");
    std::string list;
    std::getline(file, list);
    const cpu_set_t cores = ParseCores(list);
    CPU_OR(&near, &near, &cores);
  }
  return near;
}

}  // namespace

cpu_set_t ParseCores(const std::string& list) {
  cpu_set_t cores = NoCores();
  const char* at = list.c_str();
  while (*at != '\0' && *at != '\n') {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    if (end == at || first < 0) return NoCores();
    long last = first;
    if (*end == '-') {
      at = end + 1;
      last = std::strtol(at, &end, 10);
      if (end == at || last < first) return NoCores();
    }
    if (last >= CPU_SETSIZE) return NoCores();
    for (long core = first; core <= last; ++core) CPU_SET(core, &cores);
    at = *end == ',' ? end + 1 : end;
    if (at == end && *at != '\0' && *at != '\n') return NoCores();
  }
  return cores;
}

cpu_set_t ChooseCores(const std::vector<cpu_set_t>& threads, const cpu_set_t& near) {
  cpu_set_t usable = NoCores(), bound = NoCores();
  for (const cpu_set_t& cores : threads) {
    CPU_OR(&usable, &usable, &cores);
    if (CPU_COUNT(&cores) == 1) CPU_OR(&bound, &bound, &cores);
  }
  cpu_set_t chosen;
  CPU_XOR(&chosen, &usable, &bound);  // a bound core is usable
  if (CPU_COUNT(&chosen) == 0) chosen = usable;
  cpu_set_t both;
  CPU_AND(&both, &chosen, &near);
  return CPU_COUNT(&both) == 0 ? chosen : both;
}

void RunNear(const std::vector<std::string>& pci_addresses) {
  const cpu_set_t chosen = ChooseCores(CoresOfThreads(), CoresNear(pci_addresses));
  if (CPU_COUNT(&chosen) != 0) sched_setaffinity(0, sizeof(chosen), &chosen);
}

}  // namespace paddle_kv
