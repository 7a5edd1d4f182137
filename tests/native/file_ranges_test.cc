// Reads of many ranges, over a system that does less than it was asked for.
#include <fcntl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "check.h"
#include "paddle_kv/tiers/file_ranges.h"

namespace {

constexpr int kDescriptor = 7;
constexpr int kOther = 8;

struct Call {
  int descriptor;
  std::int64_t offset;
  std::size_t bytes;
};

std::string content;  // of both files
std::vector<Call> calls;
std::deque<int> failures;     // of the next calls; 0: it works
std::int64_t bad_from = -1;   // no call that reaches it works
std::size_t most = 1u << 30;  // what a call reads at most

void Reset() {
  content.clear();
  for (int i = 0; i < 10000; ++i) content.push_back(static_cast<char>(i * 31 + i / 256));
  calls.clear();
  failures.clear();
  bad_from = -1;
  most = 1u << 30;
}

}  // namespace

// In the place of the system's.
extern "C" ssize_t preadv(int descriptor, const iovec* buffers, int count, off_t offset) {
  std::size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += buffers[i].iov_len;
  calls.push_back({descriptor, offset, bytes});
  if (!failures.empty()) {
    const int failure = failures.front();
    failures.pop_front();
    if (failure != 0) {
      errno = failure;
      return -1;
    }
  }
  if (bad_from >= 0 && offset <= bad_from && bad_from < offset + static_cast<std::int64_t>(bytes)) {
    errno = EIO;
    return -1;
  }
  std::size_t left = std::min(most, content.size() - std::min<std::size_t>(offset, content.size()));
  ssize_t done = 0;
  for (int i = 0; i < count && left > 0; ++i) {
    const std::size_t part = std::min(left, buffers[i].iov_len);
    std::memcpy(buffers[i].iov_base, &content[offset + done], part);
    done += part;
    left -= part;
  }
  return done;
}

namespace {

std::string written;

}  // namespace

extern "C" ssize_t pwritev(int descriptor, const iovec* buffers, int count, off_t offset) {
  std::string given;
  for (int i = 0; i < count; ++i) given.append(static_cast<const char*>(buffers[i].iov_base), buffers[i].iov_len);
  calls.push_back({descriptor, offset, given.size()});
  if (bad_from >= 0 && offset <= bad_from && bad_from < offset + static_cast<std::int64_t>(given.size())) {
    errno = EIO;
    return -1;
  }
  given.resize(std::min(most, given.size()));
  written.resize(std::max(written.size(), offset + given.size()), '.');
  written.replace(offset, given.size(), given);
  return static_cast<ssize_t>(given.size());
}

namespace {

// `ranges`: descriptor, offset and the bytes of each buffer.
struct Asked {
  int descriptor;
  std::int64_t offset;
  std::vector<std::size_t> sizes;
};

struct Found {
  std::vector<int> results;
  std::vector<std::string> read;
};

Found Read(const std::vector<Asked>& asked) {
  Found found;
  std::vector<iovec> buffers;
  std::vector<paddle_kv::FileRange> ranges;
  for (const Asked& one : asked) {
    std::size_t total = 0;
    for (const std::size_t size : one.sizes) total += size;
    found.read.emplace_back(total, '\x5a');
  }
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const auto first = static_cast<std::int64_t>(buffers.size());
    std::size_t at = 0;
    for (const std::size_t size : asked[i].sizes) {
      buffers.push_back({&found.read[i][at], size});
      at += size;
    }
    ranges.push_back({asked[i].descriptor, asked[i].offset, first, static_cast<std::int64_t>(buffers.size()), 99});
  }
  paddle_kv::ReadFileRanges(&ranges, buffers);
  for (const auto& range : ranges) found.results.push_back(range.result);
  return found;
}

void CheckRead(const Found& found, const std::vector<Asked>& asked, std::size_t i) {
  CHECK(found.results[i] == paddle_kv::kAllMoved);
  CHECK(found.read[i] == content.substr(asked[i].offset, found.read[i].size()));
}

void NeighboursTogether() {
  Reset();
  const std::vector<Asked> asked = {
      {kDescriptor, 100, {10, 20}}, {kDescriptor, 130, {5}}, {kDescriptor, 136, {4}}, {kOther, 140, {3}}};
  const Found found = Read(asked);
  for (std::size_t i = 0; i < asked.size(); ++i) CheckRead(found, asked, i);
  CHECK(calls.size() == 3);
  CHECK(calls[0].bytes == 35 && calls[1].offset == 136 && calls[2].descriptor == kOther);
}

void NoMoreBuffersThanTheSystemTakes() {
  Reset();
  std::vector<Asked> asked;
  for (int i = 0; i < 1500; ++i) asked.push_back({kDescriptor, 2 * i, {1, 1}});
  const Found found = Read(asked);
  for (std::size_t i = 0; i < asked.size(); ++i) CheckRead(found, asked, i);
  CHECK(calls.size() == 3);
  CHECK(calls[0].bytes == 1024);
}

