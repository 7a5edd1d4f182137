// The three kernels without which Paddle cannot do with a device of a plugin: it calls them below the level at which it
// falls back to the CPU. `full` fills gradients and optimizer states (the CPU's kernel would write to device memory and
// end the process); `contiguous` and `strided_copy` read and write tensors with strides. All of them work on a copy in
// host memory: they are there to be right, not quick.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_registry.h"

namespace cuda_like {

using phi::CustomContext;
using phi::DenseTensor;

void Copy(const CustomContext& context, void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  const auto stream = reinterpret_cast<cudaStream_t>(context.stream());
  cudaError_t error = cudaSetDevice(context.GetPlace().GetDeviceId());
  if (error == cudaSuccess && bytes > 0) error = cudaMemcpyAsync(target, source, bytes, kind, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  PADDLE_ENFORCE_EQ(error, cudaSuccess, ::common::errors::External("cudaMemcpyAsync: %s", cudaGetErrorString(error)));
}

// How far a tensor of these sizes and strides (not negative) reaches, in elements.
int64_t Extent(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return last + 1;
}

// visit(position in row-major order, position in memory) for each element.
template <class Visit>
void ForEach(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Visit visit) {
  if (Extent(sizes, strides) == 0) return;
  std::vector<int64_t> index(sizes.size(), 0);
  int64_t place = 0;
  for (int64_t position = 0;; ++position) {
    visit(position, place);
    size_t d = sizes.size();
    for (; d > 0; --d) {
      place += strides[d - 1];
      if (++index[d - 1] < sizes[d - 1]) break;
      place -= sizes[d - 1] * strides[d - 1];
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

template <typename T, typename Context>
void FullKernel(const Context& context, const phi::IntArray& shape, const phi::Scalar& value, phi::DataType,
                DenseTensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  T* data = context.template Alloc<T>(out);
  const auto count = static_cast<size_t>(out->numel());
  auto values = std::make_unique<T[]>(count);  // not a vector: that of bool has no elements
  std::fill_n(values.get(), count, value.to<T>());
  Copy(context, data, values.get(), count * sizeof(T), cudaMemcpyHostToDevice);
}

template <typename T, typename Context>
void ContiguousKernel(const Context& context, const DenseTensor& input, DenseTensor* out) {
  const std::vector<int64_t> sizes = common::vectorize(input.dims()), strides = common::vectorize(input.strides());
  phi::DenseTensorMeta meta = input.meta();
  meta.strides = meta.calc_strides(input.dims());
  meta.offset = 0;
  out->set_meta(meta);
  const auto extent = static_cast<size_t>(Extent(sizes, strides));
  auto from = std::make_unique<T[]>(extent);
  auto to = std::make_unique<T[]>(static_cast<size_t>(input.numel()));
  const T* source = input.data<T>();
  Copy(context, from.get(), source, extent * sizeof(T), cudaMemcpyDeviceToHost);
  ForEach(sizes, strides, [&](int64_t position, int64_t place) { to[position] = from[place]; });
  T* target = context.template Alloc<T>(out);
  Copy(context, target, to.get(), static_cast<size_t>(input.numel()) * sizeof(T), cudaMemcpyHostToDevice);
}

template <typename T, typename Context>
void StridedCopyKernel(const Context& context, const DenseTensor& input, const std::vector<int64_t>& sizes,
                       const std::vector<int64_t>& strides, int64_t offset, DenseTensor* out) {
  DenseTensor dense;
  ContiguousKernel<T, Context>(context, input, &dense);
  phi::DenseTensorMeta meta = input.meta();
  meta.strides = common::make_ddim(strides);
  meta.dims = common::make_ddim(sizes);
  meta.offset = static_cast<size_t>(offset);
  out->set_meta(meta);
  const auto count = static_cast<size_t>(dense.numel()), extent = static_cast<size_t>(Extent(sizes, strides));
  auto from = std::make_unique<T[]>(count), to = std::make_unique<T[]>(extent);
  T* target = out->data<T>();
  Copy(context, from.get(), dense.data<T>(), count * sizeof(T), cudaMemcpyDeviceToHost);
  Copy(context, to.get(), target, extent * sizeof(T), cudaMemcpyDeviceToHost);
  ForEach(sizes, strides, [&](int64_t position, int64_t place) { to[place] = from[position]; });
  Copy(context, target, to.get(), extent * sizeof(T), cudaMemcpyHostToDevice);
}

}  // namespace cuda_like

#define ALL_TYPES                                                                                                   \
  bool, uint8_t, int8_t, int16_t, int32_t, int64_t, float, double, phi::float16, phi::bfloat16, phi::float8_e4m3fn, \
      phi::float8_e5m2
PD_REGISTER_PLUGIN_KERNEL(full, cuda_like, ALL_LAYOUT, cuda_like::FullKernel, ALL_TYPES) {}
PD_REGISTER_PLUGIN_KERNEL(contiguous, cuda_like, ALL_LAYOUT, cuda_like::ContiguousKernel, ALL_TYPES) {}
PD_REGISTER_PLUGIN_KERNEL(strided_copy, cuda_like, ALL_LAYOUT, cuda_like::StridedCopyKernel, ALL_TYPES) {}
