"""What the CuPy backend asks of CuPy and of the library's queue, in which order. Both are replaced by what notes the
calls, so it runs without a GPU; what they do to memory: tests/gpu."""

from __future__ import annotations

import importlib
import sys
import types
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import paddle_kv.backend
from paddle_kv import CaptureError, CudaError, streams
from paddle_kv.backend import binding, calibration, completions, create, transfer_queue
from paddle_kv.backend.calibration import EngineCosts, WayCosts
from paddle_kv.backend.work import LayerWork, TransferPlan

NAME = "paddle_kv.backend.cupy_backend"
DEVICE = 3


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def stand_in() -> types.ModuleType:
    cupy, cuda, runtime = (types.ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.runtime"))
    cupy.__dict__.update(cuda=cuda)
    cuda.__dict__.update(runtime=runtime)
    runtime.__dict__.update(CUDARuntimeError=CUDARuntimeError, eventDefault="flags")
    return cupy


def load() -> Any:
    """The module over the stand-in; a true one that is loaded already stays what others get."""
    cupy = stand_in()
    replaced: dict[str, types.ModuleType] = {
        "cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.runtime": cupy.cuda.runtime,
    }  # fmt: skip
    before = {name: sys.modules.pop(name, None) for name in (*replaced, NAME)}
    sys.modules.update(replaced)
    try:
        return importlib.import_module(NAME)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        if before[NAME] is None:
            del paddle_kv.backend.cupy_backend
        else:
            paddle_kv.backend.cupy_backend = before[NAME]


cupy_backend = load()


class Gpu:
    """``calls``: what CuPy and the queue were asked, but for the device that is current."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.current = DEVICE

    def answering(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, *arguments, *([options] if options else [])))
            answer = self.answers.get(name)
            return answer(*arguments) if callable(answer) else answer

        return call

    def asked(self) -> list[tuple[Any, ...]]:
        """Since this was asked the last time."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    numbers = iter(range(100, 200))
    made.answers = {
        "eventCreateWithFlags": lambda flags: next(numbers),
        "getDeviceProperties": {"name": b"NVIDIA H200"},
        "Stream": SimpleNamespace(ptr=71),
        "wait_stream": True,
        "query": True,
        "is_capturing": False,
        "enqueued": 0,
        "submitted": 0,
        "paddle_stream": 81,
        "resolve_on": 82,
    }
    runtime, cuda = cupy_backend.runtime, cupy_backend.cupy.cuda
    monkeypatch.setattr(runtime, "getDevice", lambda: made.current, raising=False)
    asked = {
        runtime: ("eventCreateWithFlags", "eventDestroy", "eventElapsedTime", "streamDestroy", "getDeviceProperties"),
        cuda: ("Stream", "Event"),
        transfer_queue: ("set_costs", "open_stream", "close_stream", "submit", "cancel", "flush", "wait_stream",
                         "is_capturing", "query", "forget", "enqueued", "submitted", "push_device", "pop_device",
                         "submit_by_marks", "mark", "take_enqueued", "record"),
        streams: ("paddle_stream", "cupy_stream", "resolve_on"),
        completions: ("watch", "hear"),
        binding: ("register", "release"),
        calibration: ("load",),
    }  # fmt: skip
    for module, names in asked.items():
        for name in names:
            monkeypatch.setattr(module, name, made.answering(name), raising=module not in (runtime, cuda))
    monkeypatch.setattr(cupy_backend, "_left_over", [])
    return made


@pytest.fixture
def backend(gpu: Gpu) -> Any:
    made = cupy_backend.CupyBackend(DEVICE)
    gpu.asked()
    return made


def test_a_cache_on_a_gpu_gets_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, cupy_backend)
    for name in ("auto", "cupy"):
        made = create(name, DEVICE)
        assert type(made) is cupy_backend.CupyBackend
        assert (made.name, made._device_id) == ("cupy", DEVICE)


@pytest.mark.parametrize("measured", [None, EngineCosts(kernel_d2h=WayCosts((1,) * 7, (2,) * 7))])
def test_engine_auto_goes_by_what_was_measured_on_this_kind_of_gpu(gpu: Gpu, measured: EngineCosts | None) -> None:
    gpu.answers["load"] = measured
    cupy_backend.CupyBackend(DEVICE)
    assert gpu.asked() == [
        ("getDeviceProperties", DEVICE),
        ("load", "NVIDIA H200"),
        ("set_costs", DEVICE, (measured or EngineCosts()).in_order()),
    ]


