// Ranges of files, many in one call: between two of them the interpreter is not asked for its lock.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

namespace paddle_kv {

constexpr int kAllRead = 0;
constexpr int kFileEnded = -1;

struct FileRange {
  int descriptor;
  std::int64_t offset;
  std::int64_t first_buffer;
  std::int64_t end_buffer;
  int result;  // kAllRead, kFileEnded, or an errno
};

// Reads each range into its buffers. Those that lie one behind the other in a file are one read of the system, and the
// system is given all reads at once. Where one does not work, each of its ranges is read by itself and has its result.
void ReadFileRanges(std::vector<FileRange>* ranges, const std::vector<iovec>& buffers);

}  // namespace paddle_kv
