// Makes memory of the host that is mapped already page-locked: reachable by every GPU of the process. Any thread may
// ask for it and give it back: no GPU gets a context by that as long as another one has one, and a graph that is being
// captured stays intact. Plain C, for ctypes.
#pragma once

#include <cstdint>

extern "C" {

// Writable memory from the beginning of a page on, whose bytes stay as they are; `remove` before it is unmapped. 0, or
// CUDA's error code. Adding takes the pages from the system by as many threads as the process may run at once.
int paddle_kv_page_lock_add(void* address, std::int64_t bytes);
int paddle_kv_page_lock_remove(void* address);
}
