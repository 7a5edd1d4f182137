// What Python passes as block ids, checked and copied in one call. It says nothing where there is anything to object
// to, or of what it does not know: Python then looks itself, and finds the words.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <iterator>
#include <vector>

#include "python_tensor.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kFew = 32;  // compared with each other in less time than a table of all blocks takes

// Whether it is a list or a tuple of ints, as int64 in *bytes. A new reference.
bool PackSequence(PyObject* object, bool is_list, PyObject** bytes) {
  const Py_ssize_t count = is_list ? PyList_Size(object) : PyTuple_Size(object);
  *bytes = PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(std::int64_t)));
  if (*bytes == nullptr) return false;
  char* const ids = PyBytes_AsString(*bytes);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const item = is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i);
    if (!PyLong_CheckExact(item)) return false;
    const std::int64_t id = PyLong_AsLongLong(item);
    if (id == -1 && PyErr_Occurred() != nullptr) return false;
    std::memcpy(ids + i * sizeof(id), &id, sizeof(id));
  }
  return true;
}

// The same of an array of int64.
bool PackArray(PyObject* object, PyObject** bytes) {
  Py_buffer view;
  if (PyObject_CheckBuffer(object) == 0 || PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_ND) != 0)
    return false;
  const bool fits = view.ndim == 1 && view.itemsize == sizeof(std::int64_t) && view.format != nullptr &&
                    (std::strcmp(view.format, "l") == 0 || std::strcmp(view.format, "q") == 0);
  if (fits) *bytes = PyBytes_FromStringAndSize(static_cast<const char*>(view.buf), view.len);
  PyBuffer_Release(&view);
  return *bytes != nullptr;
}

bool AreBlocks(const std::int64_t* ids, std::int64_t count, std::int64_t block_count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (static_cast<std::uint64_t>(ids[i]) >= static_cast<std::uint64_t>(block_count)) return false;
  }
  return true;
}

bool AreDistinct(const std::int64_t* ids, std::int64_t count, std::int64_t block_count) {
  if (count <= kFew) {
    for (std::int64_t i = 1; i < count; ++i) {
      for (std::int64_t j = 0; j < i; ++j) {
        if (ids[i] == ids[j]) return false;
      }
    }
    return true;
  }
  std::vector<bool> seen(block_count);
  for (std::int64_t i = 0; i < count; ++i) {
    if (seen[ids[i]]) return false;
    seen[ids[i]] = true;
  }
  return true;
}

// (ids, number of blocks, whether each may occur only once): bytes of int64, or None.
PyObject* PackedIds(PyObject*, PyObject* const* given, Py_ssize_t given_count) {
  if (given_count != 3)
    return PyErr_Format(PyExc_TypeError, "packed_ids takes 3 arguments; %zd were given", given_count);
  const std::int64_t block_count = PyLong_AsLongLong(given[1]);
  if (block_count == -1 && PyErr_Occurred() != nullptr) return nullptr;
  PyObject* bytes = nullptr;
  const bool is_list = PyList_CheckExact(given[0]);
  bool fits =
      is_list || PyTuple_CheckExact(given[0]) ? PackSequence(given[0], is_list, &bytes) : PackArray(given[0], &bytes);
  if (fits) {
    const auto* const ids = reinterpret_cast<const std::int64_t*>(PyBytes_AsString(bytes));
    const std::int64_t count = PyBytes_Size(bytes) / static_cast<Py_ssize_t>(sizeof(std::int64_t));
    try {
      fits = AreBlocks(ids, count, block_count) && (given[2] != Py_True || AreDistinct(ids, count, block_count));
    } catch (const std::exception&) {
      fits = false;
    }
  }
  if (fits) return bytes;
  PyErr_Clear();
  Py_XDECREF(bytes);
  Py_RETURN_NONE;
}

}  // namespace

PyObject* IdFunctions() {
  static PyMethodDef methods[] = {
      {"packed_ids", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&PackedIds)), METH_FASTCALL, nullptr}};
  return FunctionsOf(methods, std::size(methods));
}

}  // namespace paddle_kv
