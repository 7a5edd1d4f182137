#include "paddle_kv/transfer/queue_functions.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "paddle_kv/common/python_objects.h"
#include "paddle_kv/transfer/queue_api.h"

namespace paddle_kv {
namespace {

constexpr int kTold = 0, kNotInTime = 1, kInterrupted = 2, kElsewhere = 3;  // what paddle_kv_queue_hear gives

[[noreturn]] void Refuse(const char* what) {
  PyErr_SetString(PyExc_TypeError, what);
  throw PythonError();
}

// What is raised already is raised once more, whatever the call raises.
template <class Call>
void KeepingError(Call call) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  call();
  PyErr_Restore(type, value, traceback);
}

Py_ssize_t AppendArray(PyObject* from, std::vector<std::int64_t>* to) {
  PythonBuffers held;
  const Py_buffer* const array = held.TryTake(from, PyBUF_ND);
  if (array == nullptr || array->ndim != 1 || array->itemsize != sizeof(std::int64_t)) {
    Refuse("a list, a tuple or an array of int64 is expected");
  }
  const auto* const first = static_cast<const std::int64_t*>(array->buf);
  to->insert(to->end(), first, first + array->shape[0]);
  return array->shape[0];
}

// Of a list, a tuple or an array, each put behind what is there.
Py_ssize_t AppendIntegers(PyObject* from, std::vector<std::int64_t>* to) {
  const bool is_list = PyList_Check(from);
  if (!is_list && !PyTuple_Check(from)) return AppendArray(from, to);
  const Py_ssize_t count = PyObject_Size(from);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const one = is_list ? PyList_GetItem(from, i) : PyTuple_GetItem(from, i);
    if (one == nullptr) throw PythonError();
    to->push_back(IntegerIn(one));
  }
  return count;
}

const std::int64_t* IdsIn(PyObject* object, PythonBuffers* held, std::int64_t* count) {
  const Py_buffer* const ids = held->TryTake(object, PyBUF_ND);
  if (ids == nullptr) throw PythonError();
  if (ids->ndim != 1 || ids->itemsize != sizeof(std::int64_t)) Refuse("ids of int64 in one dimension are expected");
  *count = ids->shape[0];
  return static_cast<const std::int64_t*>(ids->buf);
}

const std::int64_t* IdsInBytes(PyObject* object, PythonBuffers* held, std::int64_t* count) {
  constexpr auto kIdBytes = static_cast<Py_ssize_t>(sizeof(std::int64_t));
  const Py_buffer* const ids = held->TryTake(object, PyBUF_SIMPLE);
  if (ids == nullptr) throw PythonError();
  if (ids->len % kIdBytes != 0) Refuse("bytes of int64 are expected");
  *count = ids->len / kIdBytes;
  return static_cast<const std::int64_t*>(ids->buf);
}

// What Python gives of a transfer, from plan to watch.
struct GivenTransfer {
  static constexpr Py_ssize_t kArguments = 14;

  explicit GivenTransfer(PyObject* const* given) {
    std::int64_t host_count = 0;
    transfer.plan = IntegerIn(given[0]);
    transfer.direction = IntegerIn(given[1]);
    transfer.engine = IntegerIn(given[2]);
    transfer.device_ids = IdsIn(given[3], &held, &transfer.block_count);
    transfer.host_ids = IdsIn(given[4], &held, &host_count);
    if (host_count != transfer.block_count) Refuse("as many device ids as host ids are expected");
    transfer.first_layer = IntegerIn(given[5]);
    transfer.end_layer = IntegerIn(given[6]);
    transfer.layers_per_event = IntegerIn(given[7]);
    if (!PyList_Check(given[8])) Refuse("waits is no list");
    const Py_ssize_t groups = PyList_Size(given[8]);
    waits_per_group.reserve(groups);
    for (Py_ssize_t group = 0; group < groups; ++group) {
      waits_per_group.push_back(AppendIntegers(PyList_GetItem(given[8], group), &wait_events));
    }
    if (AppendIntegers(given[9], &start_events) == 0) Refuse("a start event is expected");
    if (AppendIntegers(given[10], &record_events) != groups) Refuse("an event for each group is expected");
    transfer.wait_events = wait_events.data();
    transfer.waits_per_group = waits_per_group.data();
    transfer.start_event = start_events.front();
    transfer.record_events = record_events.data();
    transfer.stream = IntegerIn(given[11]);
    transfer.token = IntegerIn(given[12]);
    transfer.watch = IntegerIn(given[13]);
  }

