"""How Python calls the library's queue. The library is replaced: its functions, which a build without CUDA does not
have, note what they are given. With the true ones: tests/gpu/test_transfer_queue.py."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import select
import signal
import threading
import time
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_kv import CudaError
from paddle_kv.backend import transfer_queue
from paddle_kv.ops import _library
from tests import c_header
from tests.schedule.rig import WAIT_S

HEADER = "transfer/queue_api.h"
FUNCTIONS = _library.queue_functions()
SUBMIT, HEAR = FUNCTIONS["submit"], FUNCTIONS["hear"]


class Transfer(ctypes.Structure):
    _fields_ = c_header.members(HEADER, "PaddleKvTransfer")


def numbers(address: int, count: int) -> list[int]:
    return (ctypes.c_int64 * count).from_address(address)[:]


class Function:
    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name, self._call = name, call
        self.argtypes: list[Any] = []
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> Any:
        return self._call(self.name, arguments)


class Library:
    """``calls``: (whether the GIL was given up, function, arguments); ``answers``: what a function does, else 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, str, tuple[Any, ...]]] = []
        self.answers: dict[str, Callable[..., Any]] = {}
        self.functions: dict[str, Function] = {}

    def load(self, path: str, gives_up_the_gil: bool) -> Any:
        assert path == str(_library.LIBRARY)
        library = self

        class Loaded:
            def __getattr__(self, name: str) -> Function:
                found = library.functions[name] = Function(name, call)
                setattr(self, name, found)
                return found

        def call(name: str, arguments: tuple[Any, ...]) -> Any:
            short = name.removeprefix("paddle_kv_").removeprefix("queue_")
            given = tuple(value_of(one) for one in arguments)
            library.calls.append((gives_up_the_gil, short, given))
            answer = library.answers.get(short, lambda *_: 0)
            return answer(*arguments) if callable(answer) else answer

        return Loaded()


def value_of(argument: Any) -> Any:
    if isinstance(argument, ctypes.Array):
        return list(argument)
    return "pointer" if type(argument).__name__ == "CArgObject" else argument


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: made.load(path, True))
    monkeypatch.setattr(ctypes, "PyDLL", lambda path: made.load(path, False))
    transfer_queue._functions.cache_clear()

    def submit(given: Any) -> int:
        made.calls.append((False, "submit", ("pointer",)))
        return int(made.answers.get("submit", lambda *_: 0)(given.contents))

    called = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Transfer))(submit)
    address = ctypes.cast(called, ctypes.c_void_p).value
    function = functools.partial(SUBMIT, address, transfer_queue.FEW_BLOCKS)
    monkeypatch.setattr(transfer_queue, "_submit", lambda: function)

    def submit_by_marks(given: Any, starts: Any) -> int:
        made.calls.append((False, "submit_by_marks", ("pointer", "pointer")))
        return int(made.answers.get("submit_by_marks", lambda *_: 0)(given.contents, starts))

    def answering(name: str, *types: Any) -> Any:
        def function(*given: int) -> int:
            made.calls.append((False, name, given))
            return int(made.answers.get(name, lambda *_: 0)(*given))

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(function)

    one, device = ctypes.c_int64, ctypes.c_int
    called_by_address = {
        "submit_by_marks": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Transfer), ctypes.POINTER(one))(
            submit_by_marks
        ),
        "mark": answering("mark", one, one, one),
        "is_capturing": answering("is_capturing", device, one),
        "record": answering("record", device, one, one),
        "wait_stream": answering("wait_stream", device, one, one, one),
    }
    by_address = {
        name: functools.partial(FUNCTIONS[name], ctypes.cast(function, ctypes.c_void_p).value)
        for name, function in called_by_address.items()
    }

    def asking(name: str) -> Any:
        def function() -> int:
            made.calls.append((False, name, ()))
            return int(made.answers.get(name, lambda: 0)())

        return ctypes.CFUNCTYPE(one)(function)

    asked = {name: asking(name) for name in ("enqueued", "submitted")}
    by_address |= {
        name: functools.partial(FUNCTIONS["ask"], ctypes.cast(function, ctypes.c_void_p).value)
        for name, function in asked.items()
    }
    monkeypatch.setattr(transfer_queue, "_by_address", lambda name, caller="": by_address[name])

    def hear(*given: int) -> int:
        made.calls.append((True, "hear", given))
        return int(made.answers.get("hear", lambda *_: 0)(*given))

    waits = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)(hear)
    hears = functools.partial(HEAR, ctypes.cast(waits, ctypes.c_void_p).value, 0)  # none is told
    monkeypatch.setattr(transfer_queue, "_hear", lambda: hears)
    yield made
    transfer_queue._functions.cache_clear()


