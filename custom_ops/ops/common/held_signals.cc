// Python runs handlers of signals in the main thread between any two instructions, and what they raise leaves whatever
// runs there half done. Here a function runs to its end first: while it does, each handler is replaced by one that only
// notes that its signal has come. No instruction of Python lies between the exchange and the function.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <signal.h>

#include <iterator>

#include "python_tensor.h"

namespace paddle_kv {
namespace {

constexpr int kSignals = NSIG;

struct Held {
  PyObject* handler = nullptr;  // the one that was replaced
  struct sigaction action{};    // what the system had been told
  bool came = false;
};

// Of the main thread, under the GIL.
Held held[kSignals];
enum class State { kNone, kExchanging, kHolding } state = State::kNone;

PyObject* get_handler = nullptr;
PyObject* set_handler = nullptr;
PyObject* note_arrival = nullptr;
struct sigaction python_action{};  // what Python tells the system when a handler is set
bool knows_python_action = false;

PyObject* NoteArrival(PyObject*, PyObject* arguments) {
  int signal_number = 0;
  PyObject* frame = nullptr;
  if (!PyArg_ParseTuple(arguments, "iO", &signal_number, &frame)) return nullptr;
  held[signal_number].came = true;
  Py_RETURN_NONE;
}

// A new reference. Null, without an exception, where Python has no handler of its own: nothing is called then.
PyObject* HandlerOf(int signal_number) {
  PyObject* number = PyLong_FromLong(signal_number);
  // By the C function itself: it is asked for each signal there is.
  PyObject* handler =
      number == nullptr ? nullptr : PyCFunction_GetFunction(get_handler)(PyCFunction_GetSelf(get_handler), number);
  Py_XDECREF(number);
  if (handler == nullptr) PyErr_Clear();  // no number of a signal that there is
  if (handler != nullptr && PyCallable_Check(handler) != 0) return handler;
  Py_XDECREF(handler);
  return nullptr;
}

// False with an exception: a handler was called first, for a signal that had come before, and has raised it.
bool SetHandler(int signal_number, PyObject* handler) {
  PyObject* number = PyLong_FromLong(signal_number);
  PyObject* before = PyObject_CallFunctionObjArgs(set_handler, number, handler, nullptr);
  Py_XDECREF(number);
  Py_XDECREF(before);
  return before != nullptr;
}

bool IsSame(const struct sigaction& one, const struct sigaction& other) {
  return one.sa_handler == other.sa_handler && one.sa_flags == other.sa_flags;
}

// An exception that is set and another one that was before it, if any: the later one is raised in its context.
struct Raised {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;

