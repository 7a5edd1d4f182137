"""What a scheduler holds on its device, apart from it: the garbage collector may take a scheduler that nobody closed.

That can happen in any thread, under any lock, also in the thread of a stream, where nothing can be waited for. So what
such a scheduler held is only put aside, and given back when the next one is made or closed, or at exit. A transfer in
flight keeps its scheduler, so nothing of it is in use any more.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ..backend.protocol import Backend
from ..backend.work import Event, Stream

abandoned: deque[DeviceResources] = deque()


class Events:
    """Events that are given back together, when the last reference to them goes: whoever waits for one of them keeps
    them by a reference, and an exception that ends the wait lets go of it by itself."""

    def __init__(self, events: list[Event], given_back: deque[list[Event]], notify: Callable[[], object]) -> None:
        self._events = events
        self._given_back = given_back
        self._notify = notify

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __del__(self) -> None:
        self._given_back.append(self._events)
        self._notify()


class DeviceResources:
    """The registered pointers of a pair of pools, a stream for each direction, events. Holds none of the pools."""

    def __init__(
        self, backend: Backend, device_cache: Any, host_pool: Any, notify: Callable[[], object] = lambda: None
    ) -> None:
        self.backend = backend
        self._notify = notify  # events were given back
        self.streams: dict[str, Stream] = {}
        self._num_events = 0
        self._given_back: deque[list[Event]] = deque()
        self._process_id = os.getpid()
        self.binding = backend.bind(device_cache, host_pool)
        try:
            for direction in ("onload", "offload"):
                self.streams[direction] = backend.create_stream()
            self._own_events: Events | None = self.take_events(1)
        except BaseException:
            self.release()
            raise
        [self.origin_event] = self._own_events

    def urgent_stream(self) -> Stream:
        """The stream of loads that must not queue behind others; most schedulers never need it."""
        if "urgent" not in self.streams:
            self.streams["urgent"] = self.backend.create_stream(urgent=True)
        return self.streams["urgent"]

    @property
    def num_events(self) -> int:
        """Those that were taken and are still in use."""
        self._collect_events()
        return self._num_events

    def take_events(self, count: int) -> Events:
        """So many. Only under the lock, as all of this."""
        self._collect_events()
        taken: list[Event] = []
        events = Events(taken, self._given_back, self._notify)  # has those that could be made if one cannot
        try:
            for _ in range(count):
                taken.append(self.backend.create_event())
                self._num_events += 1
        except BaseException:
            self._given_back.append(taken.copy())
            taken.clear()  # the exception keeps this frame
            raise
        return events

    def _collect_events(self) -> None:
        destroy = self.backend.destroy_event
        while self._given_back:
            events = self._given_back.popleft()
            self._num_events -= len(events)
            for event in events:
                destroy(event)

    def release(self, in_section: Callable[[Callable[[], None]], object] = lambda function: function()) -> None:
        """Gives everything back, once. Not under a lock: a stream that ends may wait for a thread that wants it. But
        others may be counting the events."""
        if self._process_id != os.getpid():
            return  # forked: the parent has them
        with contextlib.ExitStack() as steps:  # one that fails (a lost device) must not keep the others
            steps.callback(self.backend.close)
            steps.callback(self.backend.unbind, self.binding)
            self._own_events = None
            steps.callback(in_section, self._collect_events)
            while self.streams:
                steps.callback(self.backend.destroy_stream, self.streams.popitem()[1])


def release_abandoned() -> None:
    """Gives back what schedulers held that nobody closed."""
    while abandoned:
        with contextlib.suppress(Exception, IndexError):  # a lost device; another thread was quicker
            abandoned.popleft().release()