# ---- the current device ----
def test_calls_are_made_on_its_device_and_the_thread_gets_its_own_back(gpu: Gpu, backend: Any) -> None:
    gpu.current, gpu.answers["eventElapsedTime"] = 0, 1.5
    assert backend.elapsed_ms(5, 6) == 1.5
    assert gpu.asked() == [("push_device", DEVICE), ("eventElapsedTime", 5, 6), ("pop_device",)]
    gpu.current = DEVICE
    backend.elapsed_ms(5, 6)
    assert gpu.asked() == [("eventElapsedTime", 5, 6)]


def test_such_a_call_takes_and_gives_back_what_the_method_does(backend: Any) -> None:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        """Says what it is given."""
        return self, arguments, options

    wrapped = cupy_backend._on_device(method)
    assert wrapped(backend, 1, 2, urgent=True) == (backend, (1, 2), {"urgent": True})
    assert (wrapped.__name__, wrapped.__doc__) == ("method", "Says what it is given.")


@pytest.mark.parametrize("current", [0, DEVICE])
def test_what_cuda_reports_is_typed(gpu: Gpu, backend: Any, current: int) -> None:
    def fail(*_: Any) -> None:
        raise CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal memory access: was encountered")

    gpu.current, gpu.answers["eventElapsedTime"] = current, fail
    with pytest.raises(CudaError) as raised:
        backend.elapsed_ms(5, 6)
    error = raised.value
    assert (error.name, error.code) == ("cudaErrorIllegalAddress", 700)
    assert str(error) == "cudaErrorIllegalAddress: an illegal memory access: was encountered"
    assert isinstance(error.__cause__, CUDARuntimeError)
    assert gpu.asked()[-1] == (("pop_device",) if current == 0 else ("eventElapsedTime", 5, 6))


def test_a_device_that_could_not_be_made_current_is_not_taken_away(gpu: Gpu, backend: Any) -> None:
    def fail(device: int) -> None:
        raise CudaError("cudaErrorInvalidDevice", 101, "no such device")

    gpu.current, gpu.answers["push_device"] = 0, fail
    with pytest.raises(CudaError, match="no such device"):
        backend.elapsed_ms(5, 6)
    assert gpu.asked() == [("push_device", DEVICE)]


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: backend.create_stream(),
        lambda backend: backend.destroy_stream(SimpleNamespace(ptr=71)),
        lambda backend: backend.create_event(),
        lambda backend: backend.close(),
        lambda backend: backend.compute_stream(None),
        lambda backend: backend.elapsed_ms(5, 6),
        lambda backend: backend.user_event(SimpleNamespace(ptr=71)),
    ],
)
def test_whatever_calls_cuda_does_it_on_the_device(gpu: Gpu, backend: Any, call: Callable[[Any], Any]) -> None:
    gpu.answers.update(eventElapsedTime=1.0, Event=SimpleNamespace(record=lambda stream: None))
    gpu.current = 0
    call(backend)
    cuda = {"eventCreateWithFlags", "streamDestroy", "eventElapsedTime", "Stream", "Event"}
    names = [name for name, *_ in gpu.asked()]
    assert not cuda.intersection(names) or names.index("push_device") < min(names.index(n) for n in cuda & {*names})
    assert names.count("push_device") == names.count("pop_device") == 1
    assert names[-1] == "pop_device"


# ---- pools ----
@pytest.mark.parametrize(("device_id", "where"), [(None, "the CPU"), (1, "GPU 1")])
def test_a_cache_elsewhere_is_refused(gpu: Gpu, backend: Any, device_id: int | None, where: str) -> None:
    with pytest.raises(ValueError, match=f"the device cache is on {where}; this scheduler works on GPU {DEVICE}"):
        backend.bind(SimpleNamespace(device_id=device_id), "pool")
    assert gpu.asked() == []


def test_a_pair_of_pools_is_registered_and_released(gpu: Gpu, backend: Any) -> None:
    gpu.answers["register"] = 31
    cache = SimpleNamespace(device_id=DEVICE)
    assert backend.bind(cache, "pool") == 31
    backend.unbind(31)
    assert gpu.asked() == [("register", cache, "pool", DEVICE), ("release", 31)]


