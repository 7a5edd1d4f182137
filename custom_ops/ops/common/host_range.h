// Checks of host memory that an operator is going to read or write.
#pragma once

#include <cstdint>
#include <string>

#include "paddle_api.h"
#include "paddle_kv/common/mapped_memory.h"

namespace paddle_kv {

// ValueError unless all bytes at the address are memory that copies can reach: page-locked for a GPU; for the CPU
// (device -1) mapped, and open to the access. `extent` says in the caller's words what the bytes are.
void CheckHostRange(int64_t pointer, int64_t bytes, const std::string& name, const std::string& extent, int device,
                    Access access, MappedMemory* memory);

// ValueError unless the GPU can reach the memory of a tensor that is not on a GPU.
void CheckReachable(const paddle::Tensor& host, const std::string& name, int device);

}  // namespace paddle_kv
