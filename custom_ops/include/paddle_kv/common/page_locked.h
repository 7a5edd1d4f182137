// Page-locked memory of an exact size, reachable by every GPU of the process: new memory, or memory that is mapped
// already. Any thread may ask for it and give it back: no GPU gets a context by that as long as another one has one,
// and a graph that is being captured stays intact. Plain C, for ctypes.
#pragma once

#include <cstdint>

extern "C" {

// 0, or CUDA's error code. Of no bytes: a null address.
int paddle_kv_page_locked_allocate(std::int64_t bytes, void** address);
int paddle_kv_page_locked_free(void* address);

// Whole pages of mapped memory; `remove` before they are unmapped.
int paddle_kv_page_lock_add(void* address, std::int64_t bytes);
int paddle_kv_page_lock_remove(void* address);
}