# ---- streams ----
@pytest.mark.parametrize(("options", "urgent"), [({}, False), ({"urgent": True}, True), ({"urgent": False}, False)])
def test_a_stream_waits_for_no_other_and_goes_before_compute(
    gpu: Gpu, backend: Any, options: dict[str, bool], urgent: bool
) -> None:
    stream = backend.create_stream(**options)
    assert stream is gpu.answers["Stream"]
    assert gpu.asked() == [
        ("Stream", {"non_blocking": True, "priority": cupy_backend.HIGHEST_PRIORITY}),
        ("open_stream", DEVICE, 71, {"urgent": urgent}),
    ]


def test_no_gpu_has_a_higher_priority() -> None:
    """CUDA has six, 0 to -5, and takes the nearest that the GPU has."""
    assert cupy_backend.HIGHEST_PRIORITY == -5


def test_a_stream_is_destroyed_behind_its_transfers_and_by_nobody_else(gpu: Gpu, backend: Any) -> None:
    stream = SimpleNamespace(ptr=71)
    gpu.answers["streamDestroy"] = lambda handle: gpu.calls.append(("left to CuPy", stream.ptr))
    backend.destroy_stream(stream)
    assert gpu.asked() == [("close_stream", 71), ("streamDestroy", 71), ("left to CuPy", 0)]


def test_the_compute_stream_is_the_one_that_is_named(gpu: Gpu, backend: Any) -> None:
    assert backend.compute_stream(77) == 77
    assert gpu.asked() == [("is_capturing", DEVICE, 77)]
    assert backend.compute_stream(None) == 81
    assert gpu.asked() == [("cupy_stream",), ("paddle_stream", DEVICE), ("is_capturing", DEVICE, 81)]
    gpu.answers["cupy_stream"] = SimpleNamespace(ptr=83)  # of a with block: it is made to wait for Paddle's
    assert backend.compute_stream(None) == 82
    assert gpu.asked() == [("cupy_stream",)] * 2 + [("is_capturing", DEVICE, 83), ("resolve_on", None, DEVICE)]


def test_a_stream_of_another_gpu_is_refused(gpu: Gpu, backend: Any) -> None:
    """CUDA would say "invalid resource handle" of an event, long after the stream was named."""
    of = {device: SimpleNamespace(ptr=77, device_id=device) for device in (-1, DEVICE, DEVICE + 1)}
    assert [backend.compute_stream(of[device]) for device in (-1, DEVICE)] == [77, 77]
    gpu.asked()
    with pytest.raises(ValueError, match=f"stream is one of GPU {DEVICE + 1}; this scheduler works on GPU {DEVICE}"):
        backend.compute_stream(of[DEVICE + 1])
    assert gpu.asked() == []


def test_a_stream_that_is_named_again_is_not_looked_up_again(gpu: Gpu, backend: Any) -> None:
    gpu.current = DEVICE + 1
    first, second = (SimpleNamespace(ptr=ptr, device_id=DEVICE) for ptr in (77, 78))
    assert backend.compute_stream(first) == 77
    looked_up = [("push_device", DEVICE), ("is_capturing", DEVICE, 77), ("pop_device",)]
    assert gpu.asked() == looked_up
    assert backend.compute_stream(first) == 77
    assert gpu.asked() == [("is_capturing", DEVICE, 77)]
    gpu.answers["is_capturing"] = True
    with pytest.raises(CaptureError):
        backend.compute_stream(first)
    gpu.answers["is_capturing"] = False
    assert backend.compute_stream(second) == 78
    gpu.asked()
    assert backend.compute_stream(first) == 77
    assert gpu.asked() == looked_up
    assert backend.compute_stream(None) == 81
    assert backend.compute_stream(None) == 81
    assert gpu.asked().count(("paddle_stream", DEVICE)) == 2


@pytest.mark.parametrize("stream", [77, None])
def test_a_stream_that_is_captured_is_only_asked_whether_it_is(gpu: Gpu, backend: Any, stream: int | None) -> None:
    gpu.answers["is_capturing"] = True
    with pytest.raises(CaptureError, match="being captured into a CUDA graph"):
        backend.compute_stream(stream)
    assert gpu.asked()[-1] == ("is_capturing", DEVICE, 77 if stream else 81)


