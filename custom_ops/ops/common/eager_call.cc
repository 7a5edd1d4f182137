#define Py_LIMITED_API 0x030B0000  // the library serves every Python that Paddle's does
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "eager_call.h"

#include <cxxabi.h>

#include <exception>
#include <new>

#include "paddle/phi/core/dense_tensor.h"
#include "python_tensor.h"

namespace paddle_kv {
namespace {

// A Python exception is set already.
struct PythonError {};

const EagerOperator* Of(PyObject* capsule) {
  return static_cast<const EagerOperator*>(PyCapsule_GetPointer(capsule, nullptr));
}

PyObject* ResultsOf(const EagerOperator& op, const std::vector<paddle::Tensor>& results) {
  if (!op.has_results) Py_RETURN_NONE;
  PyObject* list = PyList_New(0);
  for (const paddle::Tensor& result : results) {
    PyObject* tensor = list == nullptr ? nullptr : paddle::pybind::ToPyObject(result, false);
    if (tensor == nullptr || PyList_Append(list, tensor) < 0) {
      Py_XDECREF(tensor);
      Py_XDECREF(list);
      return nullptr;
    }
    Py_DECREF(tensor);
  }
  return list;
}

// No C++ exception may get into Python. Those of operators become what Paddle makes of them.
PyObject* Call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const EagerOperator* op = Of(self);
  if (op == nullptr) return nullptr;
  if (count != op->argument_count) {
    PyErr_Format(PyExc_TypeError, "%s takes %d arguments; %zd were given", op->name.c_str(), op->argument_count, count);
    return nullptr;
  }
  try {
    EagerArguments arguments(op->name.c_str(), given, op->takes_views);
    return ResultsOf(*op, op->run(&arguments));
  } catch (const abi::__forced_unwind&) {  // the thread ends
    throw;
  } catch (const PythonError&) {
  } catch (const PaddleError&) {
    paddle::pybind::ThrowExceptionToPython(std::current_exception());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_SystemError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_SystemError, "unknown C++ exception");
  }
  return nullptr;
}

}  // namespace

void* ReleaseGil() { return PyEval_SaveThread(); }
void TakeGil(void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }

std::vector<EagerOperator>& EagerOperators() {
  static std::vector<EagerOperator> operators;
  return operators;
}

void EagerArguments::Refuse(PyObject* object, const char* expected) const {
  PyObject* type = PyType_GetName(Py_TYPE(object));
  PyErr_Format(PyExc_TypeError, "argument %d of %s is %U; %s is expected", taken_, op_, type, expected);
  Py_XDECREF(type);
  throw PythonError();
}

const paddle::Tensor& EagerArguments::TensorIn(PyObject* object) const {
  if (!paddle::pybind::PyCheckTensor(object)) Refuse(object, "a paddle.Tensor");
  const paddle::Tensor& tensor = paddle::pybind::CastPyArg2Tensor(object, taken_);
  if (!views_ && tensor.is_dense_tensor() &&
      !static_cast<const phi::DenseTensor*>(tensor.impl().get())->meta().is_contiguous()) {
    PyErr_Format(PyExc_ValueError, "argument %d of %s is not contiguous; a contiguous tensor is expected", taken_, op_);
    throw PythonError();
  }
  return tensor;
}

std::vector<paddle::Tensor> EagerArguments::TensorsIn(PyObject* object) const {
  if (!PyList_CheckExact(object)) Refuse(object, "a list of paddle.Tensor");
  std::vector<paddle::Tensor> tensors;
  tensors.reserve(PyList_Size(object));
  for (Py_ssize_t i = 0; i < PyList_Size(object); ++i) tensors.push_back(TensorIn(PyList_GetItem(object, i)));
  return tensors;
}

int64_t EagerArguments::IntegerIn(PyObject* object, const char* expected) const {
  if (!PyLong_CheckExact(object)) Refuse(object, expected);
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}

void EagerArguments::Take(paddle::Tensor* value) { *value = TensorIn(Next()); }

// A tensor without elements counts as absent, as it does for Paddle.
void EagerArguments::Take(paddle::optional<paddle::Tensor>* value) {
  PyObject* object = Next();
  if (object == Py_None) return;
  const paddle::Tensor& tensor = TensorIn(object);
  if (tensor.initialized()) *value = tensor;
}

void EagerArguments::Take(std::vector<paddle::Tensor>* value) {
  *value = TensorsIn(Next());
  // Operators look at the first.
  if (value->empty()) {
    PyErr_Format(PyExc_ValueError, "argument %d of %s is empty; a list of paddle.Tensor is expected", taken_, op_);
    throw PythonError();
  }
}

void EagerArguments::Take(paddle::optional<std::vector<paddle::Tensor>>* value) {
  PyObject* object = Next();
  if (object == Py_None) return;
  std::vector<paddle::Tensor> tensors = TensorsIn(object);
  for (const paddle::Tensor& tensor : tensors) {
    if (!tensor.initialized()) return;
  }
  *value = std::move(tensors);
}

void EagerArguments::Take(std::vector<int64_t>* value) {
  constexpr const char* kExpected = "a list of integers";
  PyObject* list = Next();
  if (!PyList_CheckExact(list)) Refuse(list, kExpected);
  value->reserve(PyList_Size(list));
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) value->push_back(IntegerIn(PyList_GetItem(list, i), kExpected));
}

void EagerArguments::Take(int64_t* value) { *value = IntegerIn(Next(), "an integer"); }

void EagerArguments::Take(float* value) {
  PyObject* object = Next();
  if (!PyFloat_CheckExact(object)) Refuse(object, "a float");
  *value = static_cast<float>(PyFloat_AsDouble(object));
}

void EagerArguments::Take(bool* value) {
  PyObject* object = Next();
  if (object != Py_True && object != Py_False) Refuse(object, "a bool");
  *value = object == Py_True;
}

void EagerArguments::Take(std::string* value) {
  PyObject* object = Next();
  if (!PyUnicode_Check(object)) Refuse(object, "a string");
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) PyErr_Clear();  // not to be had in UTF-8: empty, as Paddle makes of it
  value->assign(text == nullptr ? "" : text, size);
}

PyObject* EagerFunctions() {
  static PyMethodDef method = {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Call)), METH_FASTCALL,
                               nullptr};
  PyObject* functions = PyDict_New();
  for (EagerOperator& op : EagerOperators()) {
    PyObject* capsule = PyCapsule_New(&op, nullptr, nullptr);
    PyObject* function = capsule == nullptr ? nullptr : PyCFunction_New(&method, capsule);
    const bool added = function != nullptr && PyDict_SetItemString(functions, op.name.c_str(), function) == 0;
    Py_XDECREF(capsule);
    Py_XDECREF(function);
    if (!added) {
      Py_DECREF(functions);
      return nullptr;
    }
  }
  return functions;
}

}  // namespace paddle_kv
