// Whether an address that a caller passed as a number is memory of this process at all.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace paddle_kv {

// Whether [first, first + bytes) begins and ends in mapped memory; looks at the pages of its first and last byte.
inline bool HostRangeIsMapped(const void* first, std::int64_t bytes) {
  if (bytes <= 0) return true;
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<std::uintptr_t>(first);
  const std::uintptr_t last = start + static_cast<std::uintptr_t>(bytes) - 1;
  for (const std::uintptr_t byte : {start, last}) {
    unsigned char resident = 0;
    if (mincore(reinterpret_cast<void*>(byte / page_bytes * page_bytes), 1, &resident) != 0 && errno == ENOMEM) {
      return false;
    }
  }
  return true;
}

}  // namespace paddle_kv