def test_functions_and_structure_are_those_of_the_header(library: Library) -> None:
    transfer_queue._functions()
    declared = c_header.functions(HEADER)
    assert len(declared) == 25
    by_address = ("submit", "submit_by_marks", "mark", "is_capturing", "record", "wait_stream", "hear", "end_hearing")
    by_no_ctypes = (*by_address, "enqueued", "submitted")
    for name in by_no_ctypes:
        declared.pop(f"paddle_kv_queue_{name}")
    typed = {name: (function.restype, function.argtypes) for name, function in library.functions.items()}
    untyped = set(declared) - set(typed)
    assert typed | dict.fromkeys(untyped, (ctypes.c_int, [])) == declared  # ctypes takes an int for granted
    assert c_header.members(HEADER, "PaddleKvDevicePlan") == list(transfer_queue._DevicePlan._fields_)


def test_what_a_submission_hands_over(library: Library) -> None:
    seen: list[Any] = []

    def submit(given: Any) -> int:
        pointers = {"device_ids": 3, "host_ids": 3, "wait_events": 3, "waits_per_group": 2, "record_events": 2}
        fields = {name: getattr(given, name) for name, _ in given._fields_}
        seen.append({**fields, **{name: numbers(fields[name], count) for name, count in pointers.items()}})
        return 0

    library.answers["submit"] = submit
    asked: Any = {"plan": 1, "direction": 2, "engine": 3, "layers_per_event": 4, "start_event": 5, "stream": 6}
    ids = {"device_ids": np.array([7, 8, 9]), "host_ids": np.array([10, 11, 12])}
    transfer_queue.submit(**asked, **ids, layers=range(13, 17), waits=[[18, 19], [20]], record_events=[21, 22])
    kinds: Any = {"waits": [array("q", [18, 19]), (20,)], "record_events": array("q", [21, 22])}
    transfer_queue.submit(**asked, **ids, layers=range(13, 17), **kinds, token=23, watch=24)
    expected = {
        **asked,
        "device_ids": [7, 8, 9],
        "host_ids": [10, 11, 12],
        "block_count": 3,
        "first_layer": 13,
        "end_layer": 17,
        "wait_events": [18, 19, 20],
        "waits_per_group": [2, 1],
        "record_events": [21, 22],
    }
    assert seen == [{**expected, "token": 0, "watch": -1}, {**expected, "token": 23, "watch": 24}]


def test_what_a_save_by_marks_hands_over(library: Library) -> None:
    seen: list[Any] = []

    def submit(given: Any, starts: Any) -> int:
        lists = {"device_ids": 2, "wait_events": 3, "record_events": 2}
        seen.append({name: numbers(getattr(given, name), count) for name, count in lists.items()})
        seen[-1] |= {name: getattr(given, name) for name in ("first_layer", "end_layer", "token", "stream", "watch")}
        seen[-1]["start_events"] = starts[:2]
        return 0

    library.answers["submit_by_marks"] = submit
    ids = np.array([7, 8])
    asked: Any = {"plan": 1, "direction": 0, "engine": 3, "layers_per_event": 2, "stream": 6, "token": 9}
    groups: Any = {"marks": [[11, 12], [13]], "start_events": [14, 15], "record_events": [16, 17]}
    transfer_queue.submit_by_marks(**asked, device_ids=ids, host_ids=ids, layers=range(3), **groups)
    assert seen == [
        {
            "device_ids": [7, 8],
            "wait_events": [11, 12, 13],
            "record_events": [16, 17],
            "start_events": [14, 15],
            "first_layer": 0,
            "end_layer": 3,
            "token": 9,
            "stream": 6,
            "watch": -1,
        }
    ]
    with pytest.raises(TypeError, match="a start event for each group is expected"):
        transfer_queue.submit_by_marks(
            **asked, device_ids=ids, host_ids=ids, layers=range(3), **{**groups, "start_events": [14]}
        )
    assert len(seen) == 1


