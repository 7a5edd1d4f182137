// Checks that every operator shares. Each failure names the argument, the value and the legal range.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "paddle_api.h"

namespace paddle_kv {

using Ids = std::vector<int64_t>;

// A list as an attribute costs Paddle 80 ns an entry; a long one comes as its address in host memory and its length.
Ids IdsAt(const std::vector<int64_t>& address_and_count);

// A block cache: 3 to 5 dimensions (5: packed keys), the first counts blocks; initialised, on CPU or GPU. Returns bytes
// of one block.
int64_t CheckCache(const paddle::Tensor& cache, const std::string& name);

void CheckSameLength(const Ids& first, const std::string& first_name, const Ids& second,
                     const std::string& second_name);

// IndexError unless each id lies in [0, block_count).
void CheckIds(const Ids& ids, const std::string& name, int64_t block_count);

// ValueError if an id occurs twice.
void CheckDistinct(const Ids& ids, const std::string& name);

// ValueError if an id is in both lists (they name blocks of one cache).
void CheckDisjoint(const Ids& sources, const std::string& source_name, const Ids& targets,
                   const std::string& target_name);

// ValueError if two of the memory ranges (first byte, bytes) share a byte: the result would depend on the order of the
// writes.
void CheckApart(std::vector<std::pair<const std::uint8_t*, int64_t>> ranges, const std::string& name);

// ValueError unless the memory begins at a multiple of the bytes of an element: the kernels of a GPU cannot read it.
void CheckAligned(const void* data, int64_t item_bytes, const std::string& name);

// Whether PADDLE_KV_CHECK=1 asks for ids that only the device knows to be read back and checked, at the price of a
// wait.
bool CheckRequested();

// "[2, 3]" for messages.
std::string ShapeText(const std::vector<int64_t>& shape);

// a * b for sizes, ValueError naming what overflowed.
int64_t CheckedProduct(int64_t a, int64_t b, const std::string& what);

}  // namespace paddle_kv
