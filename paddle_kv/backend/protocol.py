"""What the scheduler needs of a device. It reaches one through nothing else.

Streams are queues that run their work in order; events mark a point of a stream. Streams and events are opaque to the
scheduler. Only events that have been recorded, or handed to ``copy_layers`` for it, are ever waited for: waiting for
an unrecorded CUDA event is a no-op. A backend that records them later has to hold such waits back until it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .work import Event, LayerWork, Stream


class Backend(Protocol):
    """One device and the host memory beside it."""

    name: str

    def bind(self, device_cache: Any, host_pool: Any) -> Any:
        """Registers the pointers of both pools; returns what ``copy_layers`` takes as ``binding``.

        Raises ValueError where the pools do not fit the device or each other."""

    def unbind(self, binding: Any) -> None: ...

    def create_stream(self, *, urgent: bool = False) -> Stream:
        """A stream that is ordered against no other one. The work of urgent ones is submitted first."""

    def destroy_stream(self, stream: Stream) -> None: ...

    def create_event(self) -> Event:
        """An event that is not recorded; may be one that was given back."""

    def destroy_event(self, event: Event) -> None:
        """Gives an event back: nobody asks or waits for it again. It need not have been passed."""

    def close(self) -> None:
        """Frees what the backend keeps for re-use."""

    def compute_stream(self, stream: Any) -> Stream:
        """The stream that the user means (see :mod:`paddle_kv.streams`).

        Raises CaptureError if it is being captured into a graph: nothing that follows would be replayed."""

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait_on_stream(self, stream: Stream, event: Event, timeout_s: float | None) -> None:
        """Work submitted to the stream from now on runs after the event. The caller blocks until the event is recorded;
        where compute has no stream, until it was passed. TimeoutError after ``timeout_s``."""

    def copy_layers(self, binding: Any, work: LayerWork, stream: Stream) -> None:
        """Enqueues. If it raises, an unknown part of the work may have been enqueued."""

    def watch(self, events: Sequence[Event], report: Callable[[], None]) -> None:
        """Calls ``report`` once, out of any thread, when all of the events were passed, whatever they have to tell. All
        are recorded or handed over; the first is the last one of its stream. ``report`` only leaves a message: it takes
        no lock and waits for nothing."""

    def cancel(self, stream: Stream, number: int) -> int | None:
        """Of the work of that transfer on the stream nothing is copied any more that has not begun; its events come all
        the same, and tell of a failure. Returns the first layer of which not all is copied, None if all is."""

    def is_complete(self, *events: Event) -> bool:
        """Whether all of the events were passed. Asked in this order: raises what went wrong before the first that has
        something to report, unless one in front of it was not passed."""

    def wait(self, event: Event, timeout_s: float | None) -> bool:
        """Blocks the host until the event was passed (True) or the time is over (False). Raises as ``is_complete``. For
        the start and for failures: transfers are waited for by ``watch``."""

    def elapsed_ms(self, start: Event, end: Event) -> float: ...

    def user_event(self, stream: Stream) -> Any:
        """A recorded event that the user may keep."""
