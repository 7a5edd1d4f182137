"""The library's thread that submits transfers to a GPU, so that the calling thread is not held.

Called through ctypes: an operator call of Paddle costs 10 to 40 us, and ``wait_stream`` is called for every layer of a
model. ctypes gives up the GIL for the time of a call. Streams and events are handles. The C side is
``custom_ops/include/paddle_kv/transfer/queue_api.h``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import CudaError
from ..ops import _library

NO_END = -1


class _Transfer(ctypes.Structure):
    _fields_ = (
        ("plan", ctypes.c_int64),
        ("direction", ctypes.c_int64),
        ("engine", ctypes.c_int64),
        ("device_ids", ctypes.c_void_p),
        ("host_ids", ctypes.c_void_p),
        ("block_count", ctypes.c_int64),
        ("first_layer", ctypes.c_int64),
        ("end_layer", ctypes.c_int64),
        ("layers_per_event", ctypes.c_int64),
        ("wait_events", ctypes.c_void_p),
        ("waits_per_group", ctypes.c_void_p),
        ("start_event", ctypes.c_int64),
        ("record_events", ctypes.c_void_p),
        ("stream", ctypes.c_int64),
    )


@functools.cache
def _functions() -> Any:
    library = ctypes.CDLL(str(_library.LIBRARY))  # loaded already: the same one
    library.paddle_kv_queue_error.restype = ctypes.c_char_p
    arguments = {
        "open": [ctypes.c_int, ctypes.c_int64, ctypes.c_int],
        "close": [ctypes.c_int64],
        "submit": [ctypes.c_void_p],
        "flush": [ctypes.c_int64, ctypes.c_int64],
        "wait_stream": [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64],
        "query": [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64],
        "push_device": [ctypes.c_int],
        "forget": [ctypes.c_int64],
        "set_thresholds": [ctypes.c_void_p],
    }
    for name, types in arguments.items():
        getattr(library, f"paddle_kv_queue_{name}").argtypes = types
    for name in ("enqueued", "submitted"):
        getattr(library, f"paddle_kv_queue_{name}").restype = ctypes.c_int64
    library.paddle_kv_queue_pop_device.restype = None
    return library


def _checked(result: int) -> int:
    if result >= 0:
        return result
    code, name = ctypes.c_int(), ctypes.c_char_p()
    text = _functions().paddle_kv_queue_error(ctypes.byref(code), ctypes.byref(name)).decode()
    if code.value:
        raise CudaError((name.value or b"").decode(), code.value, text)
    raise RuntimeError(text)


def open_stream(device_id: int, stream: int, *, urgent: bool) -> None:
    """Lets a stream take transfers. Those of urgent streams are submitted first."""
    _checked(_functions().paddle_kv_queue_open(device_id, stream, urgent))


def close_stream(stream: int) -> None:
    """Waits until all of its transfers are done, and frees what was needed for them."""
    _checked(_functions().paddle_kv_queue_close(stream))


def submit(
    *,
    plan: int,
    direction: int,
    engine: int,
    device_ids: np.ndarray,
    host_ids: np.ndarray,
    layers: range,
    layers_per_event: int,
    waits: Sequence[Sequence[int]],
    start_event: int,
    record_events: Sequence[int],
    stream: int,
) -> None:
    """Enqueues groups of layers. The record events are pending from here on; the start event is recorded behind the
    waits of the first group. Ids are contiguous int64 arrays, which may go away on return."""
    wait_events = np.array([event for events in waits for event in events], np.int64)
    waits_per_group = np.array([len(events) for events in waits], np.int64)
    records = np.array(record_events, np.int64)
    transfer = _Transfer(
        plan,
        direction,
        engine,
        device_ids.ctypes.data,
        host_ids.ctypes.data,
        len(device_ids),
        layers.start,
        layers.stop,
        layers_per_event,
        wait_events.ctypes.data,
        waits_per_group.ctypes.data,
        start_event,
        records.ctypes.data,
        stream,
    )
    _checked(_functions().paddle_kv_queue_submit(ctypes.byref(transfer)))


def enqueued() -> int:
    """How many transfers were enqueued in this process."""
    return int(_functions().paddle_kv_queue_enqueued())


def submitted() -> int:
    """How many of the first of them are submitted: none of those waits for an event any more that is not recorded."""
    return int(_functions().paddle_kv_queue_submitted())


def flush(stream: int, timeout_s: float | None = None) -> bool:
    """Blocks until all transfers of the stream are submitted; False if the time was over first."""
    return _checked(_functions().paddle_kv_queue_flush(stream, _microseconds(timeout_s))) == 0


def wait_stream(device_id: int, stream: int, event: int, timeout_s: float | None) -> bool:
    """Work submitted to ``stream`` from now on runs after the event. Blocks the host while the event is pending; False
    if it still was when the time was over."""
    return _checked(_functions().paddle_kv_queue_wait_stream(device_id, stream, event, _microseconds(timeout_s))) == 0


def query(device_id: int, *events: int) -> bool:
    """Whether all of the events were passed; asks up to the first that was not.

    Raises what went wrong in the submission before one of them, once it was passed.
    """
    handles = (ctypes.c_int64 * len(events))(*events)
    return _checked(_functions().paddle_kv_queue_query(device_id, handles, len(events))) == 0


def push_device(device_id: int) -> None:
    """Makes a GPU current for this thread until :func:`pop_device`. No context is made on the one that was."""
    _checked(_functions().paddle_kv_queue_push_device(device_id))


def pop_device() -> None:
    """Makes current what was before the last :func:`push_device`."""
    _functions().paddle_kv_queue_pop_device()


def forget(event: int) -> bool:
    """Forgets the failure of an event; whether there was one."""
    return _checked(_functions().paddle_kv_queue_forget(event)) == 1


def set_thresholds(sizes: Sequence[int]) -> None:
    """From which average sizes in bytes on engine "auto" takes which engine; see ``transfer/engine_choice.h``."""
    nine = np.array(sizes, np.int64)
    if nine.shape != (9,):
        raise ValueError(f"sizes has {nine.size} entries; 9 are expected")
    _checked(_functions().paddle_kv_queue_set_thresholds(nine.ctypes.data))


def _microseconds(timeout_s: float | None) -> int:
    return NO_END if timeout_s is None else max(0, int(timeout_s * 1e6))