  PaddleKvTransfer transfer = {};
  PythonBuffers held;
  std::vector<std::int64_t> wait_events, waits_per_group, start_events, record_events;
};

PyObject* Submit(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 2 + GivenTransfer::kArguments) Refuse("submit takes 16 arguments");
    const auto function = reinterpret_cast<int (*)(const PaddleKvTransfer*)>(IntegerIn(given[0]));
    const GivenTransfer of(given + 2);
    PyThreadState* const state = of.transfer.block_count > IntegerIn(given[1]) ? PyEval_SaveThread() : nullptr;
    const int result = function(&of.transfer);
    if (state != nullptr) PyEval_RestoreThread(state);
    return PyLong_FromLong(result);
  });
}

// Whether the object has that attribute with that value, as the caller saw it.
bool IsStill(PyObject* object, const char* name, PyObject* value) {
  PyObject* const found = PyObject_GetAttrString(object, name);
  if (found == nullptr) throw PythonError();
  const int is_equal = PyObject_RichCompareBool(found, value, Py_EQ);
  Py_DECREF(found);
  if (is_equal < 0) throw PythonError();
  return is_equal != 0;
}

// Who has to know of a transfer that is alone, from the moment on in which it is submitted.
struct Knowing {
  PyObject *reports, *token, *report, *group, *sections, *alone, *reserve;

  bool IsGroupAsItWas() const {
    return IsStill(group, "sections", sections) && IsStill(group, "_inside", Py_None) &&
           IsStill(group, "alone", Py_None);
  }
  void Tell() const {
    if (PyDict_SetItem(reports, token, report) != 0) throw PythonError();
    if (PyObject_SetAttrString(group, "alone", alone) == 0) return;
    KeepingError([&] { PyDict_DelItem(reports, token); });
    throw PythonError();
  }
  // Its events, which are the only ones in there, are in use from now on.
  void TakeReserve() const {
    if (PyList_SetSlice(reserve, 0, PyList_Size(reserve), nullptr) != 0) PyErr_Clear();
  }
  void TakeBack() const {
    if (PyObject_SetAttrString(group, "alone", Py_None) != 0) PyErr_Clear();
    if (PyDict_DelItem(reports, token) != 0) PyErr_Clear();
  }
};

