"""Gates on a GPU: words in device memory and kernels of the compiled library (``transfer/gates.h``)."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import streams
from ..errors import BackendError
from ..ops import _library
from . import transfer_queue
from .work import Event


@functools.cache
def _functions() -> Any:
    library = ctypes.CDLL(str(_library.LIBRARY))  # loaded already: the same one
    number, words = ctypes.c_int64, ctypes.c_void_p
    arguments = {
        "open": [ctypes.c_int, number, number, words],
        "close": [number],
        "wait": [number, number, number],
        "mark": [number, number, number],
        "mark_and_wait": [number, number, number],
        "arm": [number, number, ctypes.c_uint32, ctypes.c_uint32],
        "let_through": [number, number, number, ctypes.c_uint32, words, words],
        "record_marks": [number, ctypes.c_uint32, words, number],
        "pass_marks": [number, ctypes.c_uint32],
        "given_up": [number, ctypes.c_uint32],
    }
    for name, types in arguments.items():
        getattr(library, f"paddle_kv_gates_{name}").argtypes = types
    library.paddle_kv_gates_given_up.restype = number
    return library


class CudaGates:
    """See :class:`~paddle_kv.backend.protocol.Gates`."""

    def __init__(self, device_id: int, num_layers: int, timeout_s: float) -> None:
        self._device_id = device_id
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            # A closed gate would keep the copies waiting for which it waits.
            raise BackendError(
                "CUDA_DEVICE_MAX_CONNECTIONS is 1: all streams share one queue of the device, and a replay that waits "
                "would hold up what it waits for; gates need at least 2"
            )
        handle = ctypes.c_int64()
        opened = _functions().paddle_kv_gates_open(device_id, num_layers, int(timeout_s * 1e6), ctypes.byref(handle))
        transfer_queue.checked(opened)
        self._handle = handle.value

    def wait(self, layer: int, stream: Any) -> None:
        transfer_queue.checked(_functions().paddle_kv_gates_wait(self._handle, layer, self._handle_of(stream)))

    def mark(self, layer: int, stream: Any) -> None:
        transfer_queue.checked(_functions().paddle_kv_gates_mark(self._handle, layer, self._handle_of(stream)))

    def mark_and_wait(self, layer: int, stream: Any) -> None:
        result = _functions().paddle_kv_gates_mark_and_wait(self._handle, layer, self._handle_of(stream))
        transfer_queue.checked(result)

    def arm(self, stream: int, load_turn: int, save_turn: int) -> None:
        transfer_queue.checked(_functions().paddle_kv_gates_arm(self._handle, stream, load_turn, save_turn))

    def let_through(self, first_layer: int, turn: int, waits: Sequence[Sequence[Event]]) -> None:
        events = np.array([event for of_layer in waits for event in of_layer], np.int64)
        counts = np.array([len(of_layer) for of_layer in waits], np.int64)
        result = _functions().paddle_kv_gates_let_through(
            self._handle, first_layer, len(waits), turn, events.ctypes.data, counts.ctypes.data
        )
        transfer_queue.checked(result)

    def record_marks(self, turn: int, events: Sequence[Sequence[Event]]) -> None:
        handles = np.array(events, np.int64)
        result = _functions().paddle_kv_gates_record_marks(self._handle, turn, handles.ctypes.data, handles.shape[1])
        transfer_queue.checked(result)

    def pass_marks(self, turn: int) -> None:
        transfer_queue.checked(_functions().paddle_kv_gates_pass_marks(self._handle, turn))

    def given_up(self, turn: int) -> int | None:
        layer = int(_functions().paddle_kv_gates_given_up(self._handle, turn))
        return None if layer < 0 else layer

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            transfer_queue.checked(_functions().paddle_kv_gates_close(handle))

    def _handle_of(self, stream: Any) -> int:
        # No order behind Paddle's stream: it would become part of a graph that is being captured.
        return streams.current(self._device_id) if stream is None else streams.handle_of(stream)
