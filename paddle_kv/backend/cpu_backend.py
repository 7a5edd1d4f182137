"""The backend without a GPU: a stream is a worker thread, copies run in it without the GIL."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import BackendError
from ..tracking.keeper import Living, Waiter
from . import binding as bindings
from .cpu_gates import CpuGates
from .protocol import Later
from .work import LayerWork


class CpuEvent:
    """Set once. ``error`` is what went wrong before it."""

    def __init__(self) -> None:
        self._passed = False  # no threading.Event: each layer has one of these
        self._reports: deque[Callable[[], Later | None]] = deque()
        self.error: Exception | None = None
        self.time_s = 0.0

    def set(self, error: Exception | None = None) -> None:
        self.error = error
        self.time_s = time.perf_counter()
        self._passed = True
        while self._reports:
            with Living("an error behind an event of the CPU backend"):  # the others hear of it too
                self._report_one()

    def watch(self, report: Callable[[], Later | None]) -> None:
        """Calls it once, when the event was passed."""
        self._reports.append(report)
        if self.done():
            self._report_one()

    def _report_one(self) -> None:
        with contextlib.suppress(IndexError):  # the other one was quicker
            later = self._reports.popleft()()
            if later is not None:
                later.soon()

    def done(self) -> bool:
        """Whether the event was passed."""
        return self._passed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the event was passed; False if the time is over first."""
        # On a lock of its own: an exception of a signal handler can leave one that is shared held, or free it twice,
        # and then the stream could not set the event.
        if self._passed:
            return True
        waiter = Waiter()
        self.watch(waiter.release)
        return waiter.sleep(timeout_s) or self._passed

    def synchronize(self) -> None:
        """:meth:`wait` without a time-out, under the name that CUDA events have."""
        self.wait()


class CpuStream:
    """A thread that runs tasks in order. A daemon: what is in flight at exit is waited for by the scheduler."""

    _names = itertools.count()

    def __init__(self) -> None:
        self.copies: deque[_Task] = deque()  # not at their end
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
            with Living("an error in a stream of the CPU backend"):
                task()


class _Task:
    """Layers that a stream copies. A group that has begun is copied to its end."""

    def __init__(self, work: LayerWork) -> None:
        self.work = work
        self._lock = threading.Lock()
        self._next_group = work.first_group
        self._end_group = work.end_group

    def begin(self, group: int) -> bool:
        """Whether the group is to be copied."""
        with self._lock:
            self._next_group = group + 1
            return group < self._end_group

    def cancel(self) -> int | None:
        """The first group that will not be copied."""
        with self._lock:
            if self._next_group >= self._end_group:
                return None
            self._end_group = self._next_group
            return self._end_group


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

    def create_gates(self, num_layers: int, timeout_s: float) -> CpuGates:
        return CpuGates(num_layers, timeout_s, self.create_stream)

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
        task = _Task(work)
        stream.copies.append(task)
        stream.submit(lambda: _copy(binding, task, stream))

    def watch(self, events: Sequence[CpuEvent], report: Callable[[], Later | None]) -> None:
        events[0].watch(report)  # the last of its stream, which has passed the others before

    def cancel(self, stream: CpuStream, number: int) -> int | None:
        tasks = [task for task in list(stream.copies) if task.work.number == number]
        dropped = [(task, group) for task in tasks if (group := task.cancel()) is not None]
        return min((task.work.plan.layers_of(group).start for task, group in dropped), default=None)

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


def _copy(binding: int, task: _Task, stream: CpuStream) -> None:
    work, plan = task.work, task.work.plan
    error: Exception | None = None
    for group in range(work.first_group, work.end_group):
        for event in work.waits[group - work.first_group]:
            event.wait()
        if group == work.first_group:
            work.start.set()
        layers = plan.layers_of(group)
        if error is None:
            try:
                if not task.begin(group):
                    raise BackendError(f"the transfer was cancelled before layer {layers.start} was copied")
                bindings.copy(binding, plan, layers)
            except Exception as failure:  # noqa: BLE001  the worker lives; the transfer carries the error
                error = failure
            except BaseException as failure:  # noqa: BLE001  SystemExit of a thread is no failure of whoever asks
                error = BackendError(f"{type(failure).__name__}: {failure}")
        if group == work.end_group - 1:
            stream.copies.remove(task)
        work.records[group - work.first_group].set(error)
