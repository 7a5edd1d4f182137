// Which number format a tensor holds, as a value, and the way from that value to the type in float_formats.h.
#pragma once

#include <cstdint>

#include "paddle_kv/common/float_formats.h"

namespace paddle_kv {

enum class ElementType { kFloat32, kFloat16, kBFloat16, kFp8E4m3, kFp8E5m2, kInt8, kPaddleUint8 };

inline std::int64_t ElementBytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kFloat16:
    case ElementType::kBFloat16:
      return 2;
    default:
      return 1;
  }
}

inline bool IsQuantized(ElementType type) { return ElementBytes(type) == 1; }

// Returns use(Float32{}), use(Float16{}) or use(BFloat16{}); `type` is one of these (the glue has checked).
template <class Use>
PADDLE_KV_HOST_DEVICE auto DispatchPlain(ElementType type, const Use& use) {
  switch (type) {
    case ElementType::kFloat16:
      return use(Float16{});
    case ElementType::kBFloat16:
      return use(BFloat16{});
    default:
      return use(Float32{});
  }
}

// The same for the one-byte formats.
template <class Use>
PADDLE_KV_HOST_DEVICE auto DispatchQuantized(ElementType type, const Use& use) {
  switch (type) {
    case ElementType::kFp8E4m3:
      return use(Fp8E4m3{});
    case ElementType::kFp8E5m2:
      return use(Fp8E5m2{});
    case ElementType::kInt8:
      return use(Int8{});
    default:
      return use(PaddleUint8{});
  }
}

}  // namespace paddle_kv
