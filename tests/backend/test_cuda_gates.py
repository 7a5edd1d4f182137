"""What gates on a GPU ask of the compiled library, which is replaced by what notes the calls; what its kernels do:
tests/gpu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_kv import BackendError, streams
from paddle_kv.backend import cuda_gates, transfer_queue
from paddle_kv.backend.cuda_gates import CudaGates
from tests import c_header

DEVICE, LAYERS, HANDLE = 3, 5, 77
OPENED = ("open", DEVICE, LAYERS, 2_500_000)


class Library:
    """Its functions are called ``paddle_kv_gates_...``; ``results``: of the calls to come, 0 unless named."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, int] = {}
        for name in c_header.functions("transfer/gates.h"):
            call = getattr(self, name.removeprefix("paddle_kv_gates_"), None)
            setattr(self, name, self._noting(name.removeprefix("paddle_kv_gates_"), call))

    def _noting(self, name: str, call: Callable[..., list[Any]] | None) -> Callable[..., int]:
        def noting(*given: Any) -> int:
            self.calls.append((name, *(call(*given) if call else given)))
            return self.results.get(name, 0)

        return noting

    def open(self, device: int, num_layers: int, timeout_us: int, handle: Any) -> list[Any]:
        handle._obj.value = HANDLE
        return [device, num_layers, timeout_us]

    def let_through(self, handle: int, first_layer: int, count: int, turn: int, events: int, counts: int) -> list[Any]:
        numbers = read(counts, count)
        return [handle, first_layer, turn, read(events, sum(numbers)), numbers]

    def record_marks(self, handle: int, turn: int, events: int, per_layer: int) -> list[Any]:
        return [handle, turn, read(events, LAYERS * per_layer), per_layer]


def read(address: int, count: int) -> list[int]:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)).tolist() if count else []


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cuda_gates, "_functions", lambda: made)
    monkeypatch.setattr(streams, "current", lambda device_id: 1000 + device_id)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return made


@pytest.fixture
def gates(library: Library) -> CudaGates:
    return CudaGates(DEVICE, LAYERS, 2.5)


def test_what_the_library_is_asked(library: Library, gates: CudaGates) -> None:
    gates.wait(1, None)
    gates.mark(2, 9)
    gates.mark_and_wait(3, None)
    gates.arm(9, 4, 5)
    gates.pass_marks(6)
    gates.let_through(1, 4, [[11, 12], [], [13]])
    gates.record_marks(5, [[20 + layer, 30 + layer] for layer in range(LAYERS)])
    current = 1000 + DEVICE
    assert library.calls == [
        OPENED,
        ("wait", HANDLE, 1, current),
        ("mark", HANDLE, 2, 9),
        ("mark_and_wait", HANDLE, 3, current),
        ("arm", HANDLE, 9, 4, 5),
        ("pass_marks", HANDLE, 6),
        ("let_through", HANDLE, 1, 4, [11, 12, 13], [2, 0, 1]),
        ("record_marks", HANDLE, 5, [20, 30, 21, 31, 22, 32, 23, 33, 24, 34], 2),
    ]


def test_layers_for_which_nothing_has_to_come(library: Library, gates: CudaGates) -> None:
    gates.let_through(0, 4, [[], []])
    assert library.calls[1:] == [("let_through", HANDLE, 0, 4, [], [0, 0])]


@pytest.mark.parametrize(("answer", "layer"), [(-1, None), (0, 0), (4, 4)])
def test_which_gate_gave_up(library: Library, gates: CudaGates, answer: int, layer: int | None) -> None:
    library.results["given_up"] = answer
    assert gates.given_up(7) == layer
    assert library.calls[1:] == [("given_up", HANDLE, 7)]


def test_they_are_closed_once(library: Library, gates: CudaGates) -> None:
    gates.close()
    gates.close()
    assert library.calls == [OPENED, ("close", HANDLE)]


CALLS: dict[str, Callable[[CudaGates], object]] = {
    "wait": lambda gates: gates.wait(1, 9),
    "mark": lambda gates: gates.mark(1, 9),
    "mark_and_wait": lambda gates: gates.mark_and_wait(1, 9),
    "arm": lambda gates: gates.arm(9, 1, 1),
    "let_through": lambda gates: gates.let_through(0, 1, [[1]]),
    "record_marks": lambda gates: gates.record_marks(1, [[1]] * LAYERS),
    "pass_marks": lambda gates: gates.pass_marks(1),
    "close": lambda gates: gates.close(),
}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def check(result: int) -> int:
        if result < 0:
            raise RuntimeError("the device is lost")
        return result

    monkeypatch.setattr(transfer_queue, "checked", check)
    yield


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", CALLS)
def test_what_the_device_refuses_is_raised(library: Library, gates: CudaGates, name: str) -> None:
    library.results[name] = -1
    with pytest.raises(RuntimeError, match="the device is lost"):
        CALLS[name](gates)


@pytest.mark.usefixtures("checked")
def test_gates_that_the_device_does_not_give(library: Library) -> None:
    library.results["open"] = -1
    with pytest.raises(RuntimeError, match="the device is lost"):
        CudaGates(DEVICE, LAYERS, 2.5)


def test_one_queue_of_the_device_would_keep_a_gate_closed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(BackendError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
        CudaGates(DEVICE, LAYERS, 2.5)
    assert library.calls == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    CudaGates(DEVICE, LAYERS, 2.5)
    assert library.calls == [OPENED]


def test_the_functions_have_the_types_of_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = c_header.functions("transfer/gates.h")
    library = SimpleNamespace(**{name: SimpleNamespace(restype=ctypes.c_int) for name in declared})
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    cuda_gates._functions.cache_clear()
    try:
        assert cuda_gates._functions() is library
    finally:
        cuda_gates._functions.cache_clear()
    found = {name: (function.restype, function.argtypes) for name, function in vars(library).items()}
    assert found == declared
    assert len(found) == 10
