#include "paddle_kv/transfer/signal_functions.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "paddle_kv/common/python_objects.h"

namespace paddle_kv {
namespace {

constexpr int kSignals = 65;

// Of the main thread, which has the interpreter's lock wherever it uses these. A forked child finds them as they are.
PyObject* handler_of = nullptr;  // of the module signal, without what makes enumerations of numbers
PyObject* set_handler = nullptr;
PyObject* stand_in = nullptr;
PyObject* numbers[kSignals];
PyObject* put_off[kSignals];  // handlers that are to be put back
bool came[kSignals];

PyObject* NoteSignal(PyObject*, PyObject* arguments) {  // the signal, the frame
  const long number = PyLong_AsLong(PyTuple_GetItem(arguments, 0));
  if (number > 0 && number < kSignals) came[number] = true;
  PyErr_Clear();
  return None();
}

bool IsPrepared() {
  if (stand_in != nullptr) return true;
  static PyMethodDef method = {"paddle_kv_notes_a_signal", &NoteSignal, METH_VARARGS, nullptr};
  PyObject* const module = PyImport_ImportModule("_signal");
  if (module == nullptr) return false;
  if (handler_of == nullptr) handler_of = PyObject_GetAttrString(module, "getsignal");
  if (set_handler == nullptr) set_handler = PyObject_GetAttrString(module, "signal");
  Py_DECREF(module);
  for (int number = 1; number < kSignals; ++number) {
    if (numbers[number] == nullptr) numbers[number] = PyLong_FromLong(number);
    if (numbers[number] == nullptr) return false;
  }
  if (handler_of == nullptr || set_handler == nullptr) return false;
  stand_in = PyCFunction_New(&method, nullptr);
  return stand_in != nullptr;
}

// Puts a handler into Python's table, and leaves the action of the signal as it is. Returns the one before, owned;
// null: a handler that came before, of any signal, has raised, and nothing is changed.
PyObject* Put(int number, PyObject* handler) {
  if (PyErr_CheckSignals() != 0) return nullptr;  // they may change the action
  struct sigaction action;
  const bool known = sigaction(number, nullptr, &action) == 0;
  PyObject* const before = PyObject_CallFunctionObjArgs(set_handler, numbers[number], handler, nullptr);
  if (known && before != nullptr) sigaction(number, &action, nullptr);
  return before;
}

// What Python has raised, put aside.
class Raised {
 public:
  ~Raised() { Drop(); }
  // In place of what was taken before: of two exceptions the later one is told.
  void Take() {
    Drop();
    PyErr_Fetch(&type_, &value_, &traceback_);
  }
  void Restore() {
    PyErr_Restore(type_, value_, traceback_);
    type_ = value_ = traceback_ = nullptr;
  }
  void Drop() {
    Py_XDECREF(type_);
    Py_XDECREF(value_);
    Py_XDECREF(traceback_);
    type_ = value_ = traceback_ = nullptr;
  }
  bool IsAny() const { return type_ != nullptr; }
  // Of the interpreter itself, not of a function of Python's.
  bool IsOwn(PyObject* type) const {
    return type_ != nullptr && traceback_ == nullptr && PyErr_GivenExceptionMatches(type_, type);
  }

 private:
  PyObject* type_ = nullptr;
  PyObject* value_ = nullptr;
  PyObject* traceback_ = nullptr;
};

bool IsStandIn(int number) {
  PyObject* const handler = PyObject_CallFunctionObjArgs(handler_of, numbers[number], nullptr);
  if (handler == nullptr) PyErr_Clear();
  Py_XDECREF(handler);  // the table has it too
  return handler == stand_in;
}

// What a handler raises, that came before, is told by a Python exception; then not all are put off.
void PutOffAll(bool* mine) {
  for (int number = 1; number < kSignals; ++number) {
    PyObject* const handler = PyObject_CallFunctionObjArgs(handler_of, numbers[number], nullptr);
    Py_XDECREF(handler);
    if (handler == nullptr) return;
    if (!PyCallable_Check(handler) || handler == stand_in) continue;  // stand_in: this call is made in another one
    came[number] = false;
    PyObject* const before = Put(number, stand_in);
    if (before == nullptr) return;
    put_off[number] = before;
    mine[number] = true;
  }
}

void PutBackAll(const bool* mine, Raised* raised) {
  // A handler that runs in here may come to this code itself: what is back must not lie in the tables any more.
  PyObject* back[kSignals] = {};
  bool is_due[kSignals] = {};
  for (int number = 1; number < kSignals; ++number) {
    if (!mine[number] || put_off[number] == nullptr) continue;
    // Not one that was set meanwhile. It fails by a handler that is back already and raises; that came once.
    while (IsStandIn(number)) {
      PyObject* const before = Put(number, put_off[number]);
      if (before == nullptr) raised->Take();
      Py_XDECREF(before);
    }
    std::swap(back[number], put_off[number]);
    is_due[number] = came[number];
  }
  for (int number = 1; number < kSignals; ++number) {
    if (is_due[number] && PyCallable_Check(back[number])) {
      PyObject* const frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
      PyObject* const given = frame == nullptr ? Py_None : frame;
      PyObject* const result = PyObject_CallFunctionObjArgs(back[number], numbers[number], given, nullptr);
      if (result == nullptr) raised->Take();
      Py_XDECREF(result);
    }
    Py_XDECREF(back[number]);
  }
}

PyObject* Undisturbed(PyObject*, PyObject* function) {
  if (!IsPrepared()) return nullptr;
  bool mine[kSignals] = {};
  Raised raised;
  PutOffAll(mine);
  if (PyErr_Occurred() != nullptr) raised.Take();
  if (raised.IsOwn(PyExc_ValueError)) raised.Drop();  // no thread in which handlers run
  PyObject* result = raised.IsAny() ? nullptr : PyObject_CallFunctionObjArgs(function, nullptr);
  if (PyErr_Occurred() != nullptr) raised.Take();
  PutBackAll(mine, &raised);
  if (!raised.IsAny()) return result;
  Py_XDECREF(result);
  raised.Restore();
  return nullptr;
}

PyObject* PutBack(PyObject*, PyObject*) {
  bool all[kSignals];
  std::fill_n(all, kSignals, true);
  std::fill_n(came, kSignals, false);  // to the parent
  Raised raised;
  PutBackAll(all, &raised);
  if (!raised.IsAny()) return None();
  raised.Restore();
  return nullptr;
}

}  // namespace
}  // namespace paddle_kv

void* paddle_kv_signal_functions() {
  using namespace paddle_kv;
  static PyMethodDef methods[] = {{"undisturbed", &Undisturbed, METH_O, nullptr},
                                  {"put_back", &PutBack, METH_NOARGS, nullptr}};
  return DictionaryOf(methods);
}
