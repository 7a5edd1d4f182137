// For __launch_bounds__: how many CTAs a multiprocessor is to hold at once, which bounds the registers of a thread.
#pragma once

#include <algorithm>

namespace paddle_kv {

// Threads that a multiprocessor of the architecture has.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kResidentThreads = 1024;
#elif defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kResidentThreads = 1536;
#else
constexpr int kResidentThreads = 2048;
#endif

// So many CTAs of so many threads; but not more than there are threads for, which the compiler would ignore altogether.
constexpr int ResidentCtas(int wanted, int threads) { return std::min(wanted, kResidentThreads / threads); }

}  // namespace paddle_kv
