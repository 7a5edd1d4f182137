// Bulk copies (cp.async.bulk, sm_90 and newer) between global memory and a stage in shared memory. Addresses and sizes
// are multiples of 16.
#pragma once

#include <cstdint>

namespace paddle_kv {

#if __CUDA_ARCH__ >= 900

__device__ inline std::uint32_t SharedAddress(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ inline void InitBarrier(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)) : "memory");
}

__device__ inline void ExpectBytes(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void AwaitBytes(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t arrived = 0;
  while (arrived == 0) {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%1], %2;\n"
        "selp.u32 %0, 1, 0, arrived;\n"
        "}\n"
        : "=r"(arrived)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
}

__device__ inline void LoadBulk(void* stage, const std::uint8_t* source, std::uint32_t bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(stage)),
               "l"(source), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}

__device__ inline void StoreBulk(std::uint8_t* target, const void* stage, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(SharedAddress(stage)),
               "r"(bytes)
               : "memory");
}

// The same of bytes that others than this GPU's caches will read: they give way first.
__device__ inline void StoreBulkEvictFirst(std::uint8_t* target, const void* stage, std::uint32_t bytes) {
  std::uint64_t policy = 0;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(target),
               "r"(SharedAddress(stage)), "r"(bytes), "l"(policy)
               : "memory");
}

__device__ inline void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most kPending of the lane's last stores are not done. A store has left its stage before it is written.
template <int kPending>
__device__ inline void AwaitStores(bool written) {
  if (written) {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
  } else {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
  }
}

#endif

}  // namespace paddle_kv
