"""What a scheduler holds on its device, apart from it: the garbage collector may take a scheduler that nobody closed.

That can happen in any thread, under any lock, also in the thread of a stream, where nothing can be waited for. So what
such a scheduler held is only put aside, and given back when the next one is made or closed, or at exit. A transfer in
flight keeps its scheduler, so nothing of it is in use any more.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from itertools import repeat, starmap
from typing import Any

from ..backend.protocol import Backend, Event, Stream

abandoned: deque[DeviceResources] = deque()


class DeviceResources:
    """The registered pointers of a pair of pools, a stream for each direction, events. Holds none of the pools."""

    def __init__(self, backend: Backend, device_cache: Any, host_pool: Any) -> None:
        self.backend = backend
        self.num_events = 0
        self.streams: dict[str, Stream] = {}
        self._process_id = os.getpid()
        self._own_events: list[Event] = []
        self.binding = backend.bind(device_cache, host_pool)
        try:
            for direction in ("onload", "offload"):
                self.streams[direction] = backend.create_stream()
            self.take_events(1, self._own_events)
        except BaseException:
            self.release()
            raise
        self.origin_event = self._own_events[0]

    def urgent_stream(self) -> Stream:
        """The stream of loads that must not queue behind others; most schedulers never need it."""
        if "urgent" not in self.streams:
            self.streams["urgent"] = self.backend.create_stream(urgent=True)
        return self.streams["urgent"]

    def take_events(self, count: int, held: list[Event]) -> None:
        """Appends to ``held``, which has those that could be made if one cannot."""
        before = len(held)
        try:
            held.extend(starmap(self.backend.create_event, repeat((), count)))
        finally:
            self.num_events += len(held) - before

    def give_back(self, events: list[Event]) -> None:
        destroy = self.backend.destroy_event
        for event in events:
            destroy(event)
        self.num_events -= len(events)

    def release(self) -> None:
        """Gives everything back, once. Not under a lock: a stream that ends may wait for a thread that wants it."""
        if self._process_id != os.getpid():
            return  # forked: the parent has them
        with contextlib.ExitStack() as steps:  # one that fails (a lost device) must not keep the others
            steps.callback(self.backend.close)
            steps.callback(self.backend.unbind, self.binding)
            steps.callback(self.give_back, self._own_events)
            while self.streams:
                steps.callback(self.backend.destroy_stream, self.streams.popitem()[1])


def release_abandoned() -> None:
    """Gives back what schedulers held that nobody closed."""
    while abandoned:
        with contextlib.suppress(Exception, IndexError):  # a lost device; another thread was quicker
            abandoned.popleft().release()