@pytest.mark.parametrize(("answer", "expected"), [(0, True), (1, True), (2, False), (3, None)])
def test_what_a_mark_answers(library: Library, answer: int, expected: bool | None) -> None:
    library.answers["mark"] = lambda *_: answer
    assert transfer_queue.mark(5, 6, 7) is expected
    assert library.calls == [(False, "mark", (5, 6, 7))]


@pytest.mark.parametrize("ends", [False, True])
def test_what_was_enqueued_by_marks(library: Library, ends: bool) -> None:
    def take(token: int, first: int, is_end: bool, room: Any) -> int:
        assert (token, first, is_end, len(room)) == (5, 2, ends, 9)
        room[:3] = [8, 0, 4]
        return 3

    library.answers["take_enqueued"] = take
    assert transfer_queue.take_enqueued(5, 2, 9, ends=ends) == [8, 0, 4]


def others_run_in(call: Callable[[], object], expected: bool) -> bool:
    """Whether another thread runs Python in the call, which sleeps: as expected in one of a few calls, since the
    machine may hold up one thread while the other one runs."""
    begun, over, steps = threading.Event(), [], [0]

    def count() -> None:
        begun.set()
        while not over:
            steps[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    assert begun.wait(WAIT_S)
    found = not expected
    for _ in range(10):
        before = steps[0]
        call()
        found = steps[0] - before > 5
        if found == expected:
            break
    over.append(True)
    thread.join(WAIT_S)
    return found


@pytest.mark.parametrize("block_count", [transfer_queue.FEW_BLOCKS, transfer_queue.FEW_BLOCKS + 1])
def test_a_submission_of_many_blocks_gives_up_the_gil(block_count: int) -> None:
    """As what submits stands the C library's nanosleep, to which plan and direction are seconds and nanoseconds."""
    sleep = ctypes.cast(ctypes.CDLL(None).nanosleep, ctypes.c_void_p).value
    ids, few = np.arange(block_count), transfer_queue.FEW_BLOCKS
    is_many = block_count > few
    submit = functools.partial(SUBMIT, sleep, few, 0, 200_000_000, 0, ids, ids, 0, 1, 1, [()], [2], [3], 4, 0, -1)
    assert others_run_in(submit, is_many) is is_many


def test_a_wait_for_an_event_that_is_pending_gives_up_the_gil() -> None:
    """As what waits stands the C library's epoll_wait, with the time-out in milliseconds: it tells an edge at once, and
    then waits for the next one."""
    wait = ctypes.cast(ctypes.CDLL(None).epoll_wait, ctypes.c_void_p).value
    events, ends = ctypes.create_string_buffer(64), os.pipe()
    with select.epoll() as edges:
        edges.register(ends[0], select.EPOLLIN | select.EPOLLET)
        answers: list[int] = []

        def wait_stream() -> None:
            os.write(ends[1], b"1")
            answers.append(FUNCTIONS["wait_stream"](wait, edges.fileno(), ctypes.addressof(events), 1, 200))

        assert others_run_in(wait_stream, True)
    assert set(answers) == {0}
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("at", "wrong", "words"),
    [
        (5, np.arange(3, dtype=np.int32), "int64"),
        (5, np.arange(6).reshape(3, 2), "one dimension"),
        (5, [1, 2, 3], "bytes-like|buffer"),
        (6, np.arange(4), "as many"),
        (6, np.arange(6)[::2], "contiguous"),
        (10, ((), ()), "no list"),
        (10, [(), 7], "a list, a tuple or an array of int64"),
        (10, [(), ("event",)], "int"),
        (10, [()], "event for each group"),
        (11, [], "a start event"),
        (11, 6, "a list, a tuple or an array of int64"),
        (11, array("i", [6]), "a list, a tuple or an array of int64"),
        (12, np.zeros((2, 1), np.int64), "a list, a tuple or an array of int64"),
        (12, np.arange(4)[::2], "a list, a tuple or an array of int64"),
        (12, array("q", [7]), "an event for each group"),
        (12, [1, 2, 3], "event for each group"),
        (12, [1, None], "int"),
        (13, 2**63, "large|big|convert"),
        (14, "token", "int"),
        (15, None, "int"),
    ],
)
def test_arguments_of_a_submission_that_cannot_be_right_reach_nobody(at: int, wrong: Any, words: str) -> None:
    called: list[Any] = []
    note = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda given: called.append(given) or 0)
    address = ctypes.cast(note, ctypes.c_void_p).value
    given: list[Any] = [address, 10, 1, 2, 3, np.arange(3), np.arange(3), 0, 2, 1, [(), [5]], [6], [7, 8], 9, 10, 11]
    assert SUBMIT(*given) == 0 and len(called) == 1
    given[at] = wrong
    with pytest.raises((TypeError, ValueError, OverflowError, BufferError), match=words):
        SUBMIT(*given)
    with pytest.raises(TypeError, match="16 arguments"):
        SUBMIT(*given[:-1])
    with pytest.raises(TypeError, match="15 arguments"):
        FUNCTIONS["submit_by_marks"](address, *given[3:])
    with pytest.raises(TypeError, match="4 arguments"):
        FUNCTIONS["mark"](address, 1, 2)
    with pytest.raises(TypeError, match="3 arguments"):
        FUNCTIONS["is_capturing"](address, 1)
    with pytest.raises(TypeError, match="5 arguments"):
        FUNCTIONS["wait_stream"](address, 1, 2, 3)
    with pytest.raises(TypeError, match="4 arguments"):
        FUNCTIONS["record"](address, 1, 2)
    with pytest.raises(TypeError, match="1 argument"):
        FUNCTIONS["ask"]()
    assert len(called) == 1


