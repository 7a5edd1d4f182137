#define Py_LIMITED_API 0x030B0000  // the library serves every Python that Paddle's does
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "paddle_kv/tiers/tier_functions.h"

#include <cxxabi.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "paddle_kv/tiers/file_ranges.h"

namespace paddle_kv {
namespace {

// Less than this is done before another thread would have got the lock.
constexpr Py_ssize_t kKeepGilBytes = 128 << 10;

using Checksum = std::uint64_t (*)(const void*, std::size_t);

// A Python exception is set already.
struct PythonError {};

// Memory of Python's objects, held until the end.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  ~Buffers() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  iovec Take(PyObject* object, int flags) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, flags) != 0) throw PythonError();
    views_.push_back(view);
    return {view.buf, static_cast<std::size_t>(view.len)};
  }

 private:
  std::vector<Py_buffer> views_;
};

long long IntegerIn(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
  return value;
}

Py_ssize_t SizeOf(PyObject* list) {
  const Py_ssize_t size = PyList_Size(list);
  if (size < 0) throw PythonError();
  return size;
}

PyObject* Entry(PyObject* tuple, Py_ssize_t position) {
  PyObject* entry = PyTuple_GetItem(tuple, position);
  if (entry == nullptr) throw PythonError();
  return entry;
}

// Other threads of Python may run meanwhile. The lock is taken back outside of any handler: that ends the thread while
// the interpreter ends.
template <class Body>
void WithoutGil(Body body) {
  std::exception_ptr failure;
  PyThreadState* state = PyEval_SaveThread();
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (failure != nullptr) std::rethrow_exception(failure);
}

// A new list with what `make` gives for each position.
template <class Make>
PyObject* ListOf(Py_ssize_t size, Make make) {
  PyObject* list = PyList_New(size);
  for (Py_ssize_t i = 0; list != nullptr && i < size; ++i) {
    PyObject* entry = make(i);
    if (entry == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SetItem(list, i, entry);
  }
  return list;
}

// No C++ exception may get into Python.
template <class Body>
PyObject* Guarded(Body body) {
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

PyObject* ReadRanges(PyObject*, PyObject* asked) {
  return Guarded([&] {
    Buffers held;
    std::vector<iovec> buffers;
    std::vector<FileRange> ranges(SizeOf(asked));
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      PyObject* range = PyList_GetItem(asked, i);
      ranges[i].descriptor = static_cast<int>(IntegerIn(Entry(range, 0)));
      ranges[i].offset = IntegerIn(Entry(range, 1));
      ranges[i].first_buffer = buffers.size();
      PyObject* parts = Entry(range, 2);
      for (Py_ssize_t part = 0; part < SizeOf(parts); ++part) {
        buffers.push_back(held.Take(PyList_GetItem(parts, part), PyBUF_WRITABLE));
      }
      ranges[i].end_buffer = buffers.size();
    }
    WithoutGil([&] { ReadFileRanges(&ranges, buffers); });
    return ListOf(ranges.size(), [&](Py_ssize_t i) { return PyLong_FromLong(ranges[i].result); });
  });
}

PyObject* Checksums(PyObject*, PyObject* given) {
  return Guarded([&] {
    const auto checksum = reinterpret_cast<Checksum>(IntegerIn(Entry(given, 0)));
    PyObject* asked = Entry(given, 1);
    Buffers held;
    std::vector<std::pair<iovec, std::size_t>> buffers(SizeOf(asked));
    std::vector<std::vector<std::uint64_t>> sums(buffers.size());
    std::size_t total_bytes = 0;
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      PyObject* one = PyList_GetItem(asked, i);
      buffers[i] = {held.Take(Entry(one, 0), PyBUF_SIMPLE), static_cast<std::size_t>(IntegerIn(Entry(one, 1)))};
      const auto& [buffer, piece_bytes] = buffers[i];
      sums[i].resize((buffer.iov_len + piece_bytes - 1) / piece_bytes);
      total_bytes += buffer.iov_len;
    }
    const auto run = [&] {
      for (std::size_t i = 0; i < buffers.size(); ++i) {
        const auto& [buffer, piece_bytes] = buffers[i];
        const char* start = static_cast<const char*>(buffer.iov_base);
        for (std::size_t piece = 0; piece < sums[i].size(); ++piece) {
          const std::size_t at = piece * piece_bytes;
          sums[i][piece] = checksum(start + at, std::min(piece_bytes, buffer.iov_len - at));
        }
      }
    };
    if (total_bytes > kKeepGilBytes) {
      WithoutGil(run);
    } else {
      run();
    }
    return ListOf(sums.size(), [&](Py_ssize_t i) {
      return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(sums[i].data()), sums[i].size() * 8);
    });
  });
}

}  // namespace
}  // namespace paddle_kv

void* paddle_kv_tier_functions() {
  using namespace paddle_kv;
  static PyMethodDef methods[] = {{"read_ranges", ReadRanges, METH_O, nullptr},
                                  {"checksums", Checksums, METH_VARARGS, nullptr}};
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
