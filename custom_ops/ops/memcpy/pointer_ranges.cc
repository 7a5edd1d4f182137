#include "pointer_ranges.h"

#include <algorithm>
#include <limits>

#include "../common/launch.h"

namespace paddle_kv {
namespace {

std::string NameOf(const char* list, std::size_t position) {
  return std::string(list) + "[" + std::to_string(position) + "]";
}

int64_t SizeOf(const Ids& sizes, std::size_t i) { return sizes.size() == 1 ? sizes[0] : sizes[i]; }

void CheckAddress(int64_t address, int64_t bytes, const char* list, std::size_t position) {
  if (address == 0) ThrowValueError(NameOf(list, position) + " is null, its size is " + std::to_string(bytes));
  if (address < 0 || bytes > std::numeric_limits<int64_t>::max() - address) {
    ThrowValueError(NameOf(list, position) + " = " + std::to_string(address) + " and its size " +
                    std::to_string(bytes) + " do not name memory of a process");
  }
}

struct Range {
  std::uintptr_t begin;
  std::uintptr_t end;
};

// Where among the targets, from `first` on, one with this range is: for messages.
std::size_t Find(const Range& range, const Ids& targets, const Ids& sizes, std::size_t first = 0) {
  while (static_cast<std::uintptr_t>(targets[first]) != range.begin || SizeOf(sizes, first) == 0) ++first;
  return first;
}

// Lists are often in order, or of two different allocations: both are seen in one pass, without the search.
void CheckOverlap(const Ids& sources, const Ids& targets, const Ids& sizes) {
  std::vector<Range> written;
  written.reserve(targets.size());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const int64_t bytes = SizeOf(sizes, i);
    if (bytes == 0) continue;
    written.push_back({static_cast<std::uintptr_t>(targets[i]), static_cast<std::uintptr_t>(targets[i] + bytes)});
  }
  if (written.empty()) return;
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(written.begin(), written.end(), before)) std::sort(written.begin(), written.end(), before);
  for (std::size_t i = 1; i < written.size(); ++i) {
    if (written[i - 1].end > written[i].begin) {
      const std::size_t one = Find(written[i - 1], targets, sizes);
      const bool same = written[i - 1].begin == written[i].begin;
      const std::size_t other = Find(written[i], targets, sizes, same ? one + 1 : 0);
      ThrowValueError(NameOf("target_pointers", one) + " and " + NameOf("target_pointers", other) +
                      " overlap; each byte may be written only once");
    }
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const auto begin = static_cast<std::uintptr_t>(sources[i]);
    const std::uintptr_t end = begin + static_cast<std::uintptr_t>(SizeOf(sizes, i));
    if (begin == end || begin >= written.back().end || end <= written.front().begin) continue;
    // The first target that ends behind the start of the source.
    const auto found =
        std::partition_point(written.begin(), written.end(), [&](const Range& target) { return target.end <= begin; });
    if (found != written.end() && found->begin < end) {
      ThrowValueError(NameOf("source_pointers", i) + " and " + NameOf("target_pointers", Find(*found, targets, sizes)) +
                      " overlap; memory must not be read and written by one call");
    }
  }
}

}  // namespace

const PointerFacts& PointerRanges::FactsOf(std::uintptr_t address) {
  if (last_ != nullptr && address >= last_->range_begin && address < last_->range_end) return *last_;
  const auto found = ranges_.upper_bound(address);
  if (found != ranges_.end() && address >= found->second.range_begin) {
    last_ = &found->second;
    return *last_;
  }
  PointerFacts facts;
  LAUNCH_CUDA(device_, DescribePointer(address, &facts));
  last_ = &ranges_.insert_or_assign(facts.range_end, facts).first->second;
  return *last_;
}

MemoryKind PointerRanges::KindOf(int64_t address, int64_t bytes, const char* list, std::size_t position) {
  if (bytes == 0) return MemoryKind::kDevice;
  const auto first = static_cast<std::uintptr_t>(address);
  const PointerFacts facts = FactsOf(first);
  if (facts.kind == MemoryKind::kDevice && facts.device != device_) {
    ThrowValueError(NameOf(list, position) + " is on GPU " + std::to_string(facts.device) +
                    ", the copy is done by GPU " + std::to_string(device_) +
                    "; all memory must be on one GPU or on the host");
  }
  const std::uintptr_t end = first + static_cast<std::uintptr_t>(bytes);
  for (std::uintptr_t next = NextToAsk(first, end, facts); next < end;) {
    const PointerFacts& there = FactsOf(next);
    if (there.kind != facts.kind || there.device != facts.device) {
      ThrowValueError(NameOf(list, position) + ": " + std::to_string(bytes) +
                      " bytes run past the end of the memory at this address");
    }
    next = NextToAsk(next, end, there);
  }
  return facts.kind;
}