# ---- hearing ----
TOLD, NOT_IN_TIME, INTERRUPTED, ELSEWHERE = range(4)


class Ears:
    """In place of the library: what waits, and what is told of the end of it."""

    def __init__(self, *answers: int) -> None:
        self.waits: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []
        self.reports: dict[int, Any] = {7: "the former one"}
        left = list(answers)

        def wait(token: int, timeout_us: int) -> int:
            self.waits.append((token, timeout_us))
            time.sleep(0.02)
            return left.pop(0)

        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)(wait),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int)(lambda *end: self.ends.append(end) or 0),
        )

    def hear(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, told: Any) -> bool:
        library = SimpleNamespace(
            **dict(zip(("paddle_kv_queue_hear", "paddle_kv_queue_end_hearing"), self._functions, strict=True))
        )
        monkeypatch.setattr(transfer_queue, "_functions", lambda: library)
        transfer_queue._hear.cache_clear()
        try:
            return transfer_queue.hear(7, timeout_s, told, self.reports, "the other one")  # type: ignore[arg-type]
        finally:
            transfer_queue._hear.cache_clear()


@pytest.mark.parametrize(("timeout_s", "timeout_us"), [(None, 500_000), (1.5, 500_000), (0.25, 250_000), (0.0, 0)])
def test_whoever_is_told_calls_the_function_once(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, timeout_us: int
) -> None:
    ears, called = Ears(TOLD), []

    class Result:
        pass

    def told() -> Result:
        called.append((threading.current_thread(), dict(ears.reports), list(ears.ends)))
        result = Result()
        called.append(weakref.ref(result))
        return result

    assert ears.hear(monkeypatch, timeout_s, told) is True
    assert called[0] == (threading.current_thread(), {7: "the other one"}, [])
    assert called[1]() is None and len(called) == 2
    assert ears.waits == [(7, timeout_us)] and ears.ends == [(7, 1)] and ears.reports == {}


@pytest.mark.parametrize("answers", [[NOT_IN_TIME], [ELSEWHERE], [INTERRUPTED, ELSEWHERE]])
def test_whoever_is_not_told_calls_nothing(monkeypatch: pytest.MonkeyPatch, answers: list[int]) -> None:
    ears = Ears(*answers)
    assert ears.hear(monkeypatch, 0.4, pytest.fail) is False
    assert len(ears.waits) == len(answers) and ears.ends == [] and ears.reports == {7: "the former one"}


def test_a_function_that_raises_leaves_it_to_the_other_report(monkeypatch: pytest.MonkeyPatch) -> None:
    ears = Ears(TOLD)

    def told() -> None:
        raise KeyboardInterrupt("of a handler")

    with pytest.raises(KeyboardInterrupt, match="of a handler"):
        ears.hear(monkeypatch, None, told)
    assert ears.ends == [(7, 0)] and ears.reports == {7: "the other one"}


def test_a_function_that_takes_long_finds_that_the_other_report_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ears = Ears(TOLD)
    assert ears.hear(monkeypatch, None, lambda: ears.reports.pop(7)) is True
    assert ears.ends == [(7, 1)] and ears.reports == {}