// Does not let go of the interpreter's lock: no other thread, and no handler of a signal, finds half of it.
PyObject* SubmitAlone(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    constexpr std::int64_t kCompute = 0, kStart = 1, kFirstGroup = 2;  // among the events
    if (count != 22) Refuse("submit_alone takes 22 arguments");
    const auto submit = reinterpret_cast<int (*)(const PaddleKvTransfer*)>(IntegerIn(given[0]));
    const auto is_capturing = reinterpret_cast<int (*)(int, std::int64_t)>(IntegerIn(given[1]));
    const auto record = reinterpret_cast<int (*)(int, std::int64_t, std::int64_t)>(IntegerIn(given[2]));
    PaddleKvTransfer transfer = {};
    PythonBuffers held;
    std::int64_t host_count = 0;
    transfer.plan = IntegerIn(given[3]);
    transfer.direction = IntegerIn(given[4]);
    transfer.engine = IntegerIn(given[5]);
    transfer.device_ids = IdsInBytes(given[6], &held, &transfer.block_count);
    transfer.host_ids = IdsInBytes(given[7], &held, &host_count);
    if (host_count != transfer.block_count) Refuse("as many device ids as host ids are expected");
    transfer.end_layer = IntegerIn(given[8]);
    transfer.layers_per_event = IntegerIn(given[9]);
    std::vector<std::int64_t> events;
    const Py_ssize_t groups = AppendIntegers(given[10], &events) - kFirstGroup;
    const bool has_layers = transfer.end_layer > 0 && transfer.layers_per_event > 0;
    if (!has_layers || groups != (transfer.end_layer - 1) / transfer.layers_per_event + 1) {
      Refuse("events of the compute stream, of the start and of each group are expected");
    }
    std::vector<std::int64_t> waits_per_group(groups);
    waits_per_group.front() = 1;
    transfer.waits_per_group = waits_per_group.data();
    transfer.wait_events = &events[kCompute];
    transfer.start_event = events[kStart];
    transfer.record_events = &events[kFirstGroup];
    transfer.stream = IntegerIn(given[11]);
    transfer.token = IntegerIn(given[12]);
    const auto device = static_cast<int>(IntegerIn(given[13]));
    const std::int64_t compute = IntegerIn(given[14]);
    transfer.watch = IntegerIn(given[16]);
    const Knowing knowing = {given[15], given[16], given[17], given[18], given[19], given[20], given[21]};
    if (!PyList_Check(knowing.reserve)) Refuse("reserve is no list");
    // 0: not captured. Before anything else is done with the stream: it would break the capture.
    if (!knowing.IsGroupAsItWas() || is_capturing(device, compute) != 0) return PyBool_FromLong(0);
    knowing.Tell();
    const bool is_submitted = record(device, events[kCompute], compute) >= 0 && submit(&transfer) >= 0;
    is_submitted ? knowing.TakeReserve() : knowing.TakeBack();
    return PyBool_FromLong(is_submitted);
  });
}

PyObject* SubmitByMarks(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 1 + GivenTransfer::kArguments) Refuse("submit_by_marks takes 15 arguments");
    const auto function = reinterpret_cast<int (*)(const PaddleKvTransfer*, const std::int64_t*)>(IntegerIn(given[0]));
    const GivenTransfer of(given + 1);
    if (of.start_events.size() != of.record_events.size()) Refuse("a start event for each group is expected");
    return PyLong_FromLong(function(&of.transfer, of.start_events.data()));
  });
}

PyObject* Mark(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 4) Refuse("mark takes 4 arguments");
    const auto function = reinterpret_cast<int (*)(std::int64_t, std::int64_t, std::int64_t)>(IntegerIn(given[0]));
    return PyLong_FromLong(function(IntegerIn(given[1]), IntegerIn(given[2]), IntegerIn(given[3])));
  });
}

PyObject* IsCapturing(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 3) Refuse("is_capturing takes 3 arguments");
    const auto function = reinterpret_cast<int (*)(int, std::int64_t)>(IntegerIn(given[0]));
    return PyLong_FromLong(function(static_cast<int>(IntegerIn(given[1])), IntegerIn(given[2])));
  });
}

PyObject* Ask(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 1) Refuse("ask takes 1 argument");
    return PyLong_FromLongLong(reinterpret_cast<std::int64_t (*)()>(IntegerIn(given[0]))());
  });
}

PyObject* Record(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 4) Refuse("record takes 4 arguments");
    const auto function = reinterpret_cast<int (*)(int, std::int64_t, std::int64_t)>(IntegerIn(given[0]));
    const std::int64_t device = IntegerIn(given[1]), event = IntegerIn(given[2]), stream = IntegerIn(given[3]);
    return PyLong_FromLong(function(static_cast<int>(device), event, stream));
  });
}

PyObject* WaitStream(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 5) Refuse("wait_stream takes 5 arguments");
    const auto function = reinterpret_cast<int (*)(int, std::int64_t, std::int64_t, std::int64_t)>(IntegerIn(given[0]));
    const std::int64_t device = IntegerIn(given[1]), stream = IntegerIn(given[2]), event = IntegerIn(given[3]);
    const std::int64_t timeout_us = IntegerIn(given[4]);
    int result = function(static_cast<int>(device), stream, event, 0);
    if (result == 1 && timeout_us != 0) {
      PyThreadState* const state = PyEval_SaveThread();
      result = function(static_cast<int>(device), stream, event, timeout_us);
      PyEval_RestoreThread(state);
    }
    return PyLong_FromLong(result);
  });
}

