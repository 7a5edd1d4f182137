// What functions that Python calls with its own objects share. Only .cc files that are nothing but such functions
// include this: it brings in Python.h. Not for what needs Paddle, see ops/common/eager_call.h.
#pragma once

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000  // the library serves every Python that Paddle's does
#endif
#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>
#include <cxxabi.h>

#include <cstddef>
#include <exception>
#include <vector>

namespace paddle_kv {

// A Python exception is set already.
struct PythonError {};

// No C++ exception may get into Python. Those that are no PythonError come of a lack of memory.
template <class Body>
PyObject* GuardedFromPython(Body body) {
  try {
    return body();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const abi::__forced_unwind&) {  // the thread ends
    throw;
  } catch (const std::exception&) {
    return PyErr_NoMemory();
  }
}

inline long long IntegerIn(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}

inline PyObject* None() {
  Py_INCREF(Py_None);
  return Py_None;
}

// Memory of Python's objects, held until the end.
class PythonBuffers {
 public:
  PythonBuffers() = default;
  PythonBuffers(const PythonBuffers&) = delete;
  ~PythonBuffers() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  // Valid until the next one is taken. Null, and a Python exception, if the object gives none of this kind.
  const Py_buffer* TryTake(PyObject* object, int flags) {
    views_.emplace_back();
    if (PyObject_GetBuffer(object, &views_.back(), flags) == 0) return &views_.back();
    views_.pop_back();
    return nullptr;
  }

 private:
  std::vector<Py_buffer> views_;
};

// A new dictionary of functions by their names; null, and a Python exception, if it cannot be made.
template <std::size_t count>
PyObject* DictionaryOf(PyMethodDef (&methods)[count]) {
  PyObject* functions = PyDict_New();
  for (PyMethodDef& method : methods) {
    PyObject* function = functions == nullptr ? nullptr : PyCFunction_New(&method, nullptr);
    const bool added = function != nullptr && PyDict_SetItemString(functions, method.ml_name, function) == 0;
    Py_XDECREF(function);
    if (!added) {
      Py_XDECREF(functions);
      return nullptr;
    }
  }
  return functions;
}

}  // namespace paddle_kv
