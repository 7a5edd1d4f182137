#include "paddle_kv/tiers/file_ranges.h"

#include <cerrno>
#include <climits>
#include <cstddef>

namespace paddle_kv {
namespace {

// Takes the first `done` bytes away from the buffers; returns how many of these are full.
std::size_t Advance(iovec* buffers, std::size_t done) {
  std::size_t full = 0;
  while (done > 0 && done >= buffers[full].iov_len) done -= buffers[full++].iov_len;
  if (done > 0) {
    buffers[full].iov_base = static_cast<char*>(buffers[full].iov_base) + done;
    buffers[full].iov_len -= done;
  }
  return full;
}

int ReadAll(int descriptor, std::int64_t offset, std::vector<iovec> buffers) {
  std::size_t first = 0;
  while (first < buffers.size()) {
    const ssize_t done = preadv(descriptor, &buffers[first], static_cast<int>(buffers.size() - first), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return kFileEnded;
    offset += done;
    first += Advance(&buffers[first], static_cast<std::size_t>(done));
  }
  return kAllRead;
}

std::int64_t BytesOf(const FileRange& range, const std::vector<iovec>& buffers) {
  std::int64_t bytes = 0;
  for (std::int64_t i = range.first_buffer; i < range.end_buffer; ++i) bytes += buffers[i].iov_len;
  return bytes;
}

}  // namespace

void ReadFileRanges(std::vector<FileRange>* ranges, const std::vector<iovec>& buffers) {
  const auto read = [&](std::size_t begin, std::size_t end) {
    const FileRange& first = (*ranges)[begin];
    const auto from = buffers.begin() + first.first_buffer;
    return ReadAll(first.descriptor, first.offset, {from, buffers.begin() + (*ranges)[end - 1].end_buffer});
  };
  for (std::size_t begin = 0, end; begin < ranges->size(); begin = end) {
    const FileRange& first = (*ranges)[begin];
    std::int64_t behind = first.offset + BytesOf(first, buffers);
    for (end = begin + 1; end < ranges->size(); ++end) {
      const FileRange& next = (*ranges)[end];
      const bool neighbour = next.descriptor == first.descriptor && next.offset == behind;
      if (!neighbour || next.end_buffer - first.first_buffer > IOV_MAX) break;
      behind += BytesOf(next, buffers);
    }
    const int result = read(begin, end);
    for (std::size_t i = begin; i < end; ++i) {
      (*ranges)[i].result = result == kAllRead || end - begin == 1 ? result : read(i, i + 1);
    }
  }
}

}  // namespace paddle_kv