@pytest.mark.parametrize("is_raising", [False, True])
def test_nothing_is_kept_for_nobody_where_the_former_report_was_taken(
    monkeypatch: pytest.MonkeyPatch, is_raising: bool
) -> None:
    ears, called = Ears(TOLD), []
    ears.reports.clear()

    def told() -> None:
        called.append(dict(ears.reports))
        if is_raising:
            raise KeyboardInterrupt("of a handler")

    with pytest.raises(KeyboardInterrupt) if is_raising else contextlib.nullcontext():
        ears.hear(monkeypatch, None, told)
    assert called == [{}] and ears.reports == {} and ears.ends == [(7, 0 if is_raising else 1)]


@pytest.mark.parametrize("is_raising", [False, True])
def test_a_child_that_begins_behind_the_hearing_does_nothing_of_the_queue(
    monkeypatch: pytest.MonkeyPatch, is_raising: bool
) -> None:
    """The thread of the queue, which the child has not, may hold its lock."""
    ears, children = Ears(TOLD), []

    def told() -> None:  # as a handler that comes at its first instruction
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            children.append(os.fork())
        if children == [0]:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WAIT_S))  # whatever becomes of it
        if is_raising:
            raise KeyboardInterrupt("of the handler")

    raised = False
    try:
        ears.hear(monkeypatch, None, told)
    except KeyboardInterrupt:
        raised = True
    finally:
        if children == [0]:
            os._exit(len(ears.ends))
    assert raised == is_raising and ears.ends == [(7, 0 if is_raising else 1)]
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


def test_there_is_a_turn_for_handlers_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that comes right before the wait would wait for its end."""
    ears = Ears(NOT_IN_TIME, INTERRUPTED, NOT_IN_TIME, TOLD)
    assert ears.hear(monkeypatch, None, list) is True
    assert ears.waits == [(7, 500_000)] * 4


def test_each_turn_is_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ears = Ears(INTERRUPTED, INTERRUPTED, INTERRUPTED, NOT_IN_TIME)
    assert ears.hear(monkeypatch, 0.2, pytest.fail) is False
    turns_us = [turn_us for _, turn_us in ears.waits]
    assert turns_us[0] == 200_000
    assert all(after <= max(0, before - 20_000) for before, after in itertools.pairwise(turns_us))
    ears = Ears(*[NOT_IN_TIME] * 4)
    assert ears.hear(monkeypatch, 0.55, pytest.fail) is False
    assert ears.waits[0] == (7, 500_000) and 0 <= ears.waits[-1][1] < 500_000
    ears = Ears(INTERRUPTED, NOT_IN_TIME)
    assert ears.hear(monkeypatch, 0.001, pytest.fail) is False
    assert [turn_us for _, turn_us in ears.waits] == [1000, 0]  # not less: that has no end


def test_a_child_of_a_handler_does_not_go_on_hearing() -> None:
    """As what waits stands the C library's strlen, see below."""
    string, children = ctypes.create_string_buffer(b"x" * INTERRUPTED), []
    signals = itertools.count(1)

    def fork(*_: Any) -> None:
        if next(signals) > 1:
            return  # one child is enough; a fork may take longer than it is until the next signal
        signal.setitimer(signal.ITIMER_REAL, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            children.append(os.fork())
        if children[0]:
            string.value = b""
        else:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WAIT_S))  # whatever becomes of it

    with soon(fork):
        answer = HEAR(address_of("strlen"), address_of("labs"), {}, ctypes.addressof(string), -1, list, list)
        if children == [0]:
            os._exit(answer)
    assert answer == TOLD
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == ELSEWHERE


@contextlib.contextmanager
def soon(handler: Callable[..., Any]) -> Iterator[None]:
    """A signal comes, again and again."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def address_of(name: str) -> int | None:
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value


def test_signal_handlers_run_while_a_thread_hears() -> None:
    """As what waits stands the C library's strlen: the token is a string, as long as what it answers."""
    string, called = ctypes.create_string_buffer(b"x" * INTERRUPTED), []

    def handle(*_: Any) -> None:
        called.append("handler")
        if len(called) == 3:
            string.value = b""

    with soon(handle):
        told = functools.partial(called.append, "told")
        answer = HEAR(address_of("strlen"), address_of("labs"), {}, ctypes.addressof(string), -1, told, pytest.fail)
    assert answer == TOLD
    assert called.count("told") == 1 and called[:4] == ["handler"] * 3 + ["told"]


