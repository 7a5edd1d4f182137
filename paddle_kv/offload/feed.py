"""What a manager loads for all prompts that are being computed. In sections only."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..tracking.group import MemoryGroup
from .prefetch import Prefetch

MOST_LOADING = 2  # pieces on the link: when one ends, the next one is there


class Owner(Protocol):
    """The books."""

    scheduler: Any
    index: Any
    feed: Feed
    closed: bool

    @property
    def group(self) -> MemoryGroup: ...

    @property
    def num_reading_blocks(self) -> int: ...

    @property
    def reads_layerwise(self) -> bool: ...

    def onload(self, keys: list[bytes], device_ids: list[int], compute: Any, *, urgent: bool | None) -> Any: ...

    def is_read(self, keys: list[bytes]) -> bool: ...

    def read_soon(self, keys: list[bytes]) -> Prefetch: ...

    def follow(self, keys: list[bytes], device_ids: list[int], compute: Any) -> tuple[Any, Prefetch]: ...

    def call_at(self, at_s: float, function: Callable[[], object]) -> None: ...


class Feed:
    """
    Attributes:
        meetings: of prompts, in order of their beginning; as long as somebody refers to them. See :mod:`.feeding`.
        free_s: when the link should have moved all that it was given.
    """

    def __init__(self) -> None:
        self.meetings: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self.free_s = 0.0

    def add(self, meeting: Any) -> None:
        self.meetings[next(self._numbers)] = meeting

    def holds(self, key: bytes) -> bool:
        """Whether a prompt that is being computed has this block in its prefix."""
        return any(key in meeting.keys for meeting in self.meetings.values() if not meeting.ended)

    def fill(self, books: Owner) -> None:
        """Something has ended, or begun: starts what comes next. First for those whose model comes to it first."""
        if books.closed:
            return
        meetings = [one for one in self.meetings.values() if not one.ended]
        before: list[Any] | None = []  # to which nothing is to be brought any more; None: to one of them something is
        for meeting in sorted(meetings, key=_is_begun_later):
            meeting.look()
            meeting.read_next(books, functools.partial(_turn_s, meeting, before))
            if meeting.line.num_to_compute:
                before = None
            elif before is not None:
                before.append(meeting)
        loading = sum(meeting.num_on_link for meeting in meetings)
        if not any(meeting.moving for meeting in meetings):
            self.free_s = 0.0
        while loading < MOST_LOADING:
            waiting = [meeting for meeting in meetings if meeting.next_load is not None]
            if not waiting:
                return
            first = min(waiting, key=lambda one: one.blocks_left)
            loading += first.load_next(books, whole=_is_alone(first, meetings))


def _is_begun_later(meeting: Any) -> bool:
    """The model comes to those first that it has begun, then to the others in order."""
    return not meeting.begun


def _turn_s(meeting: Any, before: Sequence[Any] | None) -> float | None:
    """Until the model comes to it, as far as one can know. None: something is still to be brought to one to which it
    comes first, and what is under way is not overtaken."""
    if before is None:
        return None
    turn_s = 0.0
    for one in () if meeting.begun else before:
        turn_s = one.over_s(turn_s)
    return turn_s


def _is_alone(meeting: Any, meetings: Sequence[Any]) -> bool:
    """Whether it may load all that host memory has at once. What is under way is not overtaken, so it stays short where
    the model comes to others first, as far as one can know, and where another one has something under way."""
    comes_later = False
    for one in meetings:
        if one is meeting:
            comes_later = True
        elif one.moving or (one.line.num_to_compute and (one.begun or not comes_later)):
            return False
    return True
