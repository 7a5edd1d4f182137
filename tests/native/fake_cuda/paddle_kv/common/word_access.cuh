// In place of the library's own, which is code for a GPU.
#pragma once

#include "device_code.h"

namespace paddle_kv {

inline uint4 LoadNow(const std::uint8_t* address) {
  CheckWord(address, false);
  uint4 word;
  std::memcpy(&word, address, sizeof(word));
  return word;
}

inline void StoreIf(bool condition, std::uint8_t* address, const uint4& word) {
  if (!condition) return;
  CheckWord(address, true);
  std::memcpy(address, &word, sizeof(word));
}

}  // namespace paddle_kv
