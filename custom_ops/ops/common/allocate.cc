#include "allocate.h"

#include <malloc.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "device_of.h"
#include "paddle/phi/api/include/api.h"
#include "validate.h"

namespace paddle_kv {

namespace {

constexpr std::uintptr_t kPageBytes = 4096;

// Paddle's allocator asks for aligned memory, and glibc takes large pieces of that from the kernel anew each time: the
// size up to which it keeps memory for the next request is what it has learnt from the releases of large pieces, and
// the padding that aligned ones are asked for with always makes them a little larger than that. One release of a piece
// with more than the padding teaches it, provided that it did not come from memory that was kept already: a hole in the
// heap that is filled before the next result teaches nothing. Without this, memory for each result costs more than what
// is written into it.
void LetMemoryBeKept(std::size_t bytes) {
  constexpr std::size_t kLeastBytes = std::size_t{128} << 10;  // smaller pieces are always kept
  constexpr std::size_t kMostBytes = std::size_t{32} << 20;    // larger ones never
  constexpr std::size_t kPaddingBytes = std::size_t{16} << 10;
  static std::atomic<std::size_t> learnt{kLeastBytes};
  if (bytes <= learnt.load(std::memory_order_relaxed) || bytes + kPaddingBytes > kMostBytes) return;
  void* volatile piece = std::malloc(bytes + kPaddingBytes);  // volatile: the compiler must not leave out the pair
  // A piece that was taken from the kernel is made of whole pages, of which glibc keeps two words to itself.
  if ((malloc_usable_size(piece) + 2 * sizeof(std::size_t)) % kPageBytes == 0) {
    learnt.store(bytes, std::memory_order_relaxed);
  }
  std::free(piece);
}

// Fresh memory costs a page fault for each 4 KiB, more than it costs to fill it; with large pages, as NumPy asks for
// them too, hardly any. Only advice: what comes of it does not matter.
void AskForLargePages(void* memory, std::size_t bytes) {
  constexpr std::size_t kWorthwhileBytes = std::size_t{4} << 20;
  if (bytes < kWorthwhileBytes) return;
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(memory) + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / kPageBytes * kPageBytes;
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace

paddle::Tensor NewTensor(const std::vector<int64_t>& shape, paddle::DataType dtype, const paddle::Tensor& like) {
  auto bytes = static_cast<int64_t>(phi::SizeOf(dtype));
  for (const int64_t size : shape) bytes = CheckedProduct(bytes, size, "the result");  // Paddle's own product overflows
  if (DeviceOf(like) == kCpu) LetMemoryBeKept(static_cast<std::size_t>(bytes));
  paddle::Tensor tensor = paddle::experimental::empty(shape, dtype, like.place());
  if (DeviceOf(tensor) == kCpu) AskForLargePages(tensor.data(), tensor.numel() * phi::SizeOf(dtype));
  return tensor;
}

}  // namespace paddle_kv
