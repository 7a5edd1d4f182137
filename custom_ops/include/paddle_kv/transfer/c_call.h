// What the C interfaces of this folder share: results, and exceptions that must not reach the caller's C.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "paddle_kv/common/status.h"

namespace paddle_kv {

// Keeps the reason for paddle_kv_queue_error, and gives -1. `device`: of a kernel that may have no code for it.
int Fail(const Status& status, int device = -1);
int Fail(const std::string& text);

inline int ResultOf(const Status& status) { return status.ok() ? 0 : Fail(status); }

template <class Function>
int Guarded(Function function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return Fail(OutOfHostMemory());
  } catch (const std::exception& error) {
    return Fail(error.what());
  }
}

}  // namespace paddle_kv