# ---- events ----
def test_an_event_is_used_anew_once_no_transfer_can_wait_for_it(gpu: Gpu, backend: Any) -> None:
    first, second = backend.create_event(), backend.create_event()
    assert (first, second) == (100, 101)
    assert gpu.asked() == [("submitted",), ("eventCreateWithFlags", "flags")] * 2
    backend.destroy_event(first)
    backend.destroy_event(second)
    assert gpu.asked() == []
    gpu.answers.update(enqueued=5, submitted=4)
    third = backend.create_event()
    assert third == 102  # the fifth transfer may wait for one of them
    assert gpu.asked() == [("enqueued",), ("submitted",), ("eventCreateWithFlags", "flags")]
    backend.destroy_event(third)
    gpu.answers.update(enqueued=9, submitted=5)
    assert sorted([backend.create_event(), backend.create_event()]) == [first, second]
    assert gpu.asked() == [("enqueued",), ("submitted",)]
    gpu.answers.update(submitted=8)
    assert backend.create_event() == 103
    gpu.answers.update(submitted=9)
    assert backend.create_event() == third


def test_the_failure_of_an_event_is_forgotten_when_it_is_given_back(gpu: Gpu, backend: Any) -> None:
    backend.destroy_event(100)
    assert gpu.asked() == []  # there was none: nothing is asked

    for number, error in enumerate((CudaError("name", 1, "text"), MemoryError(), transfer_queue.Cancelled())):
        found = cupy_backend.CupyBackend(DEVICE)

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        gpu.answers["query"] = fail
        with pytest.raises(type(error)):
            found.is_complete(1, 2)
        gpu.asked()
        found.destroy_event(number)
        assert gpu.asked() == [("forget", number)]


@pytest.mark.parametrize("passed", [False, True])
def test_whether_events_were_passed(gpu: Gpu, backend: Any, passed: bool) -> None:
    gpu.answers["query"] = passed
    assert backend.is_complete(1, 2, 3) is passed
    backend.destroy_event(1)
    assert gpu.asked() == [("query", DEVICE, 1, 2, 3)]


def test_closed_it_destroys_all_events_but_those_that_another_one_may_wait_for(gpu: Gpu) -> None:
    def closed(events: list[int], *, enqueued: int, submitted: int) -> list[int]:
        backend = cupy_backend.CupyBackend(DEVICE)
        for event in events:
            backend.destroy_event(event)
        gpu.answers.update(enqueued=enqueued, submitted=submitted)
        gpu.asked()
        backend.close()
        backend.close()  # there is nothing left
        return [call[1] for call in gpu.asked() if call[0] == "eventDestroy"]

    assert closed([1, 2], enqueued=5, submitted=4) == []
    assert closed([3], enqueued=8, submitted=4) == []
    assert [(number, list(events)) for number, events in cupy_backend._left_over] == [(5, [1, 2]), (8, [3])]
    assert sorted(closed([4], enqueued=9, submitted=5)) == [1, 2]
    assert [(number, list(events)) for number, events in cupy_backend._left_over] == [(8, [3]), (9, [4])]
    assert sorted(closed([5], enqueued=9, submitted=9)) == [3, 4, 5]
    assert cupy_backend._left_over == []


# ---- waiting ----
@pytest.mark.parametrize("timeout_s", [None, 2.5])
def test_a_wait_on_a_stream_is_the_queues(gpu: Gpu, backend: Any, timeout_s: float | None) -> None:
    backend.wait_on_stream(77, 5, timeout_s)
    backend.wait_on_stream(SimpleNamespace(ptr=78), 5, timeout_s)  # behind what is enqueued there
    assert gpu.asked() == [
        ("wait_stream", DEVICE, 77, 5, timeout_s),
        ("flush", 78),
        ("wait_stream", DEVICE, 78, 5, timeout_s),
    ]
    gpu.answers["wait_stream"] = False
    with pytest.raises(TimeoutError, match=f"not submitted within timeout_s = {timeout_s}"):
        backend.wait_on_stream(77, 5, timeout_s)


def test_a_mark_on_a_stream_of_transfers_is_behind_what_is_enqueued_there(gpu: Gpu, backend: Any) -> None:
    backend.record(5, SimpleNamespace(ptr=78))
    backend.record(5, 6)
    assert gpu.asked() == [("flush", 78), ("record", DEVICE, 5, 78), ("record", DEVICE, 5, 6)]


