// Copies on the host. Where a call writes more than stays in the caches in any case, it writes past them: a store into
// a cache reads the line first, which is a third of all that the memory has to do.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace paddle_kv {

class BulkCopy {
 public:
  // `written_bytes`: by the whole call.
  explicit BulkCopy(std::int64_t written_bytes) : past_caches_(written_bytes >= kPastCachesBytes) {}

  void operator()(std::uint8_t* target, const std::uint8_t* source, std::int64_t bytes) const {
    if (past_caches_ && bytes >= kFewestBytes) {
      CopyPastCaches(target, source, bytes);
    } else {
      std::memcpy(target, source, bytes);
    }
  }

  // What this thread has written becomes visible to those that it tells so. ParallelFor does it.
  static void Publish() {
#ifdef __SSE2__
    _mm_sfence();
#endif
  }

 private:
  static constexpr std::int64_t kPastCachesBytes = std::int64_t{8} << 20;
  static constexpr std::int64_t kLine = 64;
  static constexpr std::int64_t kFewestBytes = 2 * kLine;

  static void CopyPastCaches(std::uint8_t* target, const std::uint8_t* source, std::int64_t bytes) {
#ifdef __SSE2__
    const auto lead = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(target) % kLine);
    std::memcpy(target, source, lead);
    target += lead;
    source += lead;
    bytes -= lead;
    for (; bytes >= kLine; bytes -= kLine, source += kLine, target += kLine) {
      const auto* from = reinterpret_cast<const __m128i*>(source);
      auto* to = reinterpret_cast<__m128i*>(target);
      const __m128i words[] = {_mm_loadu_si128(from), _mm_loadu_si128(from + 1), _mm_loadu_si128(from + 2),
                               _mm_loadu_si128(from + 3)};
      for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, words[i]);
    }
#endif
    std::memcpy(target, source, bytes);
  }

  bool past_caches_;
};

}  // namespace paddle_kv