def test_a_handler_that_raises_ends_the_hearing() -> None:
    string = ctypes.create_string_buffer(b"x" * INTERRUPTED)

    def handle(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), soon(handle):
        HEAR(address_of("strlen"), 0, {}, ctypes.addressof(string), -1, pytest.fail, pytest.fail)


def test_other_threads_run_while_one_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what waits stands the C library's usleep, to which the token is microseconds."""
    over, steps = [], [0]

    def count() -> None:
        while not over:
            steps[0] += 1
            time.sleep(1e-3)

    thread = threading.Thread(target=count)
    thread.start()
    before = steps[0]
    assert HEAR(address_of("usleep"), address_of("labs"), {}, 500_000, -1, list, pytest.fail) == TOLD
    assert steps[0] - before > 5
    over.append(True)
    thread.join(WAIT_S)


def test_arguments_of_hearing_that_cannot_be_right() -> None:
    right = (1, 2, {}, 3, 4, list, list)
    for given in ((), right[:-1], (*right, 5), (None, *right[1:]), (1, 2, {}, "token", 4, list, list)):
        with pytest.raises(TypeError):
            HEAR(*given)


def test_what_a_plan_between_two_gpus_hands_over(library: Library) -> None:
    seen: list[Any] = []
    counts = {"device_pointers": 6, "other_pointers": 6, "device_strides": 2, "other_strides": 2, "block_bytes": 2}

    def register(pointer: Any) -> int:
        fields = {name: getattr(pointer._obj, name) for name, _ in pointer._obj._fields_}
        arrays = {name: (ctypes.c_int64 * count).from_address(fields[name])[:] for name, count in counts.items()}
        seen.append({**fields, **arrays})
        return 0

    library.answers["register_device_plan"] = register
    numbers = {"number": 1, "device": 2, "device_blocks": 3, "other_blocks": 4}
    lists = {name: [100 * at + i for i in range(count)] for at, (name, count) in enumerate(counts.items(), 1)}
    transfer_queue.register_device_plan(*numbers.values(), *lists.values(), on_other_gpu=True)
    assert seen == [{**numbers, **lists, "layer_count": 3, "tensors_per_layer": 2, "on_other_gpu": 1}]


def test_arguments_and_which_calls_give_up_the_gil(library: Library) -> None:
    """Those that may wait for CUDA or for another thread have to: that one may want the GIL."""
    seen: list[list[int]] = []
    library.answers["set_costs"] = lambda device, costs: seen.append((ctypes.c_int64 * 84).from_address(costs)[:]) or 0
    transfer_queue.open_stream(1, 2, urgent=True)
    transfer_queue.close_stream(2)
    transfer_queue.watch(1, 3, [4, 5])
    transfer_queue.push_device(1)
    transfer_queue.pop_device()
    transfer_queue.set_costs(1, list(range(84)))
    *calls, (gave_up, name, (device, _)) = library.calls
    assert calls == [
        (True, "open", (1, 2, True)),
        (True, "close", (2,)),
        (False, "watch", (1, 3, [4, 5], 2)),
        (True, "push_device", (1,)),
        (True, "pop_device", ()),
    ]
    assert (gave_up, name, device, seen) == (True, "set_costs", 1, [list(range(84))])


