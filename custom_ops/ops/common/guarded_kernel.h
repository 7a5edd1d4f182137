// GUARDED_KERNEL(f): what every operator registers instead of PD_KERNEL(f). A C++ exception that is not Paddle's own
// would abort the process; the guard turns it into one that becomes a Python exception. Around each call is an NVTX
// range named after the operator. The same function becomes an eager call of that name.
#pragma once

#include <cctype>
#include <exception>
#include <new>
#include <string>

#include "eager_call.h"
#include "errors.h"
#include "paddle_api.h"
#include "paddle_kv/common/nvtx_range.h"

namespace paddle_kv {

// The name under which an operator is registered: "copy_blocks" for what a compiler says of a template of which
// CopyBlocks is the last argument: GCC ends it with
// "= CopyBlocks]", Clang with "= &paddle_kv::CopyBlocks]".
inline std::string OperatorName(const std::string& pretty_function) {
  std::string name;
  for (std::size_t i = pretty_function.find_last_of(" :&") + 1; pretty_function[i] != ']'; ++i) {
    const char letter = pretty_function[i];
    if (std::isupper(letter) && !name.empty()) name += '_';
    name += static_cast<char>(std::tolower(letter));
  }
  return name;
}

template <class Signature, Signature function>
const NvtxName& NvtxNameOf() {
  static const NvtxName name(OperatorName(__PRETTY_FUNCTION__).c_str());
  return name;
}

template <class Signature, Signature function>
struct Guarded;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Guarded<Result (*)(Arguments...), function> {
  static Result Call(Arguments... arguments) {
    try {
      const NvtxRange range(NvtxNameOf<Result (*)(Arguments...), function>());
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

template <class Signature, Signature function>
void AddEagerCall(bool takes_views) {
  constexpr auto kGuarded = &Guarded<Signature, function>::Call;
  EagerCall<Signature, kGuarded>::Add(OperatorName(__PRETTY_FUNCTION__), takes_views);
}

}  // namespace paddle_kv

#define GUARDED_KERNEL_WITH(function, takes_views)                         \
  (::paddle_kv::AddEagerCall<decltype(&function), &function>(takes_views), \
   PD_KERNEL(::paddle_kv::Guarded<decltype(&function), &function>::Call))

#define GUARDED_KERNEL(function) GUARDED_KERNEL_WITH(function, false)

// Of an operator that asks each tensor for its strides. Only eager calls bring tensors that are not contiguous: Paddle
// copies them before it calls what is registered.
#define GUARDED_KERNEL_OF_VIEWS(function) GUARDED_KERNEL_WITH(function, true)
