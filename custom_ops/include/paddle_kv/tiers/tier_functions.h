// What the library does for tiers without the interpreter's lock.
#pragma once

extern "C" {

// A new dictionary, of type PyObject*. The caller holds the GIL.
//
//   read_ranges(list of (descriptor, offset, list of buffers)) -> list of int
//       What ReadFileRanges says of each.
//   write_ranges(list of (descriptor, offset, list of buffers)) -> list of int
//       What WriteFileRanges says of each.
//   write_table(folder, path, slab, list of (offset, content)) -> int
//       What WriteEntries says; `path` and contents are bytes.
//   checksums(address, list of (buffer, piece_bytes)) -> list of bytes
//       For each buffer the checksums of its pieces, the last of which may be shorter: 8 bytes each, in the order of
//       the machine. `address`: a function that makes 64 bits of an address and a number of bytes.
//   write_headers(address, (content, key_at, sum_at, sums_at, piece_bytes), list of (header, key, payload)) -> None
//       WriteHeaders; ValueError if one of them does not fit.
void* paddle_kv_tier_functions();
}
