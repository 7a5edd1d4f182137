"""What the scheduler needs of a device. It reaches one through nothing else.

Streams are queues that run their work in order; events mark a point of a stream. Streams and events are opaque to the
scheduler. Only events that have been recorded, or handed to ``copy_layers`` for it, are ever waited for: waiting for
an unrecorded CUDA event is a no-op. A backend that records them later has to hold such waits back until it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .work import Event, LayerWork, Stream


class Gates(Protocol):
    """What stands in front of layers and behind them in graphs that are launched again and again. Turns are numbers
    that grow; all gates begin open, with turn 0."""

    def wait(self, layer: int, stream: Any) -> None:
        """A launch: holds the stream until the layer has come to the turn that it was armed for last; gives up after
        the time-out of the gates. ``stream``: as the user named it; None: whatever is current."""

    def mark(self, layer: int, stream: Any) -> None:
        """A launch: the layer was marked in the turn that the stream was armed for last."""

    def mark_and_wait(self, layer: int, stream: Any) -> None:
        """:meth:`mark` of the layer, and :meth:`wait` in front of the one behind it, which there is, by one launch."""

    def arm(self, stream: Stream, load_turn: int, save_turn: int) -> None:
        """For what is launched on the compute stream from now on."""

    def let_through(self, first_layer: int, turn: int, waits: Sequence[Sequence[Event]]) -> None:
        """One layer after the other comes to the turn behind its events; in the order of the calls."""

    def record_marks(self, turn: int, events: Sequence[Sequence[Event]]) -> None:
        """Records the events of each layer behind its mark of the turn; each call behind the one before."""

    def pass_marks(self, turn: int) -> None:
        """As if all layers had been marked in the turn."""

    def given_up(self, turn: int) -> int | None:
        """The layer whose gate has given up the turn."""

    def close(self) -> None:
        """Frees them, once what was let through and marked is done."""


class Later(Protocol):
    """What is still to be done behind a report, by whoever calls it."""

    def now(self) -> None:
        """By a thread that does nothing else. May wait for a lock."""

    def soon(self) -> None:
        """By a thread that has other work. Waits for nothing."""


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
        """An event that is not recorded; may be one that was given back. A backend may also have ``create_events``,
        which takes their number and returns a list of them; if it raises, none was made."""

    def destroy_event(self, event: Event) -> None:
        """Gives an event back: nobody asks or waits for it again. It need not have been passed. A backend may also have
        ``destroy_events``, which takes a list of them."""

    def create_gates(self, num_layers: int, timeout_s: float) -> Gates:
        """Open ones. May wait for the device."""

    def close(self) -> None:
        """Frees what the backend keeps for re-use."""

    def compute_stream(self, stream: Any) -> Stream:
        """The stream that the user means (see :mod:`paddle_kv.streams`). The one that was named last may be kept alive.

        Raises CaptureError if it is being captured into a graph: nothing that follows would be replayed."""

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait_on_stream(self, stream: Stream, event: Event, timeout_s: float | None) -> None:
        """Work submitted to the stream from now on runs after the event. The caller blocks until the event is recorded;
        where compute has no stream, until it was passed. TimeoutError after ``timeout_s``."""

    def copy_layers(self, binding: Any, work: LayerWork, stream: Stream) -> None:
        """Enqueues. If it raises, an unknown part of the work may have been enqueued.

        A backend may also have ``copy_and_watch``, which takes ``report`` as well: it does what :meth:`watch` does with
        the last record event, and returns what that does. If it raises, nobody calls ``report``.

        A backend may also have ``start_alone(binding, transfer, group, sections)``, for a transfer that comes while
        nothing else is in flight (:class:`~paddle_kv.schedule.alone.Alone`). It records the first of the events of the
        transfer on the compute stream of its scheduler, enqueues all layers behind it, has the last event watched, with
        the report that the transfer gives, makes it the one that is ``alone`` in the group, and empties the reserve of
        the scheduler's resources, of which it has its events. All of this is one step: no other thread and no signal
        handler comes in between. It returns False, and nothing has happened, if more ``sections`` have begun in the
        group, or if the stream is captured, or for any other reason. In ``transfer.token`` it notes what ``watch``
        would return. It has ``wait_on_compute(stream, event, timeout_s)`` too: :meth:`compute_stream` and
        :meth:`wait_on_stream` in one; it returns what the former would.

        A backend may also have these, for layerwise saves whose marks need no more than a call:

        ``submit_by_marks(binding, work, starts, stream)``: each group of the work is enqueued by itself once its layers
        have been marked, behind its own start event among ``starts``. ``work.waits`` has the events that the marks of
        its layers record. Until a group is enqueued, nothing waits for it. Returns whether the backend takes this one.

        ``mark_layer(number, layer, stream)``: records the event of the layer on a compute stream, and enqueues its
        group if that is complete. Out of any thread. True: the layer is marked; it may have been before. False: nothing
        was recorded, since all groups were taken or the marks have ended. None: the layer is marked, but its group is
        not enqueued, and later marks enqueue nothing. If it raises, the layer is not marked.

        ``take_enqueued(number, known, num_groups, ends)``: the groups that were enqueued, in that order, but for the
        first ``known`` of the ``num_groups``. ``ends``: later marks enqueue nothing."""

    def watch(self, events: Sequence[Event], report: Callable[[], Later | None]) -> Any:
        """Calls ``report`` once, out of any thread, when all of the events were passed, whatever they have to tell. All
        are recorded or handed over; the first is the last one of its stream. ``report`` only leaves a message: it takes
        no lock and waits for nothing. What it returns is done once behind all reports that came together.

        A backend may also have ``hear``, which takes what this has returned, ``timeout_s``, a function, and another
        ``report``: the caller, whoever it is, waits for the end himself, and calls the function in place of ``report``,
        which saves the changes of threads between. It returns without if the time is over, or if somebody else is told.
        If the function raises, or does not return soon, the other ``report`` is called too. Of the first one, which
        keeps the events, nothing is kept from the call of the function on."""

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
