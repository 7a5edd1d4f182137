#include "paddle_kv/tiers/file_ranges.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

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

using Call = ssize_t (*)(int, const iovec*, int, off_t);

// All of it, also where the system does less than it was asked for. `nothing`: what it means that it did nothing.
int MoveAll(Call call, int nothing, int descriptor, std::int64_t offset, std::vector<iovec> buffers) {
  std::size_t first = 0;
  while (first < buffers.size()) {
    const ssize_t done = call(descriptor, &buffers[first], static_cast<int>(buffers.size() - first), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return nothing;
    offset += done;
    first += Advance(&buffers[first], static_cast<std::size_t>(done));
  }
  return kAllMoved;
}

std::int64_t BytesOf(const FileRange& range, const std::vector<iovec>& buffers) {
  std::int64_t bytes = 0;
  for (std::int64_t i = range.first_buffer; i < range.end_buffer; ++i) bytes += buffers[i].iov_len;
  return bytes;
}

// Ranges that lie one behind the other in a file.
struct Run {
  QueuedRead asked;
  std::size_t end_range;
};

std::vector<Run> RunsOf(const std::vector<FileRange>& ranges, const std::vector<iovec>& buffers) {
  std::vector<Run> runs;
  for (std::size_t i = 0, begin = 0; i < ranges.size(); ++i) {
    const FileRange& range = ranges[i];
    const std::int64_t bytes = BytesOf(range, buffers);
    const std::int64_t count = range.end_buffer - ranges[begin].first_buffer;
    QueuedRead* before = runs.empty() ? nullptr : &runs.back().asked;
    if (before != nullptr && range.descriptor == before->descriptor && count <= IOV_MAX &&
        range.offset == before->offset + before->bytes) {
      before->buffer_count = count;
      before->bytes += bytes;
      runs.back().end_range = i + 1;
      continue;
    }
    begin = i;
    const std::size_t own = range.end_buffer - range.first_buffer;
    runs.push_back({{range.descriptor, range.offset, buffers.data() + range.first_buffer, own, bytes}, i + 1});
  }
  return runs;
}

// Moves what is not whole yet, and says of each range how it went.
void MoveRuns(Call call, int nothing, const std::vector<Run>& runs, std::vector<FileRange>* ranges,
              const std::vector<iovec>& buffers) {
  std::size_t first = 0;
  for (const Run& run : runs) {
    const QueuedRead& asked = run.asked;
    const auto again = [&] {
      return MoveAll(call, nothing, asked.descriptor, asked.offset,
                     {asked.buffers, asked.buffers + asked.buffer_count});
    };
    const int result = asked.whole ? kAllMoved : again();
    const bool alone = run.end_range - first == 1;
    for (; first < run.end_range; ++first) {
      FileRange& range = (*ranges)[first];
      const auto from = buffers.begin() + range.first_buffer, to = buffers.begin() + range.end_buffer;
      range.result =
          result == kAllMoved || alone ? result : MoveAll(call, nothing, range.descriptor, range.offset, {from, to});
    }
  }
}

}  // namespace

void ReadFileRanges(std::vector<FileRange>* ranges, const std::vector<iovec>& buffers) {
  std::vector<Run> runs = RunsOf(*ranges, buffers);
  if (runs.size() > 1) {
    std::vector<QueuedRead> reads;
    for (const Run& run : runs) reads.push_back(run.asked);
    ReadQueued(&reads);
    for (std::size_t i = 0; i < runs.size(); ++i) runs[i].asked.whole = reads[i].whole;
  }
  MoveRuns(preadv, kFileEnded, runs, ranges, buffers);
}

void WriteFileRanges(std::vector<FileRange>* ranges, const std::vector<iovec>& buffers) {
  MoveRuns(pwritev, EIO, RunsOf(*ranges, buffers), ranges, buffers);
}

int WriteEntries(int folder, const char* path, int slab, const std::vector<Entries>& entries) {
  struct stat said;
  if (slab >= 0 && fstat(slab, &said) != 0) return errno;
  if (slab >= 0 && said.st_nlink == 0) return ENOENT;
  const int table = openat(folder, path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
  if (table < 0) return errno;
  int result = kAllMoved;
  for (std::size_t i = 0; i < entries.size() && result == kAllMoved; ++i) {
    result = MoveAll(pwritev, EIO, table, entries[i].offset, {entries[i].content});
  }
  close(table);
  return result;
}

}  // namespace paddle_kv
