// Checks addresses that come without a tensor. A list names few allocations, so what CUDA says of one is kept and asked
// once, not for each of thousands of addresses.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../common/validate.h"
#include "paddle_kv/common/mapped_memory.h"
#include "paddle_kv/common/pointer_facts.h"
#include "paddle_kv/memcpy/copy_pair.h"

namespace paddle_kv {

constexpr int64_t kNoDevice = -1;  // all memory is host memory, and the CPU copies it

class PointerRanges {
 public:
  explicit PointerRanges(int device) : device_(device) {}

  // What kind of memory [address, address + bytes) is, by all allocations that it touches (pageable memory: by
  // its first and last byte). ValueError naming list[position] if it is on another GPU or runs past its end. Zero bytes
  // are never looked at.
  MemoryKind KindOf(int64_t address, int64_t bytes, const char* list, std::size_t position);

  // The same, ValueError for pageable memory too.
  MemoryKind CheckReachable(int64_t address, int64_t bytes, const char* list, std::size_t position);

 private:
  const PointerFacts& FactsOf(std::uintptr_t address);

  int device_;
  std::map<std::uintptr_t, PointerFacts> ranges_;  // by the address behind the range
  const PointerFacts* last_ = nullptr;
};

// The GPU of the first device address in the list, or kNoDevice.
int64_t DeviceOfPointers(const Ids& addresses);

// The pairs of a call, without those of zero bytes. One size may stand for all. ValueError for lists that differ in
// length, a negative size, a null address, or targets that overlap each other or a source.
std::vector<CopyPair> CheckCopyPairs(const Ids& sources, const Ids& targets, const Ids& sizes);

// ValueError unless this process may read or write all of it.
void CheckMapped(int64_t address, int64_t bytes, const char* list, std::size_t position, Access access,
                 MappedMemory* memory);

// The same for all sources and targets of a call that the CPU copies.
void CheckMappedPairs(const Ids& sources, const Ids& targets, const Ids& sizes);

// What kinds of memory the pairs of a call name, beside the device's own.
struct PairMemory {
  bool host = false;
  bool pageable = false;
};

// ValueError unless each pair is on this device or on the host; `pageable_allowed`: or in pageable memory of this
// process.
PairMemory CheckPairMemory(const Ids& sources, const Ids& targets, const Ids& sizes, int device, bool pageable_allowed);

}  // namespace paddle_kv
