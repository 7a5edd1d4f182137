// Copies a list of pieces of memory with the copy engine, many pieces a call where the driver can.
//
// cudaMemcpyBatchAsync came with CUDA 12.8, and CUDA 13 changed its arguments. The operators may be built with an older
// toolkit, or run with an older driver, so the driver's function is looked up at run time and its structures, which are
// part of its binary interface, are declared here.
#include "paddle_kv/memcpy/memcpy_batch.h"

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/driver_entry.cuh"

namespace paddle_kv {
namespace {

// Lists of some ten thousand copies have crashed drivers.
constexpr std::int64_t kCopiesPerCall = 8192;

struct MemoryLocation {
  int type;
  int id;
};

struct CopyAttributes {
  int source_access_order;
  MemoryLocation source_hint;  // of managed memory only
  MemoryLocation target_hint;
  unsigned flags;
};

// The source is read in the order of the stream, like everything else on it: read any earlier, it may still lack what
// the kernels before the copy write.
constexpr int kStreamOrder = 1;

using BatchOf12 = CUresult (*)(CUdeviceptr* targets, CUdeviceptr* sources, std::size_t* sizes, std::size_t count,
                               CopyAttributes* attributes, std::size_t* first_copies, std::size_t attribute_count,
                               std::size_t* failed_copy, CUstream stream);
using BatchOf13 = CUresult (*)(CUdeviceptr* targets, CUdeviceptr* sources, std::size_t* sizes, std::size_t count,
                               CopyAttributes* attributes, std::size_t* first_copies, std::size_t attribute_count,
                               CUstream stream);

struct BatchFunctions {
  BatchOf12 of_12 = nullptr;
  BatchOf13 of_13 = nullptr;
};

BatchFunctions FindBatchFunctions() {
  BatchFunctions found;
  // Some GPUs have hung in batches: whoever has one of those can do without.
  const char* const wanted = std::getenv("PADDLE_KV_BATCHED_COPIES");
  if (wanted != nullptr && std::strcmp(wanted, "0") == 0) return found;
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) {
    cudaGetLastError();
    return found;
  }
  // Each signature is asked for by the version that brought it; a newer driver keeps the older one.
  if (driver >= 13000) found.of_13 = reinterpret_cast<BatchOf13>(DriverEntry("cuMemcpyBatchAsync", 13000));
  if (driver >= 12080) found.of_12 = reinterpret_cast<BatchOf12>(DriverEntry("cuMemcpyBatchAsync", 12080));
  return found;
}

const BatchFunctions& Functions() {
  static const BatchFunctions functions = FindBatchFunctions();
  return functions;
}

Status DriverStatus(CUresult result) {
  // The two error enumerations agree in the values that a copy can give.
  return ToStatus(static_cast<cudaError_t>(result), "cudaMemcpyBatchAsync");
}

Status CopyOneByOne(const CopyPair* pairs, std::int64_t pair_count, cudaStream_t stream) {
  for (std::int64_t i = 0; i < pair_count; ++i) {
    PADDLE_KV_CUDA(cudaMemcpyAsync(pairs[i].target, pairs[i].source, pairs[i].bytes, cudaMemcpyDefault, stream));
  }
  return {};
}

Status CopyBatched(const CopyPair* pairs, std::int64_t pair_count, cudaStream_t stream) {
  std::vector<CUdeviceptr> targets;
  std::vector<CUdeviceptr> sources;
  std::vector<std::size_t> sizes;
  for (std::int64_t i = 0; i < pair_count; ++i) {
    targets.push_back(reinterpret_cast<CUdeviceptr>(pairs[i].target));
    sources.push_back(reinterpret_cast<CUdeviceptr>(pairs[i].source));
    sizes.push_back(static_cast<std::size_t>(pairs[i].bytes));
  }
  CopyAttributes attributes{};
  attributes.source_access_order = kStreamOrder;
  std::size_t first_copy = 0;  // one entry for each attribute, not for each copy: it holds from copy 0 on
  for (std::int64_t first = 0; first < pair_count; first += kCopiesPerCall) {
    const auto count = static_cast<std::size_t>(std::min(kCopiesPerCall, pair_count - first));
    std::size_t failed_copy = 0;
    const CUresult result = Functions().of_13 != nullptr
                                ? Functions().of_13(&targets[first], &sources[first], &sizes[first], count, &attributes,
                                                    &first_copy, 1, stream)
                                : Functions().of_12(&targets[first], &sources[first], &sizes[first], count, &attributes,
                                                    &first_copy, 1, &failed_copy, stream);
    PADDLE_KV_RETURN_IF_ERROR(DriverStatus(result));
  }
  return {};
}

// Handles 0 and 1 both name the legacy default stream, which the batched call rejects.
bool IsLegacyDefault(cudaStream_t stream) { return stream == nullptr || stream == cudaStreamLegacy; }

}  // namespace

bool HasMemcpyBatchAsync() { return Functions().of_13 != nullptr || Functions().of_12 != nullptr; }

Status MemcpyBatchCuda(const CopyPair* pairs, std::int64_t pair_count, bool batched, const DeviceStream& where) {
  if (pair_count == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  const cudaStream_t stream = StreamOf(where);
  if (!batched || IsLegacyDefault(stream)) return CopyOneByOne(pairs, pair_count, stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  PADDLE_KV_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return CopyOneByOne(pairs, pair_count, stream);
  return CopyBatched(pairs, pair_count, stream);
}

}  // namespace paddle_kv
