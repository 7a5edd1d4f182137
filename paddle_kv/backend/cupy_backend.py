"""The backend on a GPU: CuPy streams, CUDA events, and a thread of the compiled library that submits the copies."""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import cupy
from cupy.cuda import runtime

from .. import streams
from ..errors import CaptureError, CudaError
from . import binding as bindings
from . import calibration, completions, transfer_queue
from .cuda_gates import CudaGates
from .protocol import Later
from .work import ENGINES, LayerWork

SPIN_S = 200e-6  # a wait for the end of a layer is mostly shorter than a sleep
SLEEP_S = 50e-6
HIGHEST_PRIORITY = -5  # CUDA takes the highest that the GPU has

_left_over: list[tuple[int, array[int]]] = []  # events of closed backends that another one's transfers still wait for
_left_over_lock = threading.Lock()  # or two that close at once would both destroy them

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _on_device(method: _Function) -> _Function:
    """Runs the method with the backend's device current and CUDA's errors typed.

    A new thread starts on device 0. CuPy's ``with Device`` would set that back, which makes a context there.
    """

    @functools.wraps(method)
    def wrapped(self: CupyBackend, *arguments: Any, **options: Any) -> Any:
        pushed = False
        try:
            if runtime.getDevice() != self._device_id:
                transfer_queue.push_device(self._device_id)
                pushed = True
            return method(self, *arguments, **options)
        except runtime.CUDARuntimeError as error:
            raise CudaError(str(error).split(":", 1)[0], error.status, str(error)) from error
        finally:
            if pushed:
                transfer_queue.pop_device()

    return wrapped  # type: ignore[return-value]


