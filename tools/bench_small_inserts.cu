// The plain kernels that bench_small_inserts.py times beside the operators, with launchers for ctypes.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

struct Store {
  const std::uint8_t* key;
  const std::uint8_t* value;
  std::uint8_t* key_cache;
  std::uint8_t* value_cache;
  const std::int64_t* slots;
  std::int64_t key_stride;
  std::int64_t value_stride;
  std::int64_t cache_stride;
};

// One CTA of 4 warps for each token, one word of 16 bytes of keys and of values a thread. Any slot is believed.
template <bool kDependent>
__global__ void __launch_bounds__(128) StoreRows(const __grid_constant__ Store store) {
  const unsigned byte = threadIdx.x * 16;
#if __CUDA_ARCH__ >= 900
  if (kDependent) cudaGridDependencySynchronize();
#endif
  const std::int64_t slot = store.slots[blockIdx.x];
  const uint4 key = *reinterpret_cast<const uint4*>(store.key + blockIdx.x * store.key_stride + byte);
  const uint4 value = *reinterpret_cast<const uint4*>(store.value + blockIdx.x * store.value_stride + byte);
  *reinterpret_cast<uint4*>(store.key_cache + slot * store.cache_stride + byte) = key;
  *reinterpret_cast<uint4*>(store.value_cache + slot * store.cache_stride + byte) = value;
#if __CUDA_ARCH__ >= 900
  if (kDependent) cudaTriggerProgrammaticLaunchCompletion();
#endif
}

struct Gather {
  const std::uint8_t* cache;
  std::uint8_t* rows;
  const std::int32_t* block_table;
  const std::int32_t* cu_seq_lens;
  const std::int32_t* token_to_seq;
  std::int32_t block_size;
  std::int64_t table_stride;
  std::int64_t block_stride;  // bytes
};

// One CTA of 2 warps for each token, whose sequence the caller has found; the length of a row is a constant.
template <int kRowBytes>
__global__ void __launch_bounds__(64) GatherRows(const __grid_constant__ Gather gather) {
  const int token = static_cast<int>(blockIdx.x);
  const int sequence = gather.token_to_seq[token];
  const int position = token - gather.cu_seq_lens[sequence];
  const int entry = position / gather.block_size;
  const std::int64_t block = gather.block_table[sequence * gather.table_stride + entry];
  const std::uint8_t* const source =
      gather.cache + block * gather.block_stride + position % gather.block_size * std::int64_t{kRowBytes};
  std::uint8_t* const target = gather.rows + token * std::int64_t{kRowBytes};
#pragma unroll
  for (unsigned byte = threadIdx.x * 16; byte < kRowBytes; byte += 64 * 16) {
    *reinterpret_cast<uint4*>(target + byte) = *reinterpret_cast<const uint4*>(source + byte);
  }
}

__global__ void Spin(unsigned long long duration_ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < duration_ns);
}

}  // namespace

extern "C" {

// Rows of 2,048 bytes.
int store_rows(const void* key, const void* value, void* key_cache, void* value_cache, const std::int64_t* slots,
               int tokens, int dependent, cudaStream_t stream) {
  const Store store{static_cast<const std::uint8_t*>(key),
                    static_cast<const std::uint8_t*>(value),
                    static_cast<std::uint8_t*>(key_cache),
                    static_cast<std::uint8_t*>(value_cache),
                    slots,
                    2048,
                    2048,
                    2048};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(tokens);
  config.blockDim = dim3(128);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, dependent ? StoreRows<true> : StoreRows<false>, store);
}

// Rows of 2,048 or 1,152 bytes.
int gather_rows(const void* cache, void* rows, const std::int32_t* block_table, const std::int32_t* cu_seq_lens,
                const std::int32_t* token_to_seq, int tokens, int row_bytes, int block_size, std::int64_t table_stride,
                cudaStream_t stream) {
  const Gather gather{static_cast<const std::uint8_t*>(cache),
                      static_cast<std::uint8_t*>(rows),
                      block_table,
                      cu_seq_lens,
                      token_to_seq,
                      block_size,
                      table_stride,
                      std::int64_t{row_bytes} * block_size};
  (row_bytes == 2048 ? GatherRows<2048> : GatherRows<1152>)<<<tokens, 64, 0, stream>>>(gather);
  return cudaGetLastError();
}

int spin(unsigned long long duration_ns, cudaStream_t stream) {
  Spin<<<1, 1, 0, stream>>>(duration_ns);
  return cudaGetLastError();
}

}  // extern "C"