void LessThanAskedFor() {
  for (const std::size_t step : {1, 7, 10, 33}) {
    Reset();
    most = step;
    failures = {0, EINTR, 0, EINTR};
    const std::vector<Asked> asked = {{kDescriptor, 50, {10, 1, 20}}, {kDescriptor, 81, {13, 40}}};
    const Found found = Read(asked);
    CheckRead(found, asked, 0);
    CheckRead(found, asked, 1);
  }
}

void ABadSectorTakesItsRangeAlone() {
  Reset();
  bad_from = 115;
  const std::vector<Asked> asked = {{kDescriptor, 100, {10}}, {kDescriptor, 110, {10}}, {kDescriptor, 120, {10}}};
  const Found found = Read(asked);
  CheckRead(found, asked, 0);
  CHECK(found.results[1] == EIO);
  CheckRead(found, asked, 2);
  CHECK(calls.size() == 4);
}

void TheEndOfTheFile() {
  Reset();
  const std::vector<Asked> asked = {{kDescriptor, 9980, {10}}, {kDescriptor, 9990, {5, 6}}, {kDescriptor, 20000, {1}}};
  const Found found = Read(asked);
  CheckRead(found, asked, 0);
  CHECK(found.results[1] == paddle_kv::kFileEnded);
  CHECK(found.results[2] == paddle_kv::kFileEnded);
}

std::vector<int> Write(const std::vector<std::string>& contents) {
  written.clear();
  std::vector<iovec> buffers;
  std::vector<paddle_kv::FileRange> ranges;
  std::int64_t at = 5;
  for (const std::string& one : contents) {
    const auto first = static_cast<std::int64_t>(buffers.size());
    buffers.push_back({const_cast<char*>(one.data()), one.size()});
    ranges.push_back({kDescriptor, at, first, first + 1, 99});
    at += static_cast<std::int64_t>(one.size());
  }
  paddle_kv::WriteFileRanges(&ranges, buffers);
  std::vector<int> results;
  for (const auto& range : ranges) results.push_back(range.result);
  return results;
}

void WritesNeighboursTogether() {
  Reset();
  CHECK(Write({"abc", "de", "f"}) == std::vector<int>(3, paddle_kv::kAllMoved));
  CHECK(written == ".....abcdef");
  CHECK(calls.size() == 1);
}

void WritesAllWhereTheSystemDoesLess() {
  Reset();
  most = 2;
  CHECK(Write({"abc", "de", "f"}) == std::vector<int>(3, paddle_kv::kAllMoved));
  CHECK(written == ".....abcdef");
  most = 0;
  CHECK(Write({"abc"}) == std::vector<int>{EIO});
}

void ASectorThatCannotBeWritten() {
  Reset();
  bad_from = 9;
  CHECK((Write({"abc", "de", "f"}) == std::vector<int>{paddle_kv::kAllMoved, EIO, paddle_kv::kAllMoved}));
  CHECK(written == ".....abc..f");
}

void EntriesOfATable() {
  Reset();
  written.clear();
  std::string first = "ab", second = "c";
  const std::vector<paddle_kv::Entries> entries = {{1, {&first[0], 2}}, {5, {&second[0], 1}}};
  CHECK(paddle_kv::WriteEntries(AT_FDCWD, "/dev/null", -1, entries) == paddle_kv::kAllMoved);
  CHECK(written == ".ab..c");
  bad_from = 1;
  CHECK(paddle_kv::WriteEntries(AT_FDCWD, "/dev/null", -1, entries) == EIO);
  CHECK(calls.size() == 3);  // nothing behind an error
  CHECK(paddle_kv::WriteEntries(AT_FDCWD, "/no/such/table", -1, entries) == ENOENT);
  CHECK(paddle_kv::WriteEntries(AT_FDCWD, "/dev/null", 1 << 20, entries) == EBADF);
}

const Test kTests[] = {
    {"neighbours_together", NeighboursTogether},
    {"no_more_buffers_than_the_system_takes", NoMoreBuffersThanTheSystemTakes},
    {"less_than_asked_for", LessThanAskedFor},
    {"a_bad_sector_takes_its_range_alone", ABadSectorTakesItsRangeAlone},
    {"the_end_of_the_file", TheEndOfTheFile},
    {"writes_neighbours_together", WritesNeighboursTogether},
    {"writes_all_where_the_system_does_less", WritesAllWhereTheSystemDoesLess},
    {"a_sector_that_cannot_be_written", ASectorThatCannotBeWritten},
    {"entries_of_a_table", EntriesOfATable},
};

}  // namespace

int main(int argc, char** argv) { return RunTests(kTests, argc, argv); }
