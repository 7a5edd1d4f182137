// Reads that the system is given all at once (Linux AIO): a disk has them to choose from, and the thread sleeps once
// for all of them. Where a file goes through the page cache, or there is no AIO, they are done one after the other.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paddle_kv {

struct QueuedRead {
  int descriptor;
  std::int64_t offset;
  const iovec* buffers;
  std::size_t buffer_count;
  std::int64_t bytes;
  bool whole = false;  // whether all bytes came; else nobody knows why, and it is to be read again
};

// Returns when the system touches none of the buffers any more.
void ReadQueued(std::vector<QueuedRead>* reads);

}  // namespace paddle_kv
