#include "paddle_kv/tiers/tier_functions.h"

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "paddle_kv/common/python_objects.h"
#include "paddle_kv/tiers/file_ranges.h"
#include "paddle_kv/tiers/object_headers.h"

namespace paddle_kv {
namespace {

// Less than this is done before another thread would have got the lock.
constexpr Py_ssize_t kKeepGilBytes = 128 << 10;

// The memory of one of Python's objects.
iovec MemoryOf(PythonBuffers* held, PyObject* object, int flags) {
  const Py_buffer* const view = held->TryTake(object, flags);
  if (view == nullptr) throw PythonError();
  return {view->buf, static_cast<std::size_t>(view->len)};
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

[[noreturn]] void Refuse(const char* why) {
  PyErr_SetString(PyExc_ValueError, why);
  throw PythonError();
}

std::size_t PositiveIn(PyObject* object, const char* otherwise) {
  const long long value = IntegerIn(object);
  if (value <= 0) Refuse(otherwise);
  return static_cast<std::size_t>(value);
}

using MoveRanges = void (*)(std::vector<FileRange>*, const std::vector<iovec>&);

PyObject* Moved(PyObject* asked, int flags, MoveRanges move) {
  return GuardedFromPython([&] {
    PythonBuffers held;
    std::vector<iovec> buffers;
    std::vector<FileRange> ranges(SizeOf(asked));
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      PyObject* range = PyList_GetItem(asked, i);
      ranges[i].descriptor = static_cast<int>(IntegerIn(Entry(range, 0)));
      ranges[i].offset = IntegerIn(Entry(range, 1));
      ranges[i].first_buffer = buffers.size();
      PyObject* parts = Entry(range, 2);
      for (Py_ssize_t part = 0; part < SizeOf(parts); ++part) {
        buffers.push_back(MemoryOf(&held, PyList_GetItem(parts, part), flags));
      }
      ranges[i].end_buffer = buffers.size();
    }
    WithoutGil([&] { move(&ranges, buffers); });
    return ListOf(ranges.size(), [&](Py_ssize_t i) { return PyLong_FromLong(ranges[i].result); });
  });
}

PyObject* ReadRanges(PyObject*, PyObject* asked) { return Moved(asked, PyBUF_WRITABLE, ReadFileRanges); }

PyObject* WriteRanges(PyObject*, PyObject* asked) { return Moved(asked, PyBUF_SIMPLE, WriteFileRanges); }

PyObject* WriteTable(PyObject*, PyObject* given) {
  return GuardedFromPython([&] {
    PythonBuffers held;
    const int folder = static_cast<int>(IntegerIn(Entry(given, 0)));
    const iovec path = MemoryOf(&held, Entry(given, 1), PyBUF_SIMPLE);
    const std::string name(static_cast<const char*>(path.iov_base), path.iov_len);
    const int slab = static_cast<int>(IntegerIn(Entry(given, 2)));
    PyObject* asked = Entry(given, 3);
    std::vector<Entries> entries(SizeOf(asked));
    for (std::size_t i = 0; i < entries.size(); ++i) {
      PyObject* one = PyList_GetItem(asked, i);
      entries[i] = {IntegerIn(Entry(one, 0)), MemoryOf(&held, Entry(one, 1), PyBUF_SIMPLE)};
    }
    int result = 0;
    WithoutGil([&] { result = WriteEntries(folder, name.c_str(), slab, entries); });
    return PyLong_FromLong(result);
  });
}

Checksum ChecksumAt(PyObject* address) {
  return reinterpret_cast<Checksum>(PositiveIn(address, "the address of the checksum must be positive"));
}

PyObject* Checksums(PyObject*, PyObject* given) {
  return GuardedFromPython([&] {
    const Checksum checksum = ChecksumAt(Entry(given, 0));
    PyObject* asked = Entry(given, 1);
    PythonBuffers held;
    std::vector<std::pair<iovec, std::size_t>> buffers(SizeOf(asked));
    std::vector<std::vector<std::uint64_t>> sums(buffers.size());
    std::size_t total_bytes = 0;
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      PyObject* one = PyList_GetItem(asked, i);
      const iovec buffer = MemoryOf(&held, Entry(one, 0), PyBUF_SIMPLE);
      buffers[i] = {buffer, PositiveIn(Entry(one, 1), "the bytes of a piece must be positive")};
      sums[i].resize(PiecesOf(buffer.iov_len, buffers[i].second));
      total_bytes += buffer.iov_len;
    }
    const auto run = [&] {
      for (std::size_t i = 0; i < buffers.size(); ++i) {
        PieceChecksums(checksum, buffers[i].first, buffers[i].second, sums[i].data());
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

PyObject* WriteObjectHeaders(PyObject*, PyObject* given) {
  return GuardedFromPython([&] {
    const Checksum checksum = ChecksumAt(Entry(given, 0));
    PyObject* said = Entry(given, 1);
    PythonBuffers held;
    HeaderForm form{MemoryOf(&held, Entry(said, 0), PyBUF_SIMPLE), 0, 0, 0, 0};
    std::size_t* const sizes[] = {&form.key_at, &form.sum_at, &form.sums_at, &form.piece_bytes};
    for (Py_ssize_t i = 0; i < 4; ++i) {
      *sizes[i] = PositiveIn(Entry(said, i + 1), "the form of a header has a number that is not positive");
    }
    PyObject* asked = Entry(given, 2);
    std::vector<HeaderToWrite> headers(SizeOf(asked));
    for (std::size_t i = 0; i < headers.size(); ++i) {
      PyObject* one = PyList_GetItem(asked, i);
      headers[i].header = MemoryOf(&held, Entry(one, 0), PyBUF_WRITABLE);
      headers[i].key = MemoryOf(&held, Entry(one, 1), PyBUF_SIMPLE);
      headers[i].payload = MemoryOf(&held, Entry(one, 2), PyBUF_SIMPLE);
      if (!Fits(form, headers[i])) Refuse("an object does not fit the form of its header");
    }
    WithoutGil([&] { WriteHeaders(checksum, form, headers); });
    return None();
  });
}

}  // namespace
}  // namespace paddle_kv

void* paddle_kv_tier_functions() {
  using namespace paddle_kv;
  static PyMethodDef methods[] = {{"read_ranges", ReadRanges, METH_O, nullptr},
                                  {"write_ranges", WriteRanges, METH_O, nullptr},
                                  {"write_table", WriteTable, METH_VARARGS, nullptr},
                                  {"checksums", Checksums, METH_VARARGS, nullptr},
                                  {"write_headers", WriteObjectHeaders, METH_VARARGS, nullptr}};
  return DictionaryOf(methods);
}
