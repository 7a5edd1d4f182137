#pragma once

#include <cstdint>

namespace paddle_kv {

// One piece of contiguous memory and where it goes. Pieces of one call are copied in no particular order.
struct CopyPair {
  const std::uint8_t* source;
  std::uint8_t* target;
  std::int64_t bytes;
};

}  // namespace paddle_kv
