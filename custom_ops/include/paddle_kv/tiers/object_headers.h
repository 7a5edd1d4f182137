// Headers of objects that are about to be stored, with the checksums of their payloads: docs/tiers.md has the bytes.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paddle_kv {

using Checksum = std::uint64_t (*)(const void*, std::size_t);

inline std::size_t PiecesOf(std::size_t bytes, std::size_t piece_bytes) {
  return (bytes + piece_bytes - 1) / piece_bytes;
}

// The checksums of the pieces of a buffer, the last of which may be shorter.
void PieceChecksums(Checksum checksum, const iovec& buffer, std::size_t piece_bytes, std::uint64_t* sums);

// What the headers of a tier have in common.
struct HeaderForm {
  iovec content;        // all of a header but what follows
  std::size_t key_at;   // what tells the key
  std::size_t sum_at;   // the checksum of the header, of all its bytes but these 8
  std::size_t sums_at;  // those of the pieces
  std::size_t piece_bytes;
};

struct HeaderToWrite {
  iovec header;
  iovec key;
  iovec payload;
};

// Whether everything lies within a header, so that writing it touches nothing else.
bool Fits(const HeaderForm& form, const HeaderToWrite& one);

void WriteHeaders(Checksum checksum, const HeaderForm& form, const std::vector<HeaderToWrite>& headers);

}  // namespace paddle_kv