class CupyBackend:
    """See :class:`~paddle_kv.backend.protocol.Backend`. Events are raw handles, compute streams too."""

    name = "cupy"

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        # Handles in arrays: hundreds of them are taken and given back with each transfer.
        self._idle_events = array("q")
        self._given_back = array("q")
        # Transfers that were enqueued at some time after they were given back, events.
        self._resting_events: deque[tuple[int, array[int]]] = deque()
        self._saw_failure = False
        self._named: tuple[Any, int] = (None, 0)  # the stream that was named last, kept alive by that, and its handle
        costs = calibration.load(device_name(device_id)) or calibration.EngineCosts()
        transfer_queue.set_costs(device_id, costs.in_order())

    def bind(self, device_cache: Any, host_pool: Any) -> int:
        if device_cache.device_id != self._device_id:
            where = "the CPU" if device_cache.device_id is None else f"GPU {device_cache.device_id}"
            raise ValueError(f"the device cache is on {where}; this scheduler works on GPU {self._device_id}")
        return bindings.register(device_cache, host_pool, self._device_id)

    def unbind(self, binding: int) -> None:
        bindings.release(binding)

    @_on_device
    def create_stream(self, *, urgent: bool = False) -> Any:
        stream = transfer_stream()
        transfer_queue.open_stream(self._device_id, stream.ptr, urgent=urgent)
        return stream

    @_on_device
    def destroy_stream(self, stream: Any) -> None:
        transfer_queue.close_stream(stream.ptr)
        # CuPy would destroy it where the last reference goes: in a thread on another GPU that makes a context there.
        handle, stream.ptr = stream.ptr, 0
        runtime.streamDestroy(handle)

    def create_gates(self, num_layers: int, timeout_s: float) -> CudaGates:
        return CudaGates(self._device_id, num_layers, timeout_s)

    def create_event(self) -> int:
        [event] = self.create_events(1)
        return event

    def create_events(self, count: int) -> array[int]:
        """As many at once; all or none."""
        # Creating an event costs more than recording it.
        idle = self._idle_events
        if len(idle) < count:
            self._wake_events()
        first = max(0, len(idle) - count)
        taken = idle[first:]
        del idle[first:]
        try:
            while len(taken) < count:
                taken.append(self._new_event())
        except BaseException:
            idle += taken
            raise
        return taken

    @_on_device
    def _new_event(self) -> int:
        return int(runtime.eventCreateWithFlags(runtime.eventDefault))

    def destroy_event(self, event: int) -> None:
        self.destroy_events([event])

    def destroy_events(self, events: Sequence[int]) -> None:
        """Of a transfer at once."""
        if self._saw_failure:
            for event in events:
                transfer_queue.forget(event)
        self._given_back.extend(events)

    def _wake_events(self) -> None:
        # A transfer that is enqueued, not submitted, may still have to wait for an event that was given back: recorded
        # anew it would mean another point of another stream, perhaps one that waits for that very transfer.
        if self._given_back:
            self._resting_events.append((transfer_queue.enqueued(), self._given_back))
            self._given_back = array("q")
        submitted = transfer_queue.submitted()
        while self._resting_events and self._resting_events[0][0] <= submitted:
            self._idle_events.extend(self._resting_events.popleft()[1])

    @_on_device
    def close(self) -> None:
        with _left_over_lock:
            self._resting_events.extendleft(reversed(_left_over))
            self._wake_events()
            _left_over[:] = self._resting_events
            self._resting_events.clear()
        while self._idle_events:
            runtime.eventDestroy(self._idle_events.pop())

    def compute_stream(self, stream: Any) -> int:
        named, handle = self._named
        if stream is None or stream is not named:
            known = self._known_stream(stream)
            if known is None:
                return self._look_up(stream)
            handle = known
        self._check_not_captured(handle)
        return handle

    def _known_stream(self, stream: Any) -> int | None:
        """The handle, where nothing has to be done for it: the stream that was named last, or Paddle's current one."""
        if stream is not None:
            named, handle = self._named
            return handle if stream is named else None
        if runtime.getDevice() != self._device_id or streams.cupy_stream() is not None:
            return None
        return streams.paddle_stream(self._device_id)

    @_on_device
    def _look_up(self, stream: Any) -> int:
        surrounding = streams.cupy_stream() if stream is None else stream
        handle = streams.paddle_stream(self._device_id) if surrounding is None else streams.handle_of(surrounding)
        of = getattr(stream, "device_id", -1)  # CuPy's streams know, mostly
        if of not in (-1, self._device_id):
            raise ValueError(f"stream is one of GPU {of}; this scheduler works on GPU {self._device_id}")
        self._check_not_captured(handle)
        if surrounding is not stream:
            return streams.resolve_on(None, self._device_id)
        if stream is not None:
            self._named = stream, handle
        return handle

    def _check_not_captured(self, stream: int) -> None:
        """Before anything else is done with the stream: a forbidden call would break the capture."""
        if transfer_queue.is_capturing(self._device_id, stream):
            raise CaptureError(
                "the stream is being captured into a CUDA graph; a transfer cannot become part of a graph"
            )

    def record(self, event: int, stream: Any) -> None:
        transfer_queue.record(self._device_id, event, _handle(stream))

    def wait_on_stream(self, stream: Any, event: int, timeout_s: float | None) -> None:
        if not transfer_queue.wait_stream(self._device_id, _handle(stream), event, timeout_s):
            raise TimeoutError(f"the layer was not submitted within timeout_s = {timeout_s}")

    def wait_on_compute(self, stream: Any, event: int, timeout_s: float | None) -> int:
        known = self._known_stream(stream)
        if known is None:
            known = self._look_up(stream)
        is_behind = transfer_queue.wait_uncaptured(self._device_id, known, event, timeout_s)
        if is_behind is None:
            self._check_not_captured(known)
        if not is_behind:
            raise TimeoutError(f"the layer was not submitted within timeout_s = {timeout_s}")
        return known

    def copy_and_watch(self, binding: int, work: LayerWork, stream: Any, report: Callable[[], Later | None]) -> int:
        work.watch = completions.expect(report)
        try:
            self.copy_layers(binding, work, stream)
        except BaseException:
            completions.forget(work.watch)
            raise
        return work.watch

    def start_alone(self, binding: int, transfer: Any, group: Any, sections: int) -> bool:
        scheduler = transfer.scheduler
        compute = self._known_stream(scheduler.default_stream)
        stream = scheduler.resources.streams.get(transfer.direction)
        if compute is None or stream is None:  # none: another thread has closed it
            return False
        if transfer.num_blocks > transfer_queue.FEW_BLOCKS:
            return False  # the step would copy them with the GIL
        reports, transfer.token = completions.place()
        return transfer_queue.submit_alone(
            binding,
            bindings.DIRECTION_CODES[transfer.direction],
            ENGINES.index(scheduler.engine),
            *transfer.ids,
            scheduler.device_cache.spec.num_layers,
            scheduler.layers_per_event,
            transfer.held.events,
            stream.ptr,
            transfer.number,
            self._device_id,
            compute,
            reports,
            transfer.token,
            transfer.reporter(),
            group,
            sections,
            transfer,
            scheduler.resources.reserve,
        )

    def copy_layers(self, binding: int, work: LayerWork, stream: Any) -> None:
        plan = work.plan
        transfer_queue.submit(
            plan=binding,
            direction=bindings.DIRECTION_CODES[plan.direction],
            engine=ENGINES.index(work.engine),
            device_ids=plan.device_ids,
            host_ids=plan.host_ids,
            layers=work.layers,
            layers_per_event=plan.layers_per_event,
            waits=work.waits,
            start_event=work.start,
            record_events=work.records,
            stream=stream.ptr,
            token=work.number,
            watch=work.watch,
        )

    def submit_by_marks(self, binding: int, work: LayerWork, starts: Sequence[int], stream: Any) -> bool:
        if len(work.plan.device_ids) > transfer_queue.FEW_BLOCKS:
            return False  # each mark would sort them, with the GIL
        plan = work.plan
        transfer_queue.submit_by_marks(
            plan=binding,
            direction=bindings.DIRECTION_CODES[plan.direction],
            engine=ENGINES.index(work.engine),
            device_ids=plan.device_ids,
            host_ids=plan.host_ids,
            layers=work.layers,
            layers_per_event=plan.layers_per_event,
            marks=work.waits,
            start_events=starts,
            record_events=work.records,
            stream=stream.ptr,
            token=work.number,
        )
        return True

    def mark_layer(self, number: int, layer: int, stream: int) -> bool | None:
        return transfer_queue.mark(number, layer, stream)

    def take_enqueued(self, number: int, known: int, num_groups: int, ends: bool) -> list[int]:
        return transfer_queue.take_enqueued(number, known, num_groups, ends=ends)

    def watch(self, events: Sequence[int], report: Callable[[], Later | None]) -> int:
        return completions.watch(self._device_id, events, report)

    def hear(
        self, watched: int, timeout_s: float | None, told: Callable[[], object], report: Callable[[], Later | None]
    ) -> None:
        completions.hear(watched, timeout_s, told, report)

    def cancel(self, stream: Any, number: int) -> int | None:
        return transfer_queue.cancel(stream.ptr, number)

    def is_complete(self, *events: int) -> bool:
        try:
            return transfer_queue.query(self._device_id, *events)
        except (CudaError, MemoryError, transfer_queue.Cancelled):
            self._saw_failure = True
            raise

    def wait(self, event: int, timeout_s: float | None) -> bool:
        # For the first event of a scheduler and for failures alone. cudaEventSynchronize has no time-out, hence the
        # polling.
        started = time.perf_counter()
        while not self.is_complete(event):
            waited = time.perf_counter() - started
            if timeout_s is not None and waited >= timeout_s:
                return False
            time.sleep(0 if waited < SPIN_S else SLEEP_S)
        return True

    @_on_device
    def elapsed_ms(self, start: int, end: int) -> float:
        return float(runtime.eventElapsedTime(start, end))

    @_on_device
    def user_event(self, stream: Any) -> Any:
        transfer_queue.flush(stream.ptr)  # it covers what is enqueued, not only what is submitted yet
        event = cupy.cuda.Event()
        event.record(stream)
        return event


def device_name(device_id: int) -> str:
    """The kind of GPU."""
    return str(runtime.getDeviceProperties(device_id)["name"].decode())


def transfer_stream() -> Any:
    """A stream for copies, on the current device."""
    # The copy kernel has two CTAs: they must not queue behind the thousands of a matrix product.
    return cupy.cuda.Stream(non_blocking=True, priority=HIGHEST_PRIORITY)


def _handle(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    transfer_queue.flush(stream.ptr)  # behind what is enqueued, not only behind what is submitted yet
    return int(stream.ptr)
