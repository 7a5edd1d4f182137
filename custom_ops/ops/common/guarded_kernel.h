// GUARDED_KERNEL(f): what every operator registers instead of PD_KERNEL(f). A C++ exception that is not Paddle's own
// would abort the process; the guard turns it into one that becomes a Python exception.
#pragma once

#include <exception>
#include <new>

#include "errors.h"
#include "paddle_api.h"

namespace paddle_kv {

template <class Signature, Signature function>
struct Guarded;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Guarded<Result (*)(Arguments...), function> {
  static Result Call(Arguments... arguments) {
    try {
      return function(arguments...);
    } catch (const PaddleError&) {
      throw;
    } catch (const std::bad_alloc& error) {
      ThrowMemoryError(error.what());
    } catch (const std::exception& error) {
      ThrowOsError(error.what());
    } catch (...) {
      ThrowOsError("unknown C++ exception");
    }
  }
};

}  // namespace paddle_kv

#define GUARDED_KERNEL(function) PD_KERNEL(::paddle_kv::Guarded<decltype(&function), &function>::Call)
