"""The stream of what came and went, and a consumer that rebuilds the same state from it: for routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from .checks import checked_hashes, checked_list
from .jobs import HOST, Event, Snapshot
from .messages import check_event, check_snapshot

Listener = Callable[[str, str, tuple[bytes, ...]], object]  # kind, tier, keys


class EventLog:
    """Events that nobody has taken yet, at most ``limit``: the oldest go first, which shows as a gap in the numbers."""

    def __init__(self, limit: int) -> None:
        self.number = 0  # of the last one
        self.enabled = limit > 0
        self._waiting: deque[Event] = deque(maxlen=limit)
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """It hears of all from now on, as it happens."""
        self._listener = listener
        self.enabled = True

    def add(self, kind: Literal["stored", "removed", "cleared"], tier: str, keys: Iterable[bytes] = ()) -> None:
        if not self.enabled:
            return
        named = tuple(keys)
        if self._listener is not None:
            self._listener(kind, tier, named)
        if named or kind == "cleared":
            self.number += 1
            self._waiting.append(Event(self.number, kind, tier, named))

    def take(self) -> list[Event]:
        found = list(self._waiting)
        self._waiting.clear()
        return found


class Mirror:
    """What a directory has, as its events tell.

    Attributes:
        tiers: tier -> keys that are there.
        number: of the last event that is part of it.

    Example:
        >>> from paddle_kv.offload import Event, Mirror
        >>> mirror = Mirror()
        >>> mirror.apply([Event(1, "stored", "host", (b"a", b"b")), Event(2, "removed", "host", (b"a",))])
        True
        >>> mirror.tiers["host"], mirror.apply([Event(5, "stored", "host", (b"c",))])
        ({b'b'}, False)
    """

    def __init__(self) -> None:
        self.tiers: dict[str, set[bytes]] = {HOST: set()}
        self.number = 0

    def apply(self, events: Iterable[Event]) -> bool:
        """False, from the first gap on: ask for a :meth:`Directory.snapshot` and :meth:`restore` it. Events that a
        snapshot holds already are passed over.

        Raises:
            TypeError: not an event, or not of its form.
            ValueError: an event of another version or kind, or a number below 1. Then none was applied.
        """
        events = checked_list(events, "events", "Event")
        for event in events:
            check_event(event)
        for event in events:
            if event.number <= self.number:
                continue
            if event.number != self.number + 1:
                return False
            self.number = event.number
            keys = self.tiers.setdefault(event.tier, set())
            if event.kind == "stored":
                keys.update(event.keys)
            elif event.kind == "removed":
                keys.difference_update(event.keys)
            else:
                keys.clear()
        return True

    def restore(self, snapshot: Snapshot) -> None:
        """
        Raises:
            TypeError: not a snapshot, or not of its form.
            ValueError: a snapshot of another version, or behind an event with a negative number.
        """
        check_snapshot(snapshot)
        self.number = snapshot.number
        self.tiers = {HOST: set(), **{tier: set(keys) for tier, keys in snapshot.blocks.items()}}

    def longest_prefix(self, keys: Sequence[bytes], tier: str = HOST) -> int:
        """How many of the first keys are there: what a router compares. Of a tier that was never named none are.

        Raises:
            TypeError: not a list of bytes, or not the name of a tier.
        """
        if not isinstance(tier, str):
            raise TypeError(f"tier is {tier!r}; the name of a tier is expected")
        keys, there = checked_hashes(keys, "keys"), self.tiers.get(tier, set())
        return next((position for position, key in enumerate(keys) if key not in there), len(keys))
