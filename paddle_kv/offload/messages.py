"""Whether a message is what it says: what was unpickled may hold anything, and half of it must not be booked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .checks import check_integer
from .jobs import Event, Hello, Result, Snapshot, check_version


def check_result(result: Any) -> None:
    """As :func:`check_version`, and TypeError unless its parts are of their types."""
    check_version(result, Result)
    for name in ("job_id", "rank", "epoch"):
        check_integer(getattr(result, name), f"{name} of a Result")
    for name in ("failed", "damaged"):
        positions = getattr(result, name)
        if not isinstance(positions, tuple) or not set(map(type, positions)) <= {int}:
            raise TypeError(f"{name} of a Result = {positions!r} must be a tuple of ints")
    if not isinstance(result.reason, str):
        raise TypeError(f"reason of a Result = {result.reason!r} must be a string")


def check_hello(hello: Any) -> None:
    """As :func:`check_result`."""
    check_version(hello, Hello)
    for name in ("rank", "epoch", "capacity_blocks"):
        check_integer(getattr(hello, name), f"{name} of a Hello")
    if not isinstance(hello.spec, bytes):
        raise TypeError(f"spec of a Hello = {hello.spec!r} must be bytes")


def check_positions(positions: Iterable[int], count: int, name: str) -> None:
    """TypeError or ValueError unless all of them are in a job of so many blocks."""
    for position in positions:
        check_integer(position, name)
        if not 0 <= position < count:
            raise ValueError(f"{name} names position {position}; it must be in [0, {count})")


def check_event(event: Any) -> None:
    """As :func:`check_result`."""
    check_version(event, Event)
    check_integer(event.number, "number of an Event")
    if event.kind not in ("stored", "removed", "cleared"):
        raise ValueError(f"kind of event {event.number} = {event.kind!r} must be 'stored', 'removed' or 'cleared'")
    _check_keys(event.tier, event.keys, f"event {event.number}")


def check_snapshot(snapshot: Any) -> None:
    """As :func:`check_result`."""
    check_version(snapshot, Snapshot)
    check_integer(snapshot.number, "number of a Snapshot")
    if not isinstance(snapshot.blocks, dict):
        raise TypeError(f"blocks of a Snapshot is {type(snapshot.blocks).__name__}; a dict is expected")
    for tier, keys in snapshot.blocks.items():
        _check_keys(tier, keys, "a Snapshot")


def _check_keys(tier: Any, keys: Any, name: str) -> None:
    if not isinstance(tier, str):
        raise TypeError(f"tier of {name} = {tier!r} must be a string")
    if not isinstance(keys, tuple) or not set(map(type, keys)) <= {bytes}:
        raise TypeError(f"keys of {name} must be a tuple of bytes")
