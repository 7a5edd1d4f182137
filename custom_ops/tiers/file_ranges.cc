#include "paddle_kv/tiers/file_ranges.h"

#include <cerrno>
#include <climits>
#include <cstddef>

#include "paddle_kv/tiers/queued_reads.h"

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
  std::vector<QueuedRead> runs;
  std::vector<std::size_t> ends;  // of the ranges of each run
  for (std::size_t i = 0, begin = 0; i < ranges->size(); ++i) {
    const FileRange& range = (*ranges)[i];
    const std::int64_t bytes = BytesOf(range, buffers);
    const std::int64_t count = range.end_buffer - (*ranges)[begin].first_buffer;
    if (!runs.empty() && range.descriptor == runs.back().descriptor && count <= IOV_MAX &&
        range.offset == runs.back().offset + runs.back().bytes) {
      runs.back().buffer_count = count;
      runs.back().bytes += bytes;
      ends.back() = i + 1;
      continue;
    }
    begin = i;
    const std::size_t own = range.end_buffer - range.first_buffer;
    runs.push_back({range.descriptor, range.offset, buffers.data() + range.first_buffer, own, bytes});
    ends.push_back(i + 1);
  }
  if (runs.size() > 1) ReadQueued(&runs);
  std::size_t first = 0;
  for (std::size_t run = 0; run < runs.size(); ++run) {
    const QueuedRead& one = runs[run];
    const auto again = [&] {
      return ReadAll(one.descriptor, one.offset, {one.buffers, one.buffers + one.buffer_count});
    };
    const int result = one.whole ? kAllRead : again();
    const bool alone = ends[run] - first == 1;
    for (; first < ends[run]; ++first) {
      FileRange& range = (*ranges)[first];
      const auto from = buffers.begin() + range.first_buffer, to = buffers.begin() + range.end_buffer;
      range.result = result == kAllRead || alone ? result : ReadAll(range.descriptor, range.offset, {from, to});
    }
  }
}

}  // namespace paddle_kv
