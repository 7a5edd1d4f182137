// Exchanges blocks inside caches on the device: a warp holds the words of both chunks in registers and writes them
// crosswise. pair_launch.cuh has the shape of the launch.
#include "paddle_kv/copy/swap_blocks.h"

#include "paddle_kv/copy/pair_launch.cuh"

namespace paddle_kv {
namespace {

template <class Word>
__device__ void ExchangeWords(std::uint8_t* first, std::uint8_t* second, std::int64_t bytes, int lane) {
  Word* a = reinterpret_cast<Word*>(first);
  Word* b = reinterpret_cast<Word*>(second);
  const std::int64_t words = bytes / static_cast<std::int64_t>(sizeof(Word));
  constexpr int kHeld = kWordsInFlight / 2;
  std::int64_t i = lane;
  for (; i + (kHeld - 1) * kWarpLanes < words; i += kHeld * kWarpLanes) {
    Word of_a[kHeld];
    Word of_b[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      of_a[k] = __ldcs(a + i + k * kWarpLanes);
      of_b[k] = __ldcs(b + i + k * kWarpLanes);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      __stcs(a + i + k * kWarpLanes, of_b[k]);
      __stcs(b + i + k * kWarpLanes, of_a[k]);
    }
  }
  for (; i < words; i += kWarpLanes) {
    const Word of_a = __ldcs(a + i);
    __stcs(a + i, __ldcs(b + i));
    __stcs(b + i, of_a);
  }
}

struct Exchange {
  static __device__ void Run(std::uint8_t* first, std::uint8_t* second, std::int64_t bytes, int lane) {
    const std::uintptr_t second_address = reinterpret_cast<std::uintptr_t>(second);
    const std::uintptr_t difference = reinterpret_cast<std::uintptr_t>(first) ^ second_address;
    // As in CopyBytesWithWarp: words as wide as the two addresses agree, single bytes around them.
    const int width = difference % 16 == 0 ? 16 : difference % 4 == 0 ? 4 : 1;
    std::int64_t head = static_cast<std::int64_t>((width - second_address % width) % width);
    if (head > bytes) head = bytes;
    const std::int64_t body = (bytes - head) / width * width;
    ExchangeWords<std::uint8_t>(first, second, head, lane);
    switch (width) {
      case 16:
        ExchangeWords<uint4>(first + head, second + head, body, lane);
        break;
      case 4:
        ExchangeWords<std::uint32_t>(first + head, second + head, body, lane);
        break;
      default:
        ExchangeWords<std::uint8_t>(first + head, second + head, body, lane);
        break;
    }
    const std::int64_t done = head + body;
    ExchangeWords<std::uint8_t>(first + done, second + done, bytes - done, lane);
  }
};

}  // namespace

Status SwapBlocksCuda(const CacheBlocks* caches, std::int64_t cache_count, const std::int64_t* first_ids,
                      const std::int64_t* second_ids, std::int64_t pair_count, const DeviceStream& where) {
  return RunOnHostPairs<Exchange>(caches, cache_count, first_ids, second_ids, pair_count, where);
}

Status SwapBlocksCuda(const CacheBlocks* caches, std::int64_t cache_count, const DevicePairs& pairs,
                      const DeviceStream& where) {
  return RunOnDevicePairs<Exchange>(caches, cache_count, pairs, where);
}

}  // namespace paddle_kv
