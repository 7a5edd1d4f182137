"""The library's thread that submits transfers to a GPU, so that the calling thread is not held.

Called through ctypes, but for ``submit`` and ``submit_by_marks``, which have so many arguments that ctypes would take
longer than the call, ``mark``, ``is_capturing``, ``record``, ``wait_stream``, ``enqueued`` and ``submitted``, which
are called for every layer of a model or start of a transfer, and ``hear``, in which handlers of signals run: an
operator call of Paddle costs 10 to 40 us. ctypes gives up the GIL for the time of a call; those that only look into the
queue, under a lock that nobody holds while CUDA works, keep it: to get it back costs more than they do. So do the calls
for a layer, unless they have to wait. Streams and events are handles. The C side is
``custom_ops/include/paddle_kv/transfer/queue_api.h``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import CudaError
from ..ops import _library

NO_END = -1
NUM_COSTS = 3 * 2 * 2 * 7  # engines, ways, alone and beside compute, sizes
FEW_BLOCKS = 8192  # copied in less time than it takes to get the GIL back
_MARKED = (True, True, False, None)  # of what paddle_kv_queue_mark gives
FEW_EVENTS = 4  # asked for in less: beside a thread that launches kernels that may take 5 ms


class _DevicePlan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("number", "device", "device_blocks", "other_blocks")),
        *((name, ctypes.c_int64) for name in ("layer_count", "tensors_per_layer", "on_other_gpu")),
        *((name, ctypes.c_void_p) for name in ("device_pointers", "other_pointers")),
        *((name, ctypes.c_void_p) for name in ("device_strides", "other_strides", "block_bytes")),
    )


class Cancelled(Exception):
    """What was dropped by :func:`cancel`: its events report this."""


@functools.cache
def _functions(keeping_the_gil: bool = False) -> Any:
    kind = ctypes.PyDLL if keeping_the_gil else ctypes.CDLL
    library = kind(str(_library.LIBRARY))  # loaded already: the same one
    library.paddle_kv_queue_error.restype = ctypes.c_char_p
    arguments = {
        "error": [ctypes.c_void_p, ctypes.c_void_p],
        "register_device_plan": [ctypes.c_void_p],
        "open": [ctypes.c_int, ctypes.c_int64, ctypes.c_int],
        "close": [ctypes.c_int64],
        "flush": [ctypes.c_int64, ctypes.c_int64],
        "query": [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64],
        "push_device": [ctypes.c_int],
        "forget": [ctypes.c_int64],
        "set_costs": [ctypes.c_int, ctypes.c_void_p],
        "take_enqueued": [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p],
        "cancel": [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p],
        "watch": [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64],
    }
    for name, types in arguments.items():
        getattr(library, f"paddle_kv_queue_{name}").argtypes = types
    library.paddle_kv_queue_take_enqueued.restype = ctypes.c_int64
    library.paddle_kv_queue_pop_device.restype = None
    library.paddle_kv_completions_take.restype = ctypes.c_int64
    library.paddle_kv_completions_take.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


@functools.cache
def _submit() -> Any:
    function = ctypes.cast(_functions().paddle_kv_queue_submit, ctypes.c_void_p).value
    return functools.partial(_library.queue_functions()["submit"], function, FEW_BLOCKS)


@functools.cache
def _by_address(name: str, caller: str = "") -> Any:
    """``caller``: what calls it, where that has another name."""
    address = ctypes.cast(getattr(_functions(), f"paddle_kv_queue_{name}"), ctypes.c_void_p).value
    return functools.partial(_library.queue_functions()[caller or name], address)


def _by_addresses(caller: str, *names: str) -> Any:
    addresses = [ctypes.cast(getattr(_functions(), f"paddle_kv_queue_{name}"), ctypes.c_void_p).value for name in names]
    return functools.partial(_library.queue_functions()[caller], *addresses)


@functools.cache
def _hear() -> Any:
    return _by_addresses("hear", "hear", "end_hearing")


@functools.cache
def _submit_alone() -> Any:
    return _by_addresses("submit_alone", "submit", "is_capturing", "record")


def checked(result: int) -> int:
    """What a function of the library gave, unless it is an error: that is raised."""
    if result >= 0:
        return result
    code, name = ctypes.c_int(), ctypes.c_char_p()
    text = _functions().paddle_kv_queue_error(ctypes.byref(code), ctypes.byref(name)).decode()
    if code.value:
        raise CudaError((name.value or b"").decode(), code.value, text)
    raise {b"cancelled": Cancelled, b"out of host memory": MemoryError}.get(name.value or b"", RuntimeError)(text)


def register_device_plan(
    number: int,
    device: int,
    device_blocks: int,
    other_blocks: int,
    device_pointers: Sequence[int],
    other_pointers: Sequence[int],
    device_strides: Sequence[int],
    other_strides: Sequence[int],
    block_bytes: Sequence[int],
    *,
    on_other_gpu: bool,
) -> None:
    """A transfer plan between two caches that both lie on GPUs; pointers in order [layer][tensor]. ``on_other_gpu``:
    the other cache lies not on ``device``.

    Raises:
        ValueError: a block does not lie in memory of a GPU, or the parts do not fit each other.
    """
    lists = [
        np.array(one, np.int64) for one in (device_pointers, other_pointers, device_strides, other_strides, block_bytes)
    ]
    layers = len(lists[0]) // len(lists[4])
    counts = (number, device, device_blocks, other_blocks, layers, len(lists[4]), int(on_other_gpu))
    plan = _DevicePlan(*counts, *(one.ctypes.data for one in lists))
    try:
        checked(_functions().paddle_kv_queue_register_device_plan(ctypes.byref(plan)))
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def open_stream(device_id: int, stream: int, *, urgent: bool) -> None:
    """Lets a stream take transfers. Those of urgent streams are submitted first."""
    checked(_functions().paddle_kv_queue_open(device_id, stream, urgent))


def close_stream(stream: int) -> None:
    """Waits until all of its transfers are done, and frees what was needed for them."""
    checked(_functions().paddle_kv_queue_close(stream))


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
    token: int = 0,
    watch: int = -1,
) -> None:
    """Enqueues groups of layers. The record events are pending from here on; the start event is recorded behind the
    waits of the first group. Ids are contiguous int64 arrays, which may go away on return. The token is what
    :func:`cancel` knows the transfer by; several submissions of one have the same. ``watch``: a token of :func:`watch`
    for the last of the record events; negative: nobody is told.

    Raises RuntimeError if something of this cannot be right; then nothing is enqueued."""
    checked(
        _submit()(
            plan,
            direction,
            engine,
            device_ids,
            host_ids,
            layers.start,
            layers.stop,
            layers_per_event,
            waits,
            (start_event,),
            record_events,
            stream,
            token,
            watch,
        )
    )


def submit_by_marks(
    *,
    plan: int,
    direction: int,
    engine: int,
    device_ids: np.ndarray,
    host_ids: np.ndarray,
    layers: range,
    layers_per_event: int,
    marks: Sequence[Sequence[int]],
    start_events: Sequence[int],
    record_events: Sequence[int],
    stream: int,
    token: int,
) -> None:
    """As :func:`submit`, but each group is enqueued when :func:`mark` was called for its layers, which records their
    events among ``marks``. Until then its record event is not pending. A start event for each group."""
    checked(
        _by_address("submit_by_marks")(
            plan,
            direction,
            engine,
            device_ids,
            host_ids,
            layers.start,
            layers.stop,
            layers_per_event,
            marks,
            start_events,
            record_events,
            stream,
            token,
            -1,
        )
    )


def submit_alone(*given: Any) -> bool:
    """:func:`submit` of all layers of a transfer behind an event that is recorded on a compute stream, unless that
    is being captured, a section of the group has begun, or something cannot be right: then False, and nothing was
    enqueued. By one step of C code: who has to know of it (``reports``, as of :func:`hear`, and the group) does so from
    then on.

    ``given``: plan, direction, engine, ids of the device and of the host as bytes of int64, layers, layers an event,
    the events (of compute, of the start, of each group), stream, number; device and compute stream; ``reports``, token
    and report; the group, how many of its sections had begun, what becomes its ``alone``, and the list of which
    the events are taken: it is empty from then on."""
    return bool(_submit_alone()(*given))


def mark(token: int, layer: int, compute_stream: int) -> bool | None:
    """Records the event of a mark on a stream, unless the layer is marked. False: no marks of that transfer are
    expected any more, and nothing was recorded. None: it was, but there was no memory to enqueue the group, and later
    marks enqueue nothing."""
    result = _by_address("mark")(token, layer, compute_stream)
    return _MARKED[result if result >= 0 else checked(result)]


def take_enqueued(token: int, first: int, groups: int, *, ends: bool) -> list[int]:
    """Which of the ``groups`` of a transfer marks have enqueued, in that order, but for the ``first`` of them.
    ``ends``: later marks enqueue nothing."""
    room = (ctypes.c_int64 * groups)()
    count = _functions(True).paddle_kv_queue_take_enqueued(token, first, ends, room)
    return room[:count]


def cancel(stream: int, token: int) -> int | None:
    """Whatever of the transfer is queued and no engine was given is not copied any more; its events are recorded
    all the same, behind what they had to wait for, and report :class:`Cancelled`.

    Returns the first layer of which not everything was given to an engine, None if nothing was dropped.
    """
    layer = ctypes.c_int64()
    checked(_functions(True).paddle_kv_queue_cancel(stream, token, ctypes.byref(layer)))
    return None if layer.value < 0 else layer.value


def watch(device_id: int, token: int, events: Sequence[int]) -> None:
    """The token is reported once all of the events are recorded and passed, with or without a failure (:func:`query`
    tells), or the device is lost. The events must live until then."""
    handles = (ctypes.c_int64 * len(events))(*events)
    checked(_functions(True).paddle_kv_queue_watch(device_id, token, handles, len(events)))


def hear(
    token: int,
    timeout_s: float | None,
    told: Callable[[], object],
    reports: dict[int, Callable[[], Any]],
    report: Callable[[], Any],
) -> bool:
    """Waits until a token of :func:`watch` is reported, and calls ``told`` then; signal handlers run meanwhile.
    :func:`take_completions` gives the token only if ``told`` raises, or has not returned after 10 ms, as a handler may
    run before it: ``report`` is in ``reports`` under the token until it has. False: not within the time, or somebody
    else has heard of it, or will: ``told`` was not called."""
    return checked(_hear()(reports, token, _microseconds(timeout_s), told, report)) == 0


def completions_fd() -> int:
    """A descriptor, one a process, that is readable when tokens were reported; :func:`take_completions` reads it."""
    return checked(_functions().paddle_kv_completions_open())


def take_completions() -> list[int]:
    """The tokens reported since the last call, the oldest first; perhaps none although the descriptor was readable."""
    taken: list[int] = []
    tokens = (ctypes.c_int64 * 256)()
    while count := _functions(True).paddle_kv_completions_take(tokens, len(tokens)):
        taken += tokens[:count]
    return taken


def enqueued() -> int:
    """How many transfers were enqueued in this process."""
    return int(_by_address("enqueued", "ask")())


def submitted() -> int:
    """How many of the first of them are submitted: none of those waits for an event any more that is not recorded."""
    return int(_by_address("submitted", "ask")())


def flush(stream: int, timeout_s: float | None = None) -> bool:
    """Blocks until all transfers of the stream are submitted; False if the time was over first."""
    return checked(_functions().paddle_kv_queue_flush(stream, _microseconds(timeout_s))) == 0


def is_capturing(device_id: int, stream: int) -> bool:
    """Whether the stream is being captured into a CUDA graph. Does nothing else with it."""
    result = _by_address("is_capturing")(device_id, stream)
    return result != 0 and checked(result) == 1


def record(device_id: int, event: int, stream: int) -> None:
    """The event stands for what was submitted to ``stream`` so far."""
    checked(_by_address("record")(device_id, event, stream))


def wait_stream(device_id: int, stream: int, event: int, timeout_s: float | None) -> bool:
    """Work submitted to ``stream`` from now on runs after the event. Blocks the host while the event is pending; False
    if it still was when the time was over."""
    return checked(_by_address("wait_stream")(device_id, stream, event, _microseconds(timeout_s))) == 0


def wait_uncaptured(device_id: int, stream: int, event: int, timeout_s: float | None) -> bool | None:
    """:func:`wait_stream`, unless the stream is being captured: then None. For each layer of a model, so without
    functions in between."""
    captured = _by_address("is_capturing")(device_id, stream)
    if captured:
        return None if checked(captured) else False
    timeout_us = NO_END if timeout_s is None else _microseconds(timeout_s)
    result = _by_address("wait_stream")(device_id, stream, event, timeout_us)
    return not result or checked(result) == 0


def query(device_id: int, *events: int) -> bool:
    """Whether all of the events were passed; asks up to the first that was not.

    Raises what went wrong in the submission before one of them, once it was passed.
    """
    handles = (ctypes.c_int64 * len(events))(*events)
    return checked(_functions(len(events) <= FEW_EVENTS).paddle_kv_queue_query(device_id, handles, len(events))) == 0


def push_device(device_id: int) -> None:
    """Makes a GPU current for this thread until :func:`pop_device`. No context is made on the one that was."""
    checked(_functions().paddle_kv_queue_push_device(device_id))


def pop_device() -> None:
    """Makes current what was before the last :func:`push_device`."""
    _functions().paddle_kv_queue_pop_device()


def forget(event: int) -> bool:
    """Forgets the failure of an event; whether there was one."""
    return checked(_functions(True).paddle_kv_queue_forget(event)) == 1


def set_costs(device_id: int, costs: Sequence[int]) -> None:
    """What each engine costs on this GPU, for engine "auto": ``transfer/engine_choice.h``."""
    given = np.array(costs, np.int64)
    if given.shape != (NUM_COSTS,):
        raise ValueError(f"costs has {given.size} entries; {NUM_COSTS} are expected")
    checked(_functions().paddle_kv_queue_set_costs(device_id, given.ctypes.data))


def _microseconds(timeout_s: float | None) -> int:
    return NO_END if timeout_s is None else max(0, int(timeout_s * 1e6))
