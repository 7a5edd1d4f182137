// Which addresses this process may read and write: what CUDA does not know, or a build without it, is asked here.
#pragma once

#include <cstdint>
#include <map>

namespace paddle_kv {

enum class Access { kRead, kWrite };

// For the addresses of one call, which lie in few mappings: each is asked for once. Linux 6.11 and newer tell of one
// mapping in a microsecond; older ones list all of them, in some tenths of a millisecond.
class MappedMemory {
 public:
  // Whether all of the bytes may be used so. Zero bytes may always be.
  bool Allows(std::uintptr_t address, std::int64_t bytes, Access access);

  struct Mapping {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    bool is_readable = false;
    bool is_writable = false;
  };

 private:
  // The mapping that the address lies in; an empty one: none.
  Mapping Find(std::uintptr_t address);

  std::map<std::uintptr_t, Mapping> known_;  // by the end
  bool knows_all_ = false;
  Mapping last_;
};

}  // namespace paddle_kv