struct Hearing {
  int (*hear)(std::int64_t, std::int64_t);
  std::int64_t token;
  std::int64_t timeout_us;
};

// Without the interpreter's lock, but for the handlers of signals. One may come between their turn and the wait: so
// that it need not wait for the end, there is a turn from time to time.
int WaitHere(const Hearing& given) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kTurnUs = 500'000;
  const Clock::time_point started = Clock::now();
  const pid_t process = getpid();
  for (std::int64_t left_us = given.timeout_us;;) {
    const std::int64_t turn_us = left_us < 0 ? kTurnUs : std::min(left_us, kTurnUs);
    PyThreadState* const state = PyEval_SaveThread();
    const int heard = given.hear(given.token, turn_us);
    PyEval_RestoreThread(state);
    if (heard != kInterrupted && (heard != kNotInTime || turn_us == left_us)) return heard;
    if (PyErr_CheckSignals() != 0) throw PythonError();
    if (getpid() != process) return kElsewhere;  // a handler has forked: nobody tells the child of anything
    const auto gone = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - started);
    if (given.timeout_us >= 0) left_us = std::max<std::int64_t>(0, given.timeout_us - gone.count());
  }
}

PyObject* Hear(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return GuardedFromPython([&]() -> PyObject* {
    if (count != 7) Refuse("hear takes 7 arguments");
    const auto hear = reinterpret_cast<int (*)(std::int64_t, std::int64_t)>(IntegerIn(given[0]));
    const auto end = reinterpret_cast<int (*)(std::int64_t, int)>(IntegerIn(given[1]));
    PyObject *const reports = given[2], *const token = given[3], *const told = given[5], *const report = given[6];
    const Hearing hearing = {hear, IntegerIn(token), IntegerIn(given[4])};
    const pid_t process = getpid();
    const int heard = WaitHere(hearing);
    if (heard != kTold) return PyLong_FromLong(heard);
    // The former report keeps the events. A handler that runs before the first instruction of `told` may close what
    // would wait for them. Where the other thread has taken the former one by now, nobody would take this one.
    const int is_there = PyDict_Contains(reports, token);
    const bool is_kept = is_there == 0 || (is_there > 0 && PyDict_SetItem(reports, token, report) == 0);
    PyObject* const result = is_kept ? PyObject_CallFunctionObjArgs(told, nullptr) : nullptr;
    // A handler may have forked: the queue is the parent's, and a thread that is not in the child may have its lock.
    const bool is_child = getpid() != process;
    if (result == nullptr) {
      if (!is_child) KeepingError([&] { end(hearing.token, 0); });
      throw PythonError();
    }
    Py_DECREF(result);
    if (!is_child) end(hearing.token, 1);
    if (PyDict_DelItem(reports, token) != 0) PyErr_Clear();  // it took so long that the other one was told as well
    return PyLong_FromLong(heard);
  });
}

}  // namespace
}  // namespace paddle_kv

void* paddle_kv_queue_functions() {
  using namespace paddle_kv;
  static PyMethodDef methods[] = {
      {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Submit)), METH_FASTCALL, nullptr},
      {"submit_alone", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&SubmitAlone)), METH_FASTCALL,
       nullptr},
      {"submit_by_marks", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&SubmitByMarks)), METH_FASTCALL,
       nullptr},
      {"ask", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Ask)), METH_FASTCALL, nullptr},
      {"mark", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Mark)), METH_FASTCALL, nullptr},
      {"is_capturing", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&IsCapturing)), METH_FASTCALL,
       nullptr},
      {"record", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Record)), METH_FASTCALL, nullptr},
      {"wait_stream", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&WaitStream)), METH_FASTCALL, nullptr},
      {"hear", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Hear)), METH_FASTCALL, nullptr}};
  return DictionaryOf(methods);
}
