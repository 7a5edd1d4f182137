// Checks addresses that come without a tensor. A list names few allocations, so what CUDA says of one is kept and asked
// once, not for each of thousands of addresses.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../common/validate.h"
#include "paddle_kv/memcpy/copy_pair.h"
#include "paddle_kv/memcpy/pointer_facts.h"

namespace paddle_kv {

constexpr int64_t kNoDevice = -1;  // all memory is host memory, and the CPU copies it

class PointerRanges {
 public:
  explicit PointerRanges(int device) : device_(device) {}

  // Whether [address, address + bytes) is host memory or memory of the device, judged by its first and last byte.
  // ValueError naming list[position] if the device cannot reach it. Zero bytes are never looked at.
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
std::vector<CopyPair> CheckPairs(const Ids& sources, const Ids& targets, const Ids& sizes);

// ValueError unless the device reaches both sides of each pair. Returns whether one side is host memory.
bool CheckPairsReachable(const Ids& sources, const Ids& targets, const Ids& sizes, int device);

}  // namespace paddle_kv
