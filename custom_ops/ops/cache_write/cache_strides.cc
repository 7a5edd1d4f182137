#include "cache_strides.h"

#include <algorithm>
#include <map>

#include "../common/errors.h"
#include "../common/launch.h"
#include "../common/validate.h"

namespace paddle_kv {
namespace {

// A memory as runs of bytes that repeat at strides: stride -> count.
struct Runs {
  std::map<int64_t, int64_t> counts;
  int64_t run_bytes;
};

Runs RunsOf(const StridedMemory& memory) {
  std::map<int64_t, int64_t> counts;
  for (std::size_t d = 0; d < memory.shape.size(); ++d) {
    if (memory.shape[d] > 1) counts[memory.strides[d]] = memory.shape[d];
  }
  int64_t run_bytes = memory.item_bytes;
  while (!counts.empty() && counts.begin()->first == run_bytes) {
    run_bytes *= counts.begin()->second;
    counts.erase(counts.begin());
  }
  return {std::move(counts), run_bytes};
}

int64_t SpanOf(const StridedMemory& memory) {
  int64_t span = memory.item_bytes;
  for (std::size_t d = 0; d < memory.shape.size(); ++d) span += (memory.shape[d] - 1) * memory.strides[d];
  return span;
}

struct Level {
  int64_t stride;
  int64_t counts[2];
};

// Whether runs meet that repeat at `levels`, from the largest stride on; the second memory begins `distance` behind the
// first one. What lies below a level is shorter than its stride, so only two differences of places in it can matter.
bool RunsMeet(const std::vector<Level>& levels, std::size_t level, const int64_t (&run_bytes)[2], int64_t distance) {
  if (level == levels.size()) return distance < run_bytes[0] && -distance < run_bytes[1];
  const auto [stride, counts] = levels[level];
  int64_t steps = distance / stride;
  if (steps * stride > distance) --steps;
  for (const int64_t difference : {steps, steps + 1}) {
    if (difference < counts[0] && -difference < counts[1] &&
        RunsMeet(levels, level + 1, run_bytes, distance - difference * stride)) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::vector<int64_t> ContiguousStrides(const std::vector<int64_t>& shape, int64_t item_bytes) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = item_bytes;
  for (std::size_t d = shape.size(); d-- > 0; stride *= shape[d]) strides[d] = stride;
  return strides;
}

StridedMemory MemoryOf(const paddle::Tensor& tensor) {
  StridedMemory memory{BytesOf(tensor), tensor.shape(), {}, static_cast<int64_t>(phi::SizeOf(tensor.dtype()))};
  memory.strides = ContiguousStrides(memory.shape, memory.item_bytes);
  const auto& strides = tensor.strides();
  if (tensor.numel() == 0 || strides.size() != static_cast<int>(memory.shape.size())) return memory;
  for (std::size_t d = 0; d < memory.shape.size(); ++d) {
    if (memory.shape[d] > 1) memory.strides[d] = strides[static_cast<int>(d)] * memory.item_bytes;
  }
  return memory;
}

void CheckContiguous(const paddle::Tensor& tensor, const std::string& name) {
  const auto& dims = tensor.dims();
  const auto& strides = tensor.strides();
  if (strides.size() != dims.size()) return;
  int64_t stride = 1;
  for (int d = dims.size(); d-- > 0; stride *= dims[d]) {
    if (dims[d] == 0) return;
    if (dims[d] > 1 && strides[d] != stride) {
      ThrowValueError(name + " is not contiguous (shape " + ShapeText(tensor.shape()) +
                      "); a contiguous tensor is expected");
    }
  }
}

void CheckBlockStrides(StridedMemory* memory, const std::string& name, std::size_t dense_dimensions) {
  const std::vector<int64_t> contiguous = ContiguousStrides(memory->shape, memory->item_bytes);
  if (memory->strides == contiguous) return;
  const auto refuse = [&](const std::string& expected) {
    std::vector<int64_t> elements = memory->strides;
    for (int64_t& stride : elements) stride /= memory->item_bytes;
    ThrowValueError(name + " has shape " + ShapeText(memory->shape) + " and strides " + ShapeText(elements) + "; " +
                    expected);
  };
  const std::size_t rank = memory->shape.size();
  for (std::size_t d = rank - dense_dimensions; d < rank; ++d) {
    if (memory->strides[d] != contiguous[d]) {
      refuse(dense_dimensions == 1 ? "its last dimension must be contiguous" : "each block must be contiguous");
    }
  }
  std::vector<std::pair<int64_t, int64_t>> by_stride;  // stride, size
  for (std::size_t d = 1; d < rank; ++d) {
    if (memory->shape[d] > 1) by_stride.emplace_back(memory->strides[d], memory->shape[d]);
  }
  std::sort(by_stride.begin(), by_stride.end());
  int64_t extent = memory->item_bytes;
  for (const auto& [stride, size] : by_stride) {
    if (stride < extent) refuse("no two of its elements may lie in one place");
    extent += (size - 1) * stride;
  }
  if (memory->shape[0] == 1) memory->strides[0] = extent;
  if (memory->strides[0] < extent) refuse("its blocks must lie one behind the other");
}

bool Overlap(const StridedMemory& first, const StridedMemory& second) {
  for (const StridedMemory* memory : {&first, &second}) {
    if (std::count(memory->shape.begin(), memory->shape.end(), 0) > 0) return false;
  }
  const auto distance = static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(second.data) -
                                             reinterpret_cast<std::uintptr_t>(first.data));
  if (distance >= SpanOf(first) || -distance >= SpanOf(second)) return false;
  const Runs runs[2] = {RunsOf(first), RunsOf(second)};
  const int64_t run_bytes[2] = {runs[0].run_bytes, runs[1].run_bytes};
  std::map<int64_t, Level> by_stride;
  for (int i = 0; i < 2; ++i) {
    for (const auto& [stride, count] : runs[i].counts) {
      by_stride.emplace(stride, Level{stride, {1, 1}}).first->second.counts[i] = count;
    }
  }
  std::vector<Level> levels;
  int64_t extents[2] = {run_bytes[0], run_bytes[1]};
  for (const auto& [stride, level] : by_stride) {
    for (int i = 0; i < 2; ++i) {
      if (extents[i] > stride) return true;  // they do not repeat alike
      extents[i] += (level.counts[i] - 1) * stride;
    }
    levels.insert(levels.begin(), level);
  }
  return RunsMeet(levels, 0, run_bytes, distance);
}

void CheckTensorsApart(const std::vector<StridedMemory>& memories, const std::string& names) {
  for (std::size_t i = 0; i < memories.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) {
      if (Overlap(memories[i], memories[k])) {
        ThrowValueError(names + ": two of the memories to be written overlap; each must be named once");
      }
    }
  }
}

}  // namespace paddle_kv
