"""The backend on a GPU: CuPy streams, CUDA events, and one call into the compiled library per submission."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import cupy
from cupy.cuda import runtime

from .. import streams
from ..errors import CudaError
from ..ops._library import call
from . import binding as bindings
from .protocol import LayerWork

SPIN_S = 200e-6  # a wait for the end of a layer is mostly shorter than a sleep
SLEEP_S = 50e-6
NOT_READY = 600  # cudaErrorNotReady
HIGHEST_PRIORITY = -5  # CUDA takes the highest that the GPU has

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _on_device(method: _Function) -> _Function:
    """Runs the method with the backend's device current (a new thread starts on device 0) and CUDA's errors typed."""

    @functools.wraps(method)
    def wrapped(self: CupyBackend, *arguments: Any) -> Any:
        try:
            with self._device:
                return method(self, *arguments)
        except runtime.CUDARuntimeError as error:
            raise CudaError(str(error).split(":", 1)[0], error.status, str(error)) from error

    return wrapped  # type: ignore[return-value]


class CupyBackend:
    """See :class:`~paddle_kv.backend.protocol.Backend`. Events are raw handles, compute streams too."""

    name = "cupy"

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._device = cupy.cuda.Device(device_id)
        self._idle_events: list[int] = []

    def bind(self, device_cache: Any, host_pool: Any) -> int:
        if device_cache.device_id != self._device_id:
            where = "the CPU" if device_cache.device_id is None else f"GPU {device_cache.device_id}"
            raise ValueError(f"the device cache is on {where}; this scheduler works on GPU {self._device_id}")
        return bindings.register(device_cache, host_pool, self._device_id)

    def unbind(self, binding: int) -> None:
        bindings.release(binding)

    @_on_device
    def create_stream(self) -> Any:
        return transfer_stream()

    @_on_device
    def destroy_stream(self, stream: Any) -> None:
        stream.synchronize()

    @_on_device
    def create_event(self) -> int:
        # Creating an event costs more than recording it. A stream wait takes the state at its call, so re-use is safe.
        if self._idle_events:
            return self._idle_events.pop()
        return int(runtime.eventCreateWithFlags(runtime.eventDefault))

    def destroy_event(self, event: int) -> None:
        self._idle_events.append(event)

    @_on_device
    def close(self) -> None:
        while self._idle_events:
            runtime.eventDestroy(self._idle_events.pop())

    @_on_device
    def compute_stream(self, stream: Any) -> int:
        # Asked before anything else is done with the stream: a forbidden call would break the capture.
        named = streams.current(self._device_id) if stream is None else streams.handle_of(stream)
        if runtime.streamIsCapturing(named):
            raise RuntimeError(
                "the stream is being captured into a CUDA graph; a transfer cannot become part of a graph"
            )
        return streams.resolve_on(stream, self._device_id)

    @_on_device
    def record(self, event: int, stream: Any) -> None:
        runtime.eventRecord(event, _handle(stream))

    @_on_device
    def wait_on_stream(self, stream: Any, event: int, timeout_s: float | None) -> None:
        runtime.streamWaitEvent(_handle(stream), event)

    @_on_device
    def copy_layers(self, binding: int, work: LayerWork, stream: Any) -> None:
        plan = work.plan
        call(
            "transfer_layers",
            binding,
            bindings.DIRECTION_CODES[plan.direction],
            plan.device_ids.tolist(),
            plan.host_ids.tolist(),
            plan.layers_of(work.first_group).start,
            plan.layers_of(work.end_group - 1).stop,
            plan.layers_per_event,
            [event for events in work.waits for event in events],
            [len(events) for events in work.waits],
            work.start,
            list(work.records),
            _handle(stream),
        )

    @_on_device
    def is_complete(self, event: int) -> bool:
        status = runtime.eventQuery(event)
        if status == NOT_READY:
            return False
        runtime.check_status(status)
        return True

    def wait(self, event: int, timeout_s: float | None) -> bool:
        # cudaEventSynchronize has no time-out, hence the polling.
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
        event = cupy.cuda.Event()
        event.record(stream)
        return event


def transfer_stream() -> Any:
    """A stream for copies, on the current device."""
    # The copy kernel has two CTAs: they must not queue behind the thousands of a matrix product.
    return cupy.cuda.Stream(non_blocking=True, priority=HIGHEST_PRIORITY)


def _handle(stream: Any) -> int:
    return stream if isinstance(stream, int) else int(stream.ptr)
