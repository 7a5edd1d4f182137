// On which cores the library's own threads run.
#pragma once

#include <sched.h>

#include <string>
#include <vector>

namespace paddle_kv {

// A list of the kernel's: "0-3,8,10-11". What is no list has no cores.
cpu_set_t ParseCores(const std::string& list);

// Of the cores that any of the threads may use, those to which no thread is bound alone, and of these the near ones;
// each only as long as some are left. A server that binds the thread of its model to a core would bind whatever that
// thread starts to the same core.
cpu_set_t ChooseCores(const std::vector<cpu_set_t>& threads, const cpu_set_t& near);

// Moves the calling thread to cores of this process near the devices with these PCI addresses ("0000:1B:00.0"), and
// with it those that it starts from then on. Where the system tells nothing, the thread stays where it is.
void RunNear(const std::vector<std::string>& pci_addresses);

}  // namespace paddle_kv
