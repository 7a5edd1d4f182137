// What Python asks of each tensor before a call, in one call each instead of five of Paddle's. They say nothing where
// there is anything to object to: Python then asks Paddle, and finds the words.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "device_of.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle_kv/common/python_functions.h"
#include "python_tensor.h"
#include "validate.h"

namespace paddle_kv {
namespace {

// A dense tensor with memory; null for all else.
const phi::DenseTensor* DenseIn(PyObject* object) {
  if (!paddle::pybind::PyCheckTensor(object)) return nullptr;
  const paddle::Tensor& tensor = paddle::pybind::CastPyArg2Tensor(object, 0);
  if (!tensor.initialized() || !tensor.is_dense_tensor()) return nullptr;
  return static_cast<const phi::DenseTensor*>(tensor.impl().get());
}

// Runs `answer`; None where it throws.
template <class Answer>
PyObject* NoneIfItThrows(Answer answer) {
  try {
    return answer();
  } catch (...) {
    Py_RETURN_NONE;
  }
}

// Whether it is a dense, contiguous tensor with memory.
PyObject* IsPlain(PyObject*, PyObject* object) {
  return NoneIfItThrows([&] {
    const phi::DenseTensor* dense = DenseIn(object);
    return PyBool_FromLong(dense != nullptr && dense->meta().is_contiguous());
  });
}

// The number of DeviceOf; None for what is not a dense tensor with memory on a device of CUDA's.
PyObject* Device(PyObject*, PyObject* object) {
  return NoneIfItThrows([&]() -> PyObject* {
    if (DenseIn(object) == nullptr) Py_RETURN_NONE;
    return PyLong_FromLong(DeviceOf(paddle::pybind::CastPyArg2Tensor(object, 0)));
  });
}

// [address, dtype, device, shape..., strides...], as StridedInput takes it; None for what has no elements, no
// dimensions or no device.
PyObject* Strided(PyObject*, PyObject* object) {
  return NoneIfItThrows([&]() -> PyObject* {
    const phi::DenseTensor* dense = DenseIn(object);
    if (dense == nullptr || dense->numel() == 0 || dense->dims().size() == 0) Py_RETURN_NONE;
    const int rank = dense->dims().size();
    const auto device = DeviceOf(paddle::pybind::CastPyArg2Tensor(object, 0));
    PyObject* numbers = PyList_New(3 + 2 * rank);
    if (numbers == nullptr) return nullptr;
    Py_ssize_t at = 0;
    const auto add = [&](int64_t number) { PyList_SetItem(numbers, at++, PyLong_FromLongLong(number)); };
    add(reinterpret_cast<int64_t>(dense->data()));
    add(static_cast<int64_t>(dense->dtype()));
    add(device);
    for (int d = 0; d < rank; ++d) add(dense->dims()[d]);
    for (int d = 0; d < rank; ++d) add(dense->strides()[d]);
    if (PyErr_Occurred() == nullptr) return numbers;
    Py_DECREF(numbers);
    return nullptr;
  });
}

// Whether PADDLE_KV_CHECK=1.
PyObject* Checks(PyObject*, PyObject*) { return PyBool_FromLong(CheckRequested()); }

}  // namespace

PyObject* FactFunctions() {
  static PyMethodDef methods[] = {{"is_plain", IsPlain, METH_O, nullptr},
                                  {"device", Device, METH_O, nullptr},
                                  {"strided", Strided, METH_O, nullptr},
                                  {"checks", Checks, METH_NOARGS, nullptr}};
  PyObject* functions = PyDict_New();
  for (PyMethodDef& method : methods) {
    PyObject* function = PyCFunction_New(&method, nullptr);
    const bool added = function != nullptr && PyDict_SetItemString(functions, method.ml_name, function) == 0;
    Py_XDECREF(function);
    if (!added) {
      Py_DECREF(functions);
      return nullptr;
    }
  }
  return functions;
}

}  // namespace paddle_kv

void* paddle_kv_python_functions() {
  namespace lent = paddle::pybind;
  if (!lent::PyCheckTensor || !lent::CastPyArg2Tensor || !lent::ToPyObject || !lent::ThrowExceptionToPython) {
    return Py_BuildValue("({}{})");
  }
  return Py_BuildValue("(NN)", paddle_kv::EagerFunctions(), paddle_kv::FactFunctions());
}