@pytest.mark.parametrize(
    ("call", "name", "answer", "expected", "called"),
    [
        (lambda: transfer_queue.completions_fd(), "completions_open", 17, 17, (True, ())),
        (lambda: transfer_queue.completions_fd(), "completions_open", 0, 0, (True, ())),
        (lambda: transfer_queue.enqueued(), "enqueued", 18, 18, (False, ())),
        (lambda: transfer_queue.submitted(), "submitted", 19, 19, (False, ())),
        (lambda: transfer_queue.flush(1), "flush", 0, True, (True, (1, -1))),
        (lambda: transfer_queue.flush(1, 2.25), "flush", 1, False, (True, (1, 2_250_000))),
        (lambda: transfer_queue.flush(1, -3.0), "flush", 1, False, (True, (1, 0))),
        (lambda: transfer_queue.is_capturing(1, 2), "is_capturing", 0, False, (False, (1, 2))),
        (lambda: transfer_queue.is_capturing(1, 2), "is_capturing", 1, True, (False, (1, 2))),
        (lambda: transfer_queue.record(1, 2, 3), "record", 0, None, (False, (1, 2, 3))),
        (lambda: transfer_queue.wait_stream(1, 2, 3, None), "wait_stream", 0, True, (False, (1, 2, 3, 0))),
        (lambda: transfer_queue.wait_stream(1, 2, 3, 0.0), "wait_stream", 1, False, (False, (1, 2, 3, 0))),
        (lambda: transfer_queue.query(1, *range(2, 7)), "query", 0, True, (True, (1, [2, 3, 4, 5, 6], 5))),
        (lambda: transfer_queue.query(1, *range(2, 6)), "query", 0, True, (False, (1, [2, 3, 4, 5], 4))),
        (lambda: transfer_queue.query(1, 2), "query", 1, False, (False, (1, [2], 1))),
        (lambda: transfer_queue.forget(1), "forget", 1, True, (False, (1,))),
        (lambda: transfer_queue.forget(1), "forget", 0, False, (False, (1,))),
    ],
)
def test_what_is_asked_and_what_is_answered(
    library: Library, call: Callable[[], Any], name: str, answer: int, expected: Any, called: tuple[bool, Any]
) -> None:
    library.answers[name] = lambda *_: answer
    found = call()
    assert (found, type(found)) == (expected, type(expected))
    gave_up, arguments = called
    assert library.calls == [(gave_up, name, arguments)]


@pytest.mark.parametrize(("timeout_s", "timeout_us"), [(None, -1), (2e-6, 2)])
@pytest.mark.parametrize(("answer", "expected"), [(0, True), (1, False)])
def test_others_run_while_an_event_is_pending(
    library: Library, timeout_s: float | None, timeout_us: int, answer: int, expected: bool
) -> None:
    library.answers["wait_stream"] = lambda *given: 1 if len(library.calls) == 1 else answer
    assert transfer_queue.wait_stream(1, 2, 3, timeout_s) is expected
    assert library.calls == [(False, "wait_stream", (1, 2, 3, 0)), (False, "wait_stream", (1, 2, 3, timeout_us))]


@pytest.mark.parametrize(("first_dropped", "expected"), [(-1, None), (0, 0), (5, 5)])
def test_which_layer_is_the_first_that_is_dropped(library: Library, first_dropped: int, expected: int | None) -> None:
    def cancel(stream: int, token: int, layer: Any) -> int:
        layer._obj.value = first_dropped
        return 0

    library.answers["cancel"] = cancel
    assert transfer_queue.cancel(1, 2) == expected
    assert library.calls == [(False, "cancel", (1, 2, "pointer"))]


def test_all_reports_are_taken_in_their_order(library: Library) -> None:
    reported = list(range(1000, 2000))

    def take(tokens: Any, capacity: int) -> int:
        some = reported[:capacity]
        del reported[:capacity]
        tokens[: len(some)] = some
        return len(some)

    library.answers["completions_take"] = take
    assert transfer_queue.take_completions() == list(range(1000, 2000))
    assert transfer_queue.take_completions() == []
    assert {gave_up for gave_up, *_ in library.calls} == {False}


@pytest.mark.parametrize("costs", [[], [1] * 83, [1] * 85, [[1] * 7] * 12])
def test_costs_that_are_not_as_many_as_there_are(library: Library, costs: list[Any]) -> None:
    with pytest.raises(ValueError, match=rf"costs has {np.size(costs)} entries; 84 are expected"):
        transfer_queue.set_costs(0, costs)
    assert library.calls == []


@pytest.mark.parametrize(
    ("code", "name", "kind"),
    [
        (700, b"cudaErrorIllegalAddress", CudaError),
        (700, None, CudaError),
        (0, b"cancelled", transfer_queue.Cancelled),
        (0, b"out of host memory", MemoryError),
        (0, b"", RuntimeError),
        (0, None, RuntimeError),
    ],
)
def test_what_went_wrong_is_raised_with_the_words_of_the_library(
    library: Library, code: int, name: bytes | None, kind: type[Exception]
) -> None:
    def tell(told_code: Any, told_name: Any) -> bytes:
        told_code._obj.value, told_name._obj.value = code, name
        return b"the words"

    library.answers.update(close=lambda *_: -1, error=tell)
    with pytest.raises(kind) as raised:
        transfer_queue.close_stream(1)
    assert type(raised.value) is kind
    assert str(raised.value) == "the words"
    if isinstance(raised.value, CudaError):
        assert (raised.value.code, raised.value.name) == (700, (name or b"").decode())
    assert library.calls == [(True, "close", (1,)), (True, "error", ("pointer", "pointer"))]


