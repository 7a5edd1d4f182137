#include "strided_input.h"

#include "../common/errors.h"
#include "../common/validate.h"
#include "cache_layout.h"

namespace paddle_kv {
namespace {

std::string DeviceText(int device) {
  if (device == kCpu) return "the CPU";
  return device == kPinned ? "pinned memory" : "GPU " + std::to_string(device);
}

StridedInput FromNumbers(const std::vector<int64_t>& numbers) {
  constexpr std::size_t kHead = 3;
  StridedInput input;
  if (numbers.size() < kHead || (numbers.size() - kHead) % 2 != 0) ThrowValueError("a strided input has wrong numbers");
  input.data = reinterpret_cast<const std::uint8_t*>(numbers[0]);
  input.dtype = static_cast<paddle::DataType>(numbers[1]);
  input.device = static_cast<int>(numbers[2]);
  const auto strides = numbers.begin() + kHead + (numbers.size() - kHead) / 2;
  input.shape.assign(numbers.begin() + kHead, strides);
  input.strides.assign(strides, numbers.end());
  for (int64_t& stride : input.strides) stride *= input.ItemBytes();
  return input;
}

StridedInput FromTensor(const paddle::Tensor& tensor) {
  const StridedMemory memory = MemoryOf(tensor);
  return {memory.data, tensor.dtype(), DeviceOf(tensor), memory.shape, memory.strides};
}

}  // namespace

StridedInput StridedFrom(const paddle::optional<paddle::Tensor>& tensor, const std::vector<int64_t>& numbers) {
  return tensor ? FromTensor(*tensor) : FromNumbers(numbers);
}

void CheckBeside(const StridedInput& input, const std::string& name, const paddle::Tensor& cache,
                 const std::string& cache_name) {
  const int expected = DeviceOf(cache);
  if (input.device != expected) {
    ThrowValueError(name + " is on " + DeviceText(input.device) + ", " + cache_name + " on " + DeviceText(expected) +
                    "; both must be on one device");
  }
  CheckAligned(input.data, input.ItemBytes(), name);
}

void CheckRank(const StridedInput& input, const std::string& name, int64_t rank, const std::string& expected) {
  if (input.Rank() != rank) {
    ThrowValueError(name + " has shape " + ShapeText(input.shape) + "; " + expected + " is expected");
  }
}

}  // namespace paddle_kv
