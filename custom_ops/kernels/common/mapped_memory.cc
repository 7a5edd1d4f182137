#include "paddle_kv/common/mapped_memory.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "paddle_kv/common/fork_mutex.h"

namespace paddle_kv {
namespace {

using Mapping = MappedMemory::Mapping;

// As in linux/fs.h of 6.11, which the machine that builds may not have.
struct MappingQuery {
  std::uint64_t size;
  std::uint64_t query_flags;
  std::uint64_t address;
  std::uint64_t begin;
  std::uint64_t end;
  std::uint64_t flags;  // 1: readable, 2: writable
  std::uint64_t others[7];
};
constexpr unsigned long kQueryMapping = _IOWR('f', 17, MappingQuery);

ForkMutex& list_mutex = *new ForkMutex;

// The process's own list, open to be asked. A forked child has one of its own.
int OpenList() {
  static int descriptor = -1;
  static pid_t owner = 0;
  const std::lock_guard<ForkMutex> lock(list_mutex);
  if (owner != getpid()) {
    if (descriptor >= 0) close(descriptor);
    descriptor = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    owner = getpid();
  }
  return descriptor;
}

// False: the kernel does not answer such questions.
bool Ask(std::uintptr_t address, Mapping* mapping) {
  MappingQuery query{};
  query.size = sizeof(query);
  query.address = address;
  const int list = OpenList();
  if (list < 0) return false;
  if (ioctl(list, kQueryMapping, &query) != 0) return errno == ENOENT;
  *mapping = {query.begin, query.end, (query.flags & 1) != 0, (query.flags & 2) != 0};
  return true;
}

std::map<std::uintptr_t, Mapping> ReadList() {
  std::map<std::uintptr_t, Mapping> mappings;
  std::FILE* const file = std::fopen("/proc/self/maps", "re");
  if (file == nullptr) return mappings;
  char* line = nullptr;
  std::size_t room = 0;
  while (getline(&line, &room, file) > 0) {
    Mapping mapping;
    char may_read = '-';
    char may_write = '-';
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %c%c", &mapping.begin, &mapping.end, &may_read, &may_write) == 4) {
      mapping.is_readable = may_read == 'r';
      mapping.is_writable = may_write == 'w';
      mappings[mapping.end] = mapping;
    }
  }
  std::free(line);
  std::fclose(file);
  return mappings;
}

}  // namespace

bool MappedMemory::Allows(std::uintptr_t address, std::int64_t bytes, Access access) {
  if (bytes <= 0) return true;
  const std::uintptr_t end = address + static_cast<std::uintptr_t>(bytes);
  if (end < address) return false;
  for (std::uintptr_t next = address; next < end; next = last_.end) {
    if (next < last_.begin || next >= last_.end) last_ = Find(next);
    if (!(access == Access::kWrite ? last_.is_writable : last_.is_readable)) return false;
  }
  return true;
}

Mapping MappedMemory::Find(std::uintptr_t address) {
  const auto found = known_.upper_bound(address);
  if (found != known_.end() && address >= found->second.begin) return found->second;
  if (knows_all_) return {};
  Mapping mapping;
  if (Ask(address, &mapping)) {
    known_[mapping.end] = mapping;
    return mapping;
  }
  known_ = ReadList();
  knows_all_ = true;
  return Find(address);
}

}  // namespace paddle_kv
