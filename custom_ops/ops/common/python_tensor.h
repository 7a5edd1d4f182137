// What Paddle lends to extensions in paddle/utils/pybind.h, of which the rest would bring in pybind11 and with it one
// version of Python. Weak: a Paddle without them has the registered operators still. Include Python.h before this.
#pragma once

#include <exception>

#include "paddle_api.h"

namespace paddle::pybind {
bool PyCheckTensor(PyObject* object) __attribute__((weak));
paddle::Tensor& CastPyArg2Tensor(PyObject* object, Py_ssize_t position) __attribute__((weak));
PyObject* ToPyObject(const paddle::Tensor& value, bool none_if_not_initialized) __attribute__((weak));
void ThrowExceptionToPython(std::exception_ptr error) __attribute__((weak));
}  // namespace paddle::pybind

namespace paddle_kv {

// New dictionaries of Python functions, by their names; null with a Python exception set.
PyObject* EagerFunctions();
PyObject* FactFunctions();

}  // namespace paddle_kv
