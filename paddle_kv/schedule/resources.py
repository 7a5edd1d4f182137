"""What a scheduler holds on its device, apart from it: the garbage collector may take a scheduler that nobody closed.

That can happen in any thread, under any lock, also in the thread of a stream, where nothing can be waited for. So what
such a scheduler held is only put aside, and given back when the next one is made or closed, or at exit. A transfer in
flight keeps its scheduler, so nothing of it is in use any more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..backend.protocol import Backend
from ..backend.work import Event, Stream
from ..tracking.group import Grouped, Guard

abandoned: deque[DeviceResources] = deque()


class Events:
    """Events that are given back together, when the last reference to them goes: whoever waits for one of them keeps
    them by a reference, and an exception that ends the wait lets go of it by itself."""

    def __init__(self, events: Sequence[Event], ties: set[_Tie], given_back: deque[Any]) -> None:
        self._tie = tie = _Tie(self, given_back.append)
        self.events = tie.events = events
        ties.add(tie)

    def hold(self, events: Sequence[Event]) -> None:
        """These, in place of those before."""
        self.events = self._tie.events = events

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)


class _Tie(weakref.ref):  # type: ignore[type-arg]
    """When the owner goes, it lies in ``given_back``: by C code alone, which no signal handler interrupts."""

    events: Sequence[Event] = ()  # as long as nobody says which: where there is no memory to say it, the owner goes

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class DeviceResources:
    """The registered pointers of a pair of pools, streams, events and gates. Holds none of the pools."""

    def __init__(
        self, backend: Backend, device_cache: Any, host_pool: Any, notify: Callable[[], object] = lambda: None
    ) -> None:
        self.backend = backend
        self._notify = notify  # events were given back
        self._create_events: Callable[[int], Sequence[Event]] | None = getattr(backend, "create_events", None)
        self._destroy_events = getattr(backend, "destroy_events", functools.partial(_one_by_one, backend.destroy_event))
        self.streams: dict[str, Stream] = {}
        self.closers: list[Callable[[], object]] = []  # of what else lives on the device as long
        self.reserve: list[Events] = []  # of the next transfer that comes alone: see :mod:`.alone`
        self._num_events = 0
        self._ties: set[_Tie] = set()
        self._given_back: deque[_Tie] = deque()
        self._process_id = os.getpid()
        self.binding = backend.bind(device_cache, host_pool)
        try:
            for direction in ("onload", "offload"):
                self.streams[direction] = backend.create_stream()
            self._own_events: Events | None = self.take_events(1)
        except BaseException:
            self.release()
            raise
        [self.origin_event] = self._own_events.events

    def urgent_stream(self) -> Stream:
        """The stream of loads that must not queue behind others; most schedulers never need it."""
        if "urgent" not in self.streams:
            self.streams["urgent"] = self.backend.create_stream(urgent=True)
        return self.streams["urgent"]

    @property
    def num_events(self) -> int:
        """Those that were taken and are still in use."""
        self.collect_events()
        return self._num_events - sum(len(events.events) for events in self.reserve)

    def keep_reserve(self, count: int) -> None:
        """So many events for one that has no time to take them, unless there are some."""
        if not self.reserve:
            self.reserve.append(self.take_events(count))

    def take_events(self, count: int) -> Events:
        """So many. Only under the lock, as all of this."""
        self.collect_events()
        events = Events((), self._ties, self._given_back)
        if self._create_events is None:
            self._create_one_by_one(events, count)
        else:
            events.hold(self._create_events(count))
        self._num_events += count
        return events

    def _create_one_by_one(self, events: Events, count: int) -> None:
        taken: list[Event] = []
        events.hold(taken)  # has those that could be made if one cannot
        try:
            for _ in range(count):
                taken.append(self.backend.create_event())
        except BaseException:
            self._num_events += len(taken)
            Events(taken.copy(), self._ties, self._given_back)  # gone at once
            taken.clear()  # the exception keeps this frame
            raise

    def guard_events(self, member: Grouped) -> None:
        """Whoever waits for those in use hears of each that is given back."""
        for events in [tie() for tie in list(self._ties)]:
            if events is not None and events is not self._own_events:
                Guard.over(events, member, self._notify)

    def collect_events(self) -> None:
        """Gives the backend those that nobody holds any more."""
        while self._given_back:
            tie = self._given_back.popleft()
            self._ties.discard(tie)
            self._num_events -= len(tie.events)
            self._destroy_events(tie.events)

    def release(self, in_section: Callable[[Callable[[], None]], object] = lambda function: function()) -> None:
        """Gives everything back, once. Not under a lock: a stream that ends may wait for a thread that wants it. But
        others may be counting the events."""
        if self._process_id != os.getpid():
            return  # forked: the parent has them
        with contextlib.ExitStack() as steps:  # one that fails (a lost device) must not keep the others
            steps.callback(self.backend.close)
            steps.callback(self.backend.unbind, self.binding)
            self._own_events = None
            self.reserve.clear()
            steps.callback(in_section, self.collect_events)
            while self.closers:
                steps.callback(self.closers.pop())
            while self.streams:
                steps.callback(self.backend.destroy_stream, self.streams.popitem()[1])


def _one_by_one(destroy: Callable[[Event], None], events: Iterable[Event]) -> None:
    for event in events:
        destroy(event)


def release_abandoned() -> None:
    """Gives back what schedulers held that nobody closed."""
    while abandoned:
        with contextlib.suppress(Exception):  # a lost device; another thread was quicker
            abandoned.popleft().release()
