// Copies a byte range with the lanes of one warp, in the widest words that both addresses allow together.
#pragma once

#include <cstdint>

namespace paddle_kv {

constexpr int kWarpLanes = 32;
constexpr int kWordsInFlight = 4;  // per lane: 2 KiB a warp with 16-byte words, enough to hide the latency of the link

template <class Word>
__device__ inline void CopyWords(const std::uint8_t* source, std::uint8_t* target, std::uint32_t bytes, int lane) {
  const Word* from = reinterpret_cast<const Word*>(source);
  Word* to = reinterpret_cast<Word*>(target);
  const std::uint32_t words = bytes / sizeof(Word);
  std::uint32_t i = lane;
  for (; i + (kWordsInFlight - 1) * kWarpLanes < words; i += kWordsInFlight * kWarpLanes) {
    Word held[kWordsInFlight];
#pragma unroll
    for (int k = 0; k < kWordsInFlight; ++k) held[k] = __ldcs(from + i + k * kWarpLanes);
#pragma unroll
    for (int k = 0; k < kWordsInFlight; ++k) __stcs(to + i + k * kWarpLanes, held[k]);
  }
  for (; i < words; i += kWarpLanes) __stcs(to + i, __ldcs(from + i));
}

// Any addresses, any size below 4 GiB. The ranges must not overlap.
__device__ inline void CopyBytesWithWarp(const std::uint8_t* source, std::uint8_t* target, std::uint32_t bytes,
                                         int lane) {
  const std::uintptr_t source_address = reinterpret_cast<std::uintptr_t>(source);
  const std::uintptr_t target_address = reinterpret_cast<std::uintptr_t>(target);
  // Words can be as wide as the two addresses agree modulo that width; the bytes before the first aligned word and
  // behind the last whole one are copied singly.
  const std::uintptr_t difference = source_address ^ target_address;
  const std::uint32_t width = difference % 16 == 0  ? 16
                              : difference % 8 == 0 ? 8
                              : difference % 4 == 0 ? 4
                              : difference % 2 == 0 ? 2
                                                    : 1;
  std::uint32_t head = (width - static_cast<std::uint32_t>(target_address) % width) % width;
  if (head > bytes) head = bytes;
  const std::uint32_t body = (bytes - head) / width * width;
  if (lane < head) target[lane] = source[lane];
  switch (width) {
    case 16:
      CopyWords<uint4>(source + head, target + head, body, lane);
      break;
    case 8:
      CopyWords<uint2>(source + head, target + head, body, lane);
      break;
    case 4:
      CopyWords<std::uint32_t>(source + head, target + head, body, lane);
      break;
    case 2:
      CopyWords<std::uint16_t>(source + head, target + head, body, lane);
      break;
    default:
      CopyWords<std::uint8_t>(source + head, target + head, body, lane);
      break;
  }
  const std::uint32_t done = head + body;
  if (lane < bytes - done) target[done + lane] = source[done + lane];
}

}  // namespace paddle_kv
