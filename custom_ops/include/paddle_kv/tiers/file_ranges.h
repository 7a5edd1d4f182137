// Ranges of files, many in one call: between two of them the interpreter is not asked for its lock.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

namespace paddle_kv {

constexpr int kAllMoved = 0;
constexpr int kFileEnded = -1;

struct FileRange {
  int descriptor;
  std::int64_t offset;
  std::int64_t first_buffer;
  std::int64_t end_buffer;
  int result;  // kAllMoved, kFileEnded, or an errno
};

// Reads each range into its buffers. Those that lie one behind the other in a file are one read of the system, and the
// system is given all reads at once. Where one does not work, each of its ranges is read by itself and has its result.
void ReadFileRanges(std::vector<FileRange>* ranges, const std::vector<iovec>& buffers);

// Writes each range from its buffers; those that lie one behind the other are one write of the system. Where one does
// not work, each of its ranges is written by itself and has its result.
void WriteFileRanges(std::vector<FileRange>* ranges, const std::vector<iovec>& buffers);

// Entries of a table that follow each other, and where they begin.
struct Entries {
  std::int64_t offset;
  iovec content;
};

// Writes entries into the table of a slab, a file `path` in a folder. Returns kAllMoved or an errno: ENOENT if `slab`,
// the slab's descriptor, is of a file that has been deleted. -1: that is not asked.
int WriteEntries(int folder, const char* path, int slab, const std::vector<Entries>& entries);

}  // namespace paddle_kv
