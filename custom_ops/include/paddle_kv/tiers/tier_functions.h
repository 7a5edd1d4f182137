// What the library does for tiers without the interpreter's lock.
#pragma once

extern "C" {

// A new dictionary, of type PyObject*. The caller holds the GIL.
//
//   read_ranges(list of (descriptor, offset, list of buffers)) -> list of int
//       What ReadFileRanges says of each.
//   checksums(address, list of (buffer, piece_bytes)) -> list of bytes
//       For each buffer the checksums of its pieces, the last of which may be shorter: 8 bytes each, in the order of
//       the machine. `address`: a function that makes 64 bits of an address and a number of bytes.
void* paddle_kv_tier_functions();
}
