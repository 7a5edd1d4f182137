#include "paddle_kv/transfer/id_functions.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "paddle_kv/common/python_objects.h"

namespace paddle_kv {
namespace {

// A reference that is given back.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {
    if (object == nullptr) throw PythonError();
  }
  Owned(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* Release() {
    PyObject* const object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  PyObject* object_;
};

// A bytearray for so many ids, and where they lie.
struct Ids {
  explicit Ids(Py_ssize_t size)
      : bytes(PyByteArray_FromStringAndSize(nullptr, size * static_cast<Py_ssize_t>(sizeof(std::int64_t)))),
        begin(reinterpret_cast<std::int64_t*>(PyByteArray_AsString(bytes.get()))),
        end(begin + size) {}
  Owned bytes;
  std::int64_t* begin;
  std::int64_t* end;
};

// False: one of the entries is no int, or not in [0, bound). Runs no code of Python's, so nobody changes the list.
template <class EntryAt>
bool Read(EntryAt entry_at, std::uint64_t bound, Ids* ids) {
  Py_ssize_t position = 0;
  for (std::int64_t* id = ids->begin; id != ids->end; ++id) {
    PyObject* const entry = entry_at(position++);
    if (!PyLong_CheckExact(entry)) return false;  // a bool is none
    int overflow = 0;
    *id = PyLong_AsLongLongAndOverflow(entry, &overflow);  // -1 where it does not fit: beyond every bound
    if (static_cast<std::uint64_t>(*id) >= bound) return false;
  }
  return true;
}

bool ReadList(PyObject* list, std::uint64_t bound, Ids* ids) {
  return Read([list](Py_ssize_t i) { return PyList_GetItem(list, i); }, bound, ids);
}

bool ReadArray(const Py_buffer& array, std::uint64_t bound, Ids* ids) {
  std::memcpy(ids->begin, array.buf, array.len);
  return std::all_of(ids->begin, ids->end, [bound](std::int64_t id) { return static_cast<std::uint64_t>(id) < bound; });
}

bool IsPlain(const Py_buffer& array) {
  const char* const format = array.format == nullptr ? "B" : array.format;
  return array.ndim == 1 && array.itemsize == sizeof(std::int64_t) &&
         (std::strcmp(format, "l") == 0 || std::strcmp(format, "q") == 0);
}

// Of ids that are not negative.
bool AreDistinct(const Ids& ids) {
  if (ids.end - ids.begin < 2) return true;
  std::vector<bool> seen(static_cast<std::size_t>(*std::max_element(ids.begin, ids.end)) + 1);
  for (const std::int64_t* id = ids.begin; id != ids.end; ++id) {
    if (seen[*id]) return false;
    seen[*id] = true;
  }
  return true;
}

PyObject* Answer(Ids* ids, bool are_read, bool distinct) {
  return are_read && (!distinct || AreDistinct(*ids)) ? ids->bytes.Release() : None();
}

PyObject* PlainIds(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 3) {
      PyErr_Format(PyExc_TypeError, "plain_ids takes 3 arguments; %zd were given", count);
      throw PythonError();
    }
    PyObject* const asked = given[0];
    const auto bound = static_cast<std::uint64_t>(std::max(0LL, IntegerIn(given[1])));
    const bool distinct = given[2] == Py_True;
    if (PyList_CheckExact(asked)) {
      Ids ids(PyList_Size(asked));
      return Answer(&ids, ReadList(asked, bound, &ids), distinct);
    }
    if (PyTuple_CheckExact(asked)) {
      Ids ids(PyTuple_Size(asked));
      return Answer(&ids, Read([asked](Py_ssize_t i) { return PyTuple_GetItem(asked, i); }, bound, &ids), distinct);
    }
    if (Py_TYPE(asked) == &PyRange_Type) {
      const Py_ssize_t size = PyObject_Size(asked);
      if (size < 0) PyErr_Clear();  // too many to be counted
      if (size < 0 || static_cast<std::uint64_t>(size) > bound) return None();
      const Owned list(PySequence_List(asked));
      Ids ids(size);
      return Answer(&ids, ReadList(list.get(), bound, &ids), distinct);
    }
    if (!PyObject_CheckBuffer(asked)) return None();
    PythonBuffers held;
    const Py_buffer* const array = held.TryTake(asked, PyBUF_ND | PyBUF_FORMAT);
    if (array == nullptr) PyErr_Clear();  // it has gaps, or what it holds cannot be told
    if (array == nullptr || !IsPlain(*array)) return None();
    Ids ids(array->shape[0]);
    return Answer(&ids, ReadArray(*array, bound, &ids), distinct);
  });
}

}  // namespace
}  // namespace paddle_kv

void* paddle_kv_id_functions() {
  using namespace paddle_kv;
  static PyMethodDef methods[] = {
      {"plain_ids", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&PlainIds)), METH_FASTCALL, nullptr}};
  return DictionaryOf(methods);
}