class Clock:
    """Each look takes a microsecond; ``passed_s``: when the event passes."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.slept_s: list[float] = []

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s


@pytest.mark.parametrize("timeout_s", [None, 1.0])
def test_the_host_first_asks_again_at_once_and_then_sleeps_in_between(
    gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    clock = Clock()
    monkeypatch.setattr(cupy_backend, "time", clock)
    gpu.answers["query"] = lambda *_: clock.now_s >= 50.0 + 400e-6
    assert backend.wait(5, timeout_s) is True
    spins = clock.slept_s.count(0)
    assert clock.slept_s == [0] * spins + [50e-6] * 4
    assert 195 <= spins <= 200
    assert set(gpu.asked()) == {("query", DEVICE, 5)}


@pytest.mark.parametrize("timeout_s", [0.0, 2e-3])
def test_a_wait_ends_with_its_time(gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
    clock = Clock()
    monkeypatch.setattr(cupy_backend, "time", clock)
    gpu.answers["query"] = False
    assert backend.wait(5, timeout_s) is False
    assert timeout_s <= clock.now_s - 50.0 < timeout_s + 55e-6
    gpu.answers["query"] = True
    clock.slept_s = []
    assert backend.wait(5, timeout_s) is True
    assert clock.slept_s == []


def test_a_wait_ends_in_the_moment_in_which_its_time_is_over(
    gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slept_s = iter([0.0, cupy_backend.SPIN_S, 0.5]), []
    monkeypatch.setattr(cupy_backend, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=slept_s.append))
    gpu.answers["query"] = False
    assert backend.wait(5, 0.5) is False
    assert slept_s == [cupy_backend.SLEEP_S]


# ---- copies ----
def test_what_is_handed_to_the_queue(gpu: Gpu, backend: Any) -> None:
    for direction, code in (("offload", 0), ("onload", 1)):
        plan = TransferPlan(direction, np.array([4, 2]), np.array([7, 9]), num_layers=7, layers_per_event=2)
        work = LayerWork(plan, 1, 3, [[11], [12, 13]], 14, [15, 16], "kernel", 18)
        backend.copy_layers(31, work, SimpleNamespace(ptr=71))
        [(name, given)] = gpu.asked()
        assert name == "submit"
        assert {**given, "device_ids": given["device_ids"].tolist(), "host_ids": given["host_ids"].tolist()} == {
            "plan": 31,
            "direction": code,
            "engine": 2,
            "device_ids": [4, 2],
            "host_ids": [7, 9],
            "layers": range(2, 6),
            "layers_per_event": 2,
            "waits": [[11], [12, 13]],
            "start_event": 14,
            "record_events": [15, 16],
            "stream": 71,
            "token": 18,
            "watch": -1,
        }


def test_a_save_by_marks_is_the_queues(gpu: Gpu, backend: Any) -> None:
    plan = TransferPlan("offload", np.array([4, 2]), np.array([7, 9]), num_layers=3, layers_per_event=2)
    work = LayerWork(plan, 0, 2, [[11, 12], [13]], 14, [15, 16], "kernel", 18)
    assert backend.submit_by_marks(31, work, [14, 17], SimpleNamespace(ptr=71)) is True
    [(name, given)] = gpu.asked()
    assert name == "submit_by_marks"
    assert {**given, "device_ids": given["device_ids"].tolist(), "host_ids": given["host_ids"].tolist()} == {
        "plan": 31,
        "direction": 0,
        "engine": 2,
        "device_ids": [4, 2],
        "host_ids": [7, 9],
        "layers": range(3),
        "layers_per_event": 2,
        "marks": [[11, 12], [13]],
        "start_events": [14, 17],
        "record_events": [15, 16],
        "stream": 71,
        "token": 18,
    }
    gpu.answers.update(mark=None, take_enqueued=[1])
    assert backend.mark_layer(18, 2, 5) is None
    assert backend.take_enqueued(18, 1, 2, True) == [1]
    assert gpu.asked() == [("mark", 18, 2, 5), ("take_enqueued", 18, 1, 2, {"ends": True})]


@pytest.mark.parametrize("more", [0, 1])
def test_more_blocks_than_a_mark_should_sort_are_submitted_by_sections(gpu: Gpu, backend: Any, more: int) -> None:
    """The library enqueues with the GIL at a mark."""
    ids = np.arange(transfer_queue.FEW_BLOCKS + more)
    work = LayerWork(TransferPlan("offload", ids, ids, 1, 1), 0, 1, [[11]], 14, [15])
    assert backend.submit_by_marks(31, work, [14], SimpleNamespace(ptr=71)) is (more == 0)
    assert len(gpu.asked()) == 1 - more


def test_a_whole_transfer_is_watched_by_its_submission(gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_backend.completions, "expect", lambda report: 33 if report is print else None)
    plan = TransferPlan("offload", np.array([4, 2]), np.array([7, 9]), num_layers=2, layers_per_event=1)
    work = LayerWork(plan, 0, 2, [[], []], 14, [15, 16])
    assert backend.copy_and_watch(31, work, SimpleNamespace(ptr=71), print) == 33
    [(name, given)] = gpu.asked()
    assert name == "submit" and given["watch"] == 33 and given["record_events"] == [15, 16]


def test_a_wait_on_the_compute_stream_asks_as_little_as_it_can(
    gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [True, True, False, None, True]
    waits: list[Any] = []
    monkeypatch.setattr(transfer_queue, "wait_uncaptured", lambda *given: waits.append(given) or answers.pop(0))
    stream = SimpleNamespace(ptr=77)
    assert backend.wait_on_compute(stream, 5, None) == 77
    assert gpu.asked() == [("is_capturing", DEVICE, 77)]  # looked up
    assert backend.wait_on_compute(stream, 6, 1.5) == 77
    with pytest.raises(TimeoutError, match="not submitted within timeout_s"):
        backend.wait_on_compute(stream, 7, 1.5)
    gpu.answers["is_capturing"] = True
    with pytest.raises(CaptureError):
        backend.wait_on_compute(stream, 8, None)
    assert gpu.asked() == [("is_capturing", DEVICE, 77)]
    assert backend.wait_on_compute(None, 9, None) == 81
    assert waits == [(DEVICE, 77, 5, None), (DEVICE, 77, 6, 1.5), (DEVICE, 77, 7, 1.5), (DEVICE, 77, 8, None),
                     (DEVICE, 81, 9, None)]  # fmt: skip


@pytest.mark.parametrize("direction", ["offload", "onload"])
def test_one_that_comes_alone_is_the_queues(
    gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    reports: dict[int, Any] = {}
    given: list[Any] = []
    monkeypatch.setattr(completions, "place", lambda: (reports, 33))
    monkeypatch.setattr(transfer_queue, "submit_alone", lambda *asked: given.append(asked) or True)
    stream = SimpleNamespace(ptr=5)
    assert backend.compute_stream(stream) == 5
    scheduler = SimpleNamespace(
        default_stream=stream,
        engine="kernel",
        layers_per_event=2,
        device_cache=SimpleNamespace(spec=SimpleNamespace(num_layers=7)),
        resources=SimpleNamespace(streams={direction: SimpleNamespace(ptr=71)}, reserve=[1]),
    )
    ids, events, report = (bytearray(8), bytearray(16)), array("q", [11, 12]), object()
    held = SimpleNamespace(events=events)
    transfer = SimpleNamespace(
        scheduler=scheduler, direction=direction, ids=ids, held=held, number=18, reporter=lambda: report, num_blocks=1
    )
    assert backend.start_alone(31, transfer, "group", 9) is True
    code = {"offload": 0, "onload": 1}[direction]
    known = (reports, 33, report, "group", 9, transfer, [1])
    assert given == [(31, code, 2, *ids, 7, 2, events, 71, 18, DEVICE, 5, *known)]
    assert transfer.token == 33 and reports == {}
    scheduler.default_stream = SimpleNamespace(ptr=6)  # not named before: it has to be looked up
    assert backend.start_alone(31, transfer, "group", 9) is False and len(given) == 1
    scheduler.default_stream = None
    assert backend.start_alone(31, transfer, "group", 9) is True and given[-1][10:12] == (DEVICE, 81)
    gpu.current = DEVICE + 1
    assert backend.start_alone(31, transfer, "group", 9) is False
    gpu.current, gpu.answers["cupy_stream"] = DEVICE, SimpleNamespace(ptr=7)
    assert backend.start_alone(31, transfer, "group", 9) is False
    gpu.answers["cupy_stream"] = None
    transfer.num_blocks = transfer_queue.FEW_BLOCKS + 1
    assert backend.start_alone(31, transfer, "group", 9) is False and len(given) == 2
    transfer.num_blocks = transfer_queue.FEW_BLOCKS
    assert backend.start_alone(31, transfer, "group", 9) is True and len(given) == 3
    scheduler.resources.streams.clear()  # closed by another thread
    assert backend.start_alone(31, transfer, "group", 9) is False and len(given) == 3


def test_a_backend_that_copies_in_its_own_way_does_so_watched_too(
    gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutWaits(cupy_backend.CupyBackend):
        def copy_layers(self, binding: int, work: LayerWork, stream: Any) -> None:
            super().copy_layers(binding, replace(work, waits=[[] for _ in work.waits]), stream)

    monkeypatch.setattr(cupy_backend.completions, "expect", lambda report: 33)
    plan = TransferPlan("offload", np.array([4, 2]), np.array([7, 9]), num_layers=2, layers_per_event=1)
    work = LayerWork(plan, 0, 2, [[11], [12]], 14, [15, 16])
    backend.__class__ = WithoutWaits
    assert backend.copy_and_watch(31, work, SimpleNamespace(ptr=71), print) == 33
    [(name, given)] = gpu.asked()
    assert name == "submit" and given["watch"] == 33 and given["waits"] == [[], []]


def test_of_a_transfer_that_could_not_be_submitted_nobody_hears(
    gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("the stream is not open")

    monkeypatch.setattr(completions, "_thread", object())  # none is started
    gpu.answers["submit"] = fail
    work = LayerWork(TransferPlan("offload", np.array([4]), np.array([7]), 1, 1), 0, 1, [[]], 14, [15])
    before = dict(completions._reports)
    with pytest.raises(RuntimeError, match="not open"):
        backend.copy_and_watch(31, work, SimpleNamespace(ptr=71), print)
    assert completions._reports == before


@pytest.mark.parametrize("first_dropped", [None, 0, 3])
def test_what_is_cancelled_and_watched(gpu: Gpu, backend: Any, first_dropped: int | None) -> None:
    gpu.answers["cancel"] = first_dropped
    assert backend.cancel(SimpleNamespace(ptr=71), 18) == first_dropped
    gpu.answers["watch"] = 33
    assert backend.watch([5, 6], print) == 33
    backend.hear(33, 1.5, list, print)
    assert gpu.asked() == [("cancel", 71, 18), ("watch", DEVICE, [5, 6], print), ("hear", 33, 1.5, list, print)]


def test_the_time_between_two_events(gpu: Gpu, backend: Any) -> None:
    gpu.answers["eventElapsedTime"] = np.float32(1.5)
    found = backend.elapsed_ms(5, 6)
    assert (found, type(found)) == (1.5, float)
    assert gpu.asked() == [("eventElapsedTime", 5, 6)]


def test_an_event_for_the_user_is_behind_what_is_enqueued(gpu: Gpu, backend: Any) -> None:
    event = gpu.answers["Event"] = SimpleNamespace(record=gpu.answering("record"))
    stream = SimpleNamespace(ptr=71)
    assert backend.user_event(stream) is event
    assert gpu.asked() == [("flush", 71), ("Event",), ("record", stream)]


@pytest.fixture(autouse=True)
def _the_stand_in_stays_here() -> Iterator[None]:
    yield
    assert sys.modules.get(NAME) is not cupy_backend
    assert getattr(sys.modules.get("cupy"), "cuda", None) is not cupy_backend.cupy.cuda


def test_events_are_made_at_once_or_not_at_all(gpu: Gpu, backend: Any) -> None:
    backend.destroy_events([1, 2, 3])
    assert sorted(backend.create_events(2)) == [2, 3]
    assert list(backend.create_events(3)) == [1, 100, 101]
    backend.destroy_event(1)

    def runs_out(flags: int) -> int:
        raise cupy_backend.runtime.CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")

    gpu.answers["eventCreateWithFlags"] = runs_out
    with pytest.raises(CudaError, match="out of memory"):
        backend.create_events(2)
    assert list(backend.create_events(1)) == [1]


def test_gates_are_those_of_its_gpu(gpu: Gpu, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_backend, "CudaGates", lambda *given: given)
    assert backend.create_gates(5, 2.5) == (DEVICE, 5, 2.5)