@pytest.mark.parametrize(("timeout_s", "timeout_us"), [(None, -1), (0.0, 0), (0.25, 250_000)])
def test_a_wait_of_a_stream_that_may_be_captured(library: Library, timeout_s: float | None, timeout_us: int) -> None:
    assert transfer_queue.wait_uncaptured(3, 71, 5, timeout_s) is True
    assert library.calls[0] == (False, "is_capturing", (3, 71))
    assert {name for _, name, _ in library.calls[1:]} == {"wait_stream"}
    library.answers["wait_stream"] = lambda *_: 1
    library.calls.clear()
    assert transfer_queue.wait_uncaptured(3, 71, 5, 0.0) is False
    assert library.calls[-1] == (False, "wait_stream", (3, 71, 5, 0))
    if timeout_us > 0:
        assert transfer_queue.wait_uncaptured(3, 71, 5, timeout_s) is False
        assert library.calls[-1] == (False, "wait_stream", (3, 71, 5, timeout_us))
    library.answers["is_capturing"] = lambda *_: 1
    library.calls.clear()
    assert transfer_queue.wait_uncaptured(3, 71, 5, timeout_s) is None
    assert library.calls == [(False, "is_capturing", (3, 71))]
    for name in ("wait_stream", "is_capturing"):
        library.answers.update({"is_capturing": lambda *_: 0, name: lambda *_: -1, "error": lambda *_: b"wrong"})
        with pytest.raises(RuntimeError, match="wrong"):
            transfer_queue.wait_uncaptured(3, 71, 5, timeout_s)


def test_every_call_reports_what_went_wrong(library: Library) -> None:
    """One that swallowed it would be taken for a success."""
    ids = np.arange(1)
    calls: list[Callable[[], Any]] = [
        lambda: transfer_queue.open_stream(0, 1, urgent=False),
        lambda: transfer_queue.close_stream(1),
        lambda: transfer_queue.submit(
            plan=1, direction=0, engine=0, device_ids=ids, host_ids=ids, layers=range(1), layers_per_event=1,
            waits=[[]], start_event=2, record_events=[3], stream=4,
        ),
        lambda: transfer_queue.submit_by_marks(
            plan=1, direction=0, engine=0, device_ids=ids, host_ids=ids, layers=range(1), layers_per_event=1,
            marks=[[5]], start_events=[2], record_events=[3], stream=4, token=6,
        ),
        lambda: transfer_queue.mark(1, 2, 3),
        lambda: transfer_queue.cancel(1, 2),
        lambda: transfer_queue.watch(0, 1, [2]),
        lambda: transfer_queue.hear(1, None, pytest.fail, {}, pytest.fail),
        lambda: transfer_queue.completions_fd(),
        lambda: transfer_queue.flush(1),
        lambda: transfer_queue.is_capturing(0, 1),
        lambda: transfer_queue.record(0, 1, 2),
        lambda: transfer_queue.wait_stream(0, 1, 2, None),
        lambda: transfer_queue.query(0, 1),
        lambda: transfer_queue.push_device(0),
        lambda: transfer_queue.forget(1),
        lambda: transfer_queue.set_costs(0, [1] * 84),
        lambda: transfer_queue.register_device_plan(1, 0, 1, 1, [2], [3], [4], [4], [4], on_other_gpu=True),
    ]  # fmt: skip
    names = [
        name.removeprefix("paddle_kv_").removeprefix("queue_")
        for name, (result, _) in c_header.functions(HEADER).items()
        if result is ctypes.c_int and name != "paddle_kv_queue_end_hearing"  # behind another one
    ]
    assert len(names) == len(calls)
    library.answers.update(dict.fromkeys(names, lambda *_: -1), error=lambda *_: b"wrong")
    for call in calls:
        with pytest.raises((RuntimeError, ValueError), match="wrong"):
            call()
    assert {name for _, name, _ in library.calls} == {*names, "error"}
