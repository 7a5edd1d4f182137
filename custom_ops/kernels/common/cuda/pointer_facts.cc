#include "paddle_kv/common/pointer_facts.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/driver_entry.cuh"

namespace paddle_kv {
namespace {

// The allocation around an address, in one call of the driver; false if it does not tell.
bool FindRange(std::uintptr_t address, PointerFacts* facts) {
  using Function = CUresult (*)(unsigned, CUpointer_attribute*, void**, CUdeviceptr);
  static const auto get_attributes = reinterpret_cast<Function>(DriverEntry("cuPointerGetAttributes", 7000));
  if (get_attributes == nullptr) return false;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  void* values[] = {&begin, &bytes};
  if (get_attributes(2, attributes, values, static_cast<CUdeviceptr>(address)) != CUDA_SUCCESS) return false;
  if (begin == 0 || address < begin || address - begin >= bytes) return false;
  facts->range_begin = begin;
  facts->range_end = begin + bytes;
  facts->range_known = true;
  return true;
}

}  // namespace

int BuiltCudaVersion() { return CUDART_VERSION; }

bool HasDevice() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count > 0;
  cudaGetLastError();
  return false;
}

Status DescribePointer(std::uintptr_t address, PointerFacts* facts) {
  *facts = {};
  facts->range_begin = address;
  facts->range_end = address + 1;
  const AnyContext context;
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(address));
  if (error == cudaErrorInvalidValue) {  // what old drivers say of memory they do not know
    cudaGetLastError();
    return {};
  }
  PADDLE_KV_RETURN_IF_ERROR(ToStatus(error, "cudaPointerGetAttributes"));
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
    case cudaMemoryTypeManaged:
      facts->kind = MemoryKind::kDevice;
      facts->device = attributes.device;
      break;
    case cudaMemoryTypeHost:
      // Registered memory could be mapped elsewhere; the kernels use one address for both sides.
      if (reinterpret_cast<std::uintptr_t>(attributes.devicePointer) == address) facts->kind = MemoryKind::kHost;
      break;
    default:
      break;
  }
  if (facts->kind != MemoryKind::kPageable) FindRange(address, facts);
  return {};
}

}  // namespace paddle_kv
