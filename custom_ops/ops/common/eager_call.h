// Calls of operators from Python that do not go through Paddle's call of custom operators, which takes longer the more
// operators are registered. EagerCall runs the same guarded function that is registered, and makes what it takes of
// Python's objects from the function's own signature: there is nothing to keep in step.
#pragma once

#include <exception>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "paddle_api.h"

struct _object;  // Python's PyObject: only eager_call.cc and tensor_facts.cc include Python.h

namespace paddle_kv {

// The arguments of one call, taken in their order. One that is of another kind than the function takes is a Python
// exception and ends the call.
class EagerArguments {
 public:
  // `views`: the operator asks each tensor for its strides.
  EagerArguments(const char* op, _object* const* given, bool views) : op_(op), given_(given), views_(views) {}

  void Take(paddle::Tensor* value);
  void Take(paddle::optional<paddle::Tensor>* value);
  void Take(std::vector<paddle::Tensor>* value);
  void Take(paddle::optional<std::vector<paddle::Tensor>>* value);
  void Take(std::vector<int64_t>* value);
  void Take(int64_t* value);
  void Take(float* value);
  void Take(bool* value);
  void Take(std::string* value);

 private:
  _object* Next() { return given_[taken_++]; }
  [[noreturn]] void Refuse(_object* object, const char* expected) const;
  const paddle::Tensor& TensorIn(_object* object) const;
  std::vector<paddle::Tensor> TensorsIn(_object* object) const;
  int64_t IntegerIn(_object* object, const char* expected) const;

  const char* op_;
  _object* const* given_;
  bool views_;
  int taken_ = 0;
};

// Other threads of Python may run between the two. The second ends the thread while the interpreter ends, which no
// destructor and no handler of an exception survives: it belongs into neither.
void* ReleaseGil();
void TakeGil(void* state);

struct EagerOperator {
  std::string name;
  int argument_count;
  bool has_results;
  bool takes_views;  // tensors that are not contiguous
  std::vector<paddle::Tensor> (*run)(EagerArguments*);
};

// All of them, filled while the library is loaded.
std::vector<EagerOperator>& EagerOperators();

// As Paddle counts what writes in place: each tensor that the function takes as one that it may change.
template <class Argument>
void CountWrite(paddle::Tensor* tensor) {
  if constexpr (std::is_same_v<Argument, paddle::Tensor&>) tensor->bump_inplace_version();
}
template <class Argument>
void CountWrite(std::vector<paddle::Tensor>* tensors) {
  if constexpr (std::is_same_v<Argument, std::vector<paddle::Tensor>&>) {
    for (paddle::Tensor& tensor : *tensors) tensor.bump_inplace_version();
  }
}
template <class Argument>
void CountWrite(const void*) {}

template <class Signature, Signature function>
struct EagerCall;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct EagerCall<Result (*)(Arguments...), function> {
  static std::vector<paddle::Tensor> Run(EagerArguments* given) {
    std::tuple<std::decay_t<Arguments>...> taken;
    std::apply([&](auto&... each) { (given->Take(&each), ...); }, taken);
    std::vector<paddle::Tensor> results;
    std::exception_ptr failure;
    void* const state = ReleaseGil();
    try {
      if constexpr (std::is_void_v<Result>) {
        std::apply(function, taken);
      } else {
        results = std::apply(function, taken);
      }
    } catch (...) {
      failure = std::current_exception();
    }
    TakeGil(state);
    if (failure != nullptr) std::rethrow_exception(failure);
    std::apply([&](auto&... each) { (CountWrite<Arguments>(&each), ...); }, taken);
    return results;
  }

  static void Add(std::string name, bool takes_views) {
    EagerOperators().push_back({std::move(name), sizeof...(Arguments), !std::is_void_v<Result>, takes_views, &Run});
  }
};

}  // namespace paddle_kv
