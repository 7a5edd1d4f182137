// PADDLE_KV_HOST_DEVICE: what a function is called with that kernels and their twins on the CPU share.
#pragma once

#ifdef __CUDACC__
#define PADDLE_KV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PADDLE_KV_HOST_DEVICE inline
#endif