MemoryKind PointerRanges::CheckReachable(int64_t address, int64_t bytes, const char* list, std::size_t position) {
  const MemoryKind kind = KindOf(address, bytes, list, position);
  if (kind == MemoryKind::kPageable) {
    ThrowValueError(NameOf(list, position) + " = " + std::to_string(address) + " is not memory that GPU " +
                    std::to_string(device_) + " can reach (pageable host memory?); use pinned memory");
  }
  return kind;
}

int64_t DeviceOfPointers(const Ids& addresses) {
  bool any_device = false;
  LAUNCH_CUDA(0, (any_device = HasDevice(), Status{}));
  if (!any_device) return kNoDevice;
  for (const int64_t address : addresses) {
    PointerFacts facts;
    LAUNCH_CUDA(0, DescribePointer(static_cast<std::uintptr_t>(address), &facts));
    if (facts.kind == MemoryKind::kDevice) return facts.device;
  }
  return kNoDevice;
}

std::vector<CopyPair> CheckCopyPairs(const Ids& sources, const Ids& targets, const Ids& sizes) {
  CheckSameLength(sources, "source_pointers", targets, "target_pointers");
  if (sizes.size() != 1) CheckSameLength(sources, "source_pointers", sizes, "sizes");
  std::vector<CopyPair> pairs;
  pairs.reserve(sources.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const int64_t bytes = SizeOf(sizes, i);
    if (bytes < 0) ThrowValueError(NameOf("sizes", i) + " = " + std::to_string(bytes) + " must not be negative");
    if (bytes == 0) continue;
    CheckAddress(sources[i], bytes, "source_pointers", i);
    CheckAddress(targets[i], bytes, "target_pointers", i);
    pairs.push_back(
        {reinterpret_cast<const std::uint8_t*>(sources[i]), reinterpret_cast<std::uint8_t*>(targets[i]), bytes});
  }
  CheckOverlap(sources, targets, sizes);
  return pairs;
}

void CheckMapped(int64_t address, int64_t bytes, const char* list, std::size_t position, Access access,
                 MappedMemory* memory) {
  if (memory->Allows(static_cast<std::uintptr_t>(address), bytes, access)) return;
  ThrowValueError(NameOf(list, position) + " = " + std::to_string(address) + ": the " + std::to_string(bytes) +
                  " bytes there are not all memory that this process may " +
                  (access == Access::kWrite ? "write" : "read"));
}

void CheckMappedPairs(const Ids& sources, const Ids& targets, const Ids& sizes) {
  MappedMemory memory;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    CheckMapped(sources[i], SizeOf(sizes, i), "source_pointers", i, Access::kRead, &memory);
    CheckMapped(targets[i], SizeOf(sizes, i), "target_pointers", i, Access::kWrite, &memory);
  }
}

PairMemory CheckPairMemory(const Ids& sources, const Ids& targets, const Ids& sizes, int device,
                           bool pageable_allowed) {
  PointerRanges source_ranges(device);
  PointerRanges target_ranges(device);
  PairMemory memory;
  MappedMemory mapped;
  const auto look = [&](PointerRanges* ranges, int64_t address, int64_t bytes, const char* list, std::size_t i) {
    const MemoryKind kind =
        pageable_allowed ? ranges->KindOf(address, bytes, list, i) : ranges->CheckReachable(address, bytes, list, i);
    memory.host |= kind == MemoryKind::kHost;
    memory.pageable |= kind == MemoryKind::kPageable;
    if (kind != MemoryKind::kPageable) return;
    CheckMapped(address, bytes, list, i, ranges == &target_ranges ? Access::kWrite : Access::kRead, &mapped);
  };
  for (std::size_t i = 0; i < sources.size(); ++i) {
    look(&source_ranges, sources[i], SizeOf(sizes, i), "source_pointers", i);
    look(&target_ranges, targets[i], SizeOf(sizes, i), "target_pointers", i);
  }
  return memory;
}

}  // namespace paddle_kv
