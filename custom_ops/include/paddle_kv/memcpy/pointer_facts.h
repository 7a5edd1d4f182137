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
};

// The CUDA toolkit that the operators were built with: 13000 for 13.0.
int BuiltCudaVersion();

// Whether the machine has a GPU that can be used. Never fails: without a driver there is none.
bool HasDevice();

// An address that CUDA does not know is pageable.
Status DescribePointer(std::uintptr_t address, PointerFacts* facts);

}  // namespace paddle_kv
