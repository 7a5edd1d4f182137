// Kernels on the CPU: the lanes of a warp are coroutines, which meet at the functions of warps. Memory that is read or
// written in words has to be allowed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "cuda_runtime.h"

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint4 {
  unsigned x, y, z, w;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_size, unsigned y_size = 1, unsigned z_size = 1) : x(x_size), y(y_size), z(z_size) {}
};

extern thread_local dim3 blockIdx, threadIdx, blockDim;

using std::max;
using std::min;

unsigned __ballot_sync(unsigned mask, bool predicate);
int __shfl_sync(unsigned mask, int value, unsigned lane);
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

namespace paddle_kv {

struct Range {
  const std::uint8_t* first;
  std::int64_t bytes;
};

// What kernels may touch from now on.
void AllowMemory(std::vector<Range> readable, std::vector<Range> writable);
// Fails the test unless the word is aligned and allowed. In a dependent launch, also unless the thread has waited.
void CheckWord(const std::uint8_t* address, bool written);
void KernelBeforeIsAwaited();
// Runs `thread` for each thread of each CTA, in an order that no kernel may rely on.
void RunGrid(dim3 grid, dim3 block, bool dependent, const std::function<void()>& thread);

}  // namespace paddle_kv
