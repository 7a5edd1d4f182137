#include "allocate.h"

#include <sys/mman.h>

#include "paddle/phi/api/include/api.h"

namespace paddle_kv {

namespace {

// Fresh memory costs a page fault for each 4 KiB, more than it costs to fill it; with large pages, as NumPy asks for
// them too, hardly any. Only advice: what comes of it does not matter.
void AskForLargePages(void* memory, std::size_t bytes) {
  constexpr std::uintptr_t kPage = 4096;
  constexpr std::size_t kWorthwhileBytes = std::size_t{4} << 20;
  if (bytes < kWorthwhileBytes) return;
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace

paddle::Tensor NewTensor(const std::vector<int64_t>& shape, paddle::DataType dtype, const paddle::Tensor& like) {
  paddle::Tensor tensor = paddle::experimental::empty(shape, dtype, like.place());
  if (tensor.is_cpu()) AskForLargePages(tensor.data(), tensor.numel() * phi::SizeOf(dtype));
  return tensor;
}

}  // namespace paddle_kv
