#include "paddle_kv/tiers/object_headers.h"

#include <algorithm>
#include <cstring>

namespace paddle_kv {
namespace {

constexpr std::size_t kSumBytes = sizeof(std::uint64_t);

bool Within(std::size_t at, std::size_t bytes, std::size_t size) { return at <= size && bytes <= size - at; }

}  // namespace

void PieceChecksums(Checksum checksum, const iovec& buffer, std::size_t piece_bytes, std::uint64_t* sums) {
  const char* start = static_cast<const char*>(buffer.iov_base);
  for (std::size_t at = 0; at < buffer.iov_len; at += piece_bytes) {
    *sums++ = checksum(start + at, std::min(piece_bytes, buffer.iov_len - at));
  }
}

bool Fits(const HeaderForm& form, const HeaderToWrite& one) {
  const std::size_t size = form.content.iov_len;
  if (form.piece_bytes == 0 || one.header.iov_len != size) return false;
  const std::size_t pieces = PiecesOf(one.payload.iov_len, form.piece_bytes);
  return pieces <= size && Within(form.key_at, one.key.iov_len, size) && Within(form.sum_at, kSumBytes, size) &&
         Within(form.sums_at, pieces * kSumBytes, size);
}

void WriteHeaders(Checksum checksum, const HeaderForm& form, const std::vector<HeaderToWrite>& headers) {
  const std::size_t size = form.content.iov_len, behind = form.sum_at + kSumBytes;
  std::vector<char> content(size);  // built here, where the checksum's own bytes can be left out
  std::vector<std::uint64_t> sums;
  for (const HeaderToWrite& one : headers) {
    sums.resize(PiecesOf(one.payload.iov_len, form.piece_bytes));
    PieceChecksums(checksum, one.payload, form.piece_bytes, sums.data());
    std::memcpy(content.data(), form.content.iov_base, size);
    std::memcpy(content.data() + form.key_at, one.key.iov_base, one.key.iov_len);
    std::memcpy(content.data() + form.sums_at, sums.data(), sums.size() * kSumBytes);
    char* header = static_cast<char*>(one.header.iov_base);
    std::memcpy(header, content.data(), size);
    std::memmove(content.data() + form.sum_at, content.data() + behind, size - behind);
    const std::uint64_t sum = checksum(content.data(), size - kSumBytes);
    std::memcpy(header + form.sum_at, &sum, kSumBytes);
  }
}

}  // namespace paddle_kv
