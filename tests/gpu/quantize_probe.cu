// The conversions of quantize.cuh as kernels, for test_older_architectures.py.
#include "paddle_kv/common/quantize.cuh"

using namespace paddle_kv;

template <class Plain, class Format>
__device__ void Encode(const PlainWord<Plain>* from, CodeWord<Plain>* to, int words, float scale) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < words) to[i] = QuantizeWord<Plain, Format>(from[i], ScaleDivider(scale));
}

template <class Format, class Plain>
__device__ void Decode(const CodeWord<Plain>* from, PlainWord<Plain>* to, int words, float scale) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < words) to[i] = DequantizeWord<Format, Plain>(from[i], scale);
}

#define PROBE(Plain, Format)                                                                                     \
  extern "C" __global__ void encode_##Plain##_##Format(const void* from, void* to, int words, float scale) {     \
    Encode<Plain, Format>(static_cast<const PlainWord<Plain>*>(from), static_cast<CodeWord<Plain>*>(to), words, scale); \
  }                                                                                                              \
  extern "C" __global__ void decode_##Plain##_##Format(const void* from, void* to, int words, float scale) {     \
    Decode<Format, Plain>(static_cast<const CodeWord<Plain>*>(from), static_cast<PlainWord<Plain>*>(to), words, scale); \
  }
#define PROBES(Plain)       \
  PROBE(Plain, Fp8E4m3)     \
  PROBE(Plain, Fp8E5m2)     \
  PROBE(Plain, Int8)        \
  PROBE(Plain, PaddleUint8)

PROBES(Float16)
PROBES(BFloat16)
PROBES(Float32)
