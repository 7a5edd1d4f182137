// What CUDA knows about an address.
#pragma once

#include <cstdint>

#include "paddle_kv/common/status.h"

namespace paddle_kv {

enum class MemoryKind {
  kPageable,  // host memory that no GPU can reach, as far as CUDA knows
  kHost,      // page-locked or registered host memory
  kDevice,    // memory of one GPU, or managed memory
};

struct PointerFacts {
  MemoryKind kind = MemoryKind::kPageable;
  int device = -1;                 // of device memory
  std::uintptr_t range_begin = 0;  // the allocation around the address: the facts hold for all of it
  std::uintptr_t range_end = 0;
  bool range_known = false;  // else it is this one byte
};

// The CUDA toolkit that the operators were built with: 13000 for 13.0.
int BuiltCudaVersion();

// Whether the machine has a GPU that can be used. Never fails: without a driver there is none.
bool HasDevice();

// An address that CUDA does not know is pageable.
Status DescribePointer(std::uintptr_t address, PointerFacts* facts);

// The next address before `end` about which nothing is known yet, else `end`. Where the driver does not tell the size
// of an allocation, the last byte has to speak for all that is in between.
inline std::uintptr_t NextToAsk(std::uintptr_t address, std::uintptr_t end, const PointerFacts& facts) {
  if (facts.range_known) return facts.range_end < end ? facts.range_end : end;
  return address < end - 1 ? end - 1 : end;
}

}  // namespace paddle_kv
