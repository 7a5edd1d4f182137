"""The backend without a GPU: a stream is a worker thread, copies run in it without the GIL."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ..schedule.plan import TransferPlan
from . import binding as bindings
from .protocol import LayerWork


class CpuEvent:
    """Set once. ``error`` is what went wrong before it."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.error: BaseException | None = None
        self.time_s = 0.0

    def set(self, error: BaseException | None = None) -> None:
        self.error = error
        self.time_s = time.perf_counter()
        self._passed.set()

    def done(self) -> bool:
        """Whether the event was passed."""
        return self._passed.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the event was passed; False if the time is over first."""
        return self._passed.wait(timeout_s)

    def synchronize(self) -> None:
        """:meth:`wait` without a time-out, under the name that CUDA events have."""
        self._passed.wait()


class CpuStream:
    """A thread that runs tasks in order. A daemon: what is in flight at exit is waited for by the scheduler."""

    _names = itertools.count()

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"paddle_kv-stream-{next(self._names)}", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return self._thread.name

    def submit(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class CpuBackend:
    """See :class:`~paddle_kv.backend.protocol.Backend`. Compute runs in the calling thread: its stream is None."""

    name = "cpu"

    def bind(self, device_cache: Any, host_pool: Any) -> int:
        if device_cache.device_id is not None:
            raise ValueError(
                f"the device cache is on GPU {device_cache.device_id}; the cpu backend needs it on the CPU"
            )
        return bindings.register(device_cache, host_pool, device=-1)

    def unbind(self, binding: int) -> None:
        bindings.release(binding)

    def create_stream(self, *, urgent: bool = False) -> CpuStream:
        return CpuStream()

    def destroy_stream(self, stream: CpuStream) -> None:
        stream.close()

    def create_event(self) -> CpuEvent:
        return CpuEvent()  # never re-used: a wait that is still queued must not see a later recording

    def destroy_event(self, event: CpuEvent) -> None:
        pass

    def close(self) -> None:
        pass

    def compute_stream(self, stream: Any) -> None:
        return None

    def record(self, event: CpuEvent, stream: CpuStream | None) -> None:
        if stream is None:  # compute runs in the caller: all of it is done
            event.set()
        else:
            stream.submit(event.set)

    def wait_on_stream(self, stream: CpuStream | None, event: CpuEvent, timeout_s: float | None) -> None:
        if stream is not None:
            stream.submit(event.wait)
        elif not self.wait(event, timeout_s):
            raise TimeoutError(f"the layer did not arrive within timeout_s = {timeout_s}")

    def copy_layers(self, binding: int, work: LayerWork, stream: CpuStream) -> None:
        stream.submit(lambda: _copy(binding, work))

    def is_complete(self, *events: CpuEvent) -> bool:
        for event in events:
            if not event.done():
                return False
            if event.error is not None:
                raise event.error
        return True

    def wait(self, event: CpuEvent, timeout_s: float | None) -> bool:
        return event.wait(timeout_s) and self.is_complete(event)

    def elapsed_ms(self, start: CpuEvent, end: CpuEvent) -> float:
        return (end.time_s - start.time_s) * 1e3

    def user_event(self, stream: CpuStream) -> CpuEvent:
        event = CpuEvent()
        self.record(event, stream)
        return event


def _copy(binding: int, work: LayerWork) -> None:
    plan: TransferPlan = work.plan
    error: BaseException | None = None
    for group in range(work.first_group, work.end_group):
        for event in work.waits[group - work.first_group]:
            event.wait()
        if group == work.first_group:
            work.start.set()
        layers = plan.layers_of(group)
        if error is None:
            try:
                bindings.copy(binding, plan, layers)
            except BaseException as failure:  # noqa: BLE001  the worker lives; the transfer carries the error
                error = failure
        work.records[group - work.first_group].set(error)