  void Take() {
    PyObject *new_type, *new_value, *new_traceback;
    PyErr_Fetch(&new_type, &new_value, &new_traceback);
    if (new_type == nullptr) return;
    PyErr_NormalizeException(&new_type, &new_value, &new_traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    if (value != nullptr && value != new_value) {
      PyException_SetContext(new_value, value);  // takes the reference
    } else {
      Py_XDECREF(value);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    type = new_type;
    value = new_value;
    traceback = new_traceback;
  }

  bool Any() const { return type != nullptr; }
  void Raise() { PyErr_Restore(type, value, traceback); }
};

// Found out by setting a handler of a signal that nobody uses.
void LearnPythonAction(Raised* raised) {
  PyObject* const unhandled = PyLong_FromVoidPtr(reinterpret_cast<void*>(SIG_DFL));
  for (int number = SIGRTMAX; number >= SIGRTMIN && !knows_python_action; --number) {
    struct sigaction action;
    if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    if (!SetHandler(number, note_arrival)) break;
    knows_python_action = sigaction(number, nullptr, &python_action) == 0;
    while (!SetHandler(number, unhandled)) raised->Take();
    held[number].came = false;
  }
  raised->Take();
  Py_XDECREF(unhandled);
}

// What is needed once; false with an exception.
bool Prepare() {
  static PyMethodDef method = {"note_arrival", NoteArrival, METH_VARARGS, nullptr};
  PyObject* const module = PyImport_ImportModule("_signal");
  if (module == nullptr) return false;
  get_handler = PyObject_GetAttrString(module, "getsignal");
  set_handler = PyObject_GetAttrString(module, "signal");
  Py_DECREF(module);
  note_arrival = PyCFunction_New(&method, nullptr);
  return get_handler != nullptr && set_handler != nullptr && note_arrival != nullptr;
}

// Puts back what was replaced. Handlers that are there again may be called meanwhile, and raise.
void PutBack(Raised* raised) {
  for (int number = 1; number < kSignals; ++number) {
    Held& one = held[number];
    if (one.handler == nullptr) continue;
    PyObject* const now = HandlerOf(number);
    if (now == note_arrival) {  // else somebody, a finalizer, has set another one
      while (!SetHandler(number, one.handler)) raised->Take();
      if (!IsSame(one.action, python_action)) sigaction(number, &one.action, nullptr);
    }
    Py_XDECREF(now);
    Py_CLEAR(one.handler);
  }
}

// Calls the handlers of the signals that came meanwhile, until one raises; the others are due at Python's next look.
void CallHandlers(PyObject* const* handlers, Raised* raised) {
  PyObject* frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
  if (frame == nullptr) frame = Py_None;
  bool has_raised = false;
  for (int number = 1; number < kSignals; ++number) {
    if (handlers[number] == nullptr) continue;
    if (has_raised) {
      PyErr_SetInterruptEx(number);
      continue;
    }
    PyObject* const result = PyObject_CallFunction(handlers[number], "iO", number, frame);
    has_raised = result == nullptr;
    Py_XDECREF(result);
    if (has_raised) raised->Take();
  }
}

enum class Hold { kHeld, kNotHeld, kRaised };

Hold ReplaceHandlers() {
  for (int number = 1; number < kSignals; ++number) {
    PyObject* const handler = HandlerOf(number);
    if (handler == nullptr) continue;
    Held& one = held[number];
    // Code in C that has taken a signal from Python has to keep it.
    const bool is_pythons =
        sigaction(number, nullptr, &one.action) == 0 && one.action.sa_handler == python_action.sa_handler;
    if (!is_pythons || !SetHandler(number, note_arrival)) {
      Py_DECREF(handler);
      return is_pythons ? Hold::kRaised : Hold::kNotHeld;
    }
    if (!IsSame(one.action, python_action)) sigaction(number, &one.action, nullptr);
    one.handler = handler;
  }
  return Hold::kHeld;
}

// Ends the holding, and calls the handlers of what came meanwhile.
void End(Raised* raised) {
  PyObject* handlers[kSignals] = {};
  for (int number = 1; number < kSignals; ++number) handlers[number] = held[number].handler;
  for (PyObject* handler : handlers) Py_XINCREF(handler);
  state = State::kExchanging;
  PutBack(raised);
  bool any = false;
  for (int number = 1; number < kSignals; ++number) {
    any |= held[number].came;
    if (!held[number].came) Py_CLEAR(handlers[number]);
    held[number].came = false;
  }
  state = State::kNone;
  if (any) CallHandlers(handlers, raised);
  for (PyObject*& handler : handlers) Py_CLEAR(handler);
}

// function() without handlers in between; they are called behind it. NotImplemented, and it is not called, where a
// handler cannot be kept away, or is called while they are being exchanged.
PyObject* WithSignalsHeld(PyObject*, PyObject* function) {
  if (state == State::kHolding) return PyObject_CallNoArgs(function);
  if (state == State::kExchanging) return Py_NewRef(Py_NotImplemented);
  Raised raised;
  if (!knows_python_action) LearnPythonAction(&raised);
  PyObject* result = nullptr;
  if (!raised.Any()) {
    state = State::kExchanging;
    const Hold hold = knows_python_action ? ReplaceHandlers() : Hold::kNotHeld;
    if (hold == Hold::kNotHeld) result = Py_NewRef(Py_NotImplemented);
    if (hold == Hold::kHeld) {
      state = State::kHolding;
      result = PyObject_CallNoArgs(function);
    }
    raised.Take();
    End(&raised);
  }
  if (!raised.Any()) return result;
  Py_XDECREF(result);
  raised.Raise();
  return nullptr;
}

// In a forked child, where the thread that has forked is the main thread: another one was holding them.
PyObject* ReleaseInChild(PyObject*, PyObject*) {
  Raised raised;
  if (state != State::kNone) PutBack(&raised);
  state = State::kNone;
  for (Held& one : held) one.came = false;
  if (!raised.Any()) return Py_NewRef(Py_None);
  raised.Raise();
  return nullptr;
}

}  // namespace

PyObject* SignalFunctions() {
  static PyMethodDef methods[] = {{"with_signals_held", WithSignalsHeld, METH_O, nullptr},
                                  {"release_in_child", ReleaseInChild, METH_NOARGS, nullptr}};
  if (set_handler == nullptr && !Prepare()) return nullptr;
  return FunctionsOf(methods, std::size(methods));
}

}  // namespace paddle_kv
