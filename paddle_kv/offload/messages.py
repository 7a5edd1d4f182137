"""Whether a message is what it says: what was unpickled may hold anything, and half of it must not be booked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..timeouts import check_timeout
from .checks import check_integer
from .jobs import Event, Hello, Job, Namespace, Result, Snapshot, check_version


def check_job(job: Any) -> None:
    """As :func:`check_result`; ValueError also for one that is no load or save of so many different blocks."""
    check_version(job, Job)
    check_integer(job.id, "id of a Job")
    if job.kind not in ("load", "save"):
        raise ValueError(f"kind of job {job.id} = {job.kind!r} must be 'load' or 'save'")
    for name, of in (("keys", bytes), ("host_slots", int), ("device_ids", int), ("epochs", int)):
        values = getattr(job, name)
        if not isinstance(values, tuple) or not set(map(type, values)) <= {of}:
            raise TypeError(f"{name} of job {job.id} must be a tuple of {of.__name__}")
    if not isinstance(job.space, Namespace):
        raise TypeError(f"space of job {job.id} = {job.space!r} must be a Namespace")
    if not isinstance(job.layerwise, bool):
        raise TypeError(f"layerwise of job {job.id} = {job.layerwise!r} must be a bool")
    if not isinstance(job.tier, str | None):
        raise TypeError(f"tier of job {job.id} = {job.tier!r} must be a string or None")
    check_timeout(job.timeout_s)  # one that is over is cancelled at once
    targets = job.device_ids if job.kind == "load" else job.host_slots
    if len({len(job.keys), len(job.host_slots), len(job.device_ids), len(set(targets))}) > 1:
        raise ValueError(f"job {job.id} must have as many host slots and device ids as keys, each target once")


def check_result(result: Any) -> None:
    """As :func:`check_version`, and TypeError unless its parts are of their types."""
    check_version(result, Result)
    if not type(result.job_id) is type(result.rank) is type(result.epoch) is int:
        for name in ("job_id", "rank", "epoch"):
            check_integer(getattr(result, name), f"{name} of a Result")
    if result.failed != () or result.damaged != ():
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
    if event.number < 1:
        raise ValueError(f"number of an Event = {event.number} must be at least 1")
    if event.kind not in ("stored", "removed", "cleared"):
        raise ValueError(f"kind of event {event.number} = {event.kind!r} must be 'stored', 'removed' or 'cleared'")
    _check_keys(event.tier, event.keys, f"event {event.number}")


def check_snapshot(snapshot: Any) -> None:
    """As :func:`check_result`."""
    check_version(snapshot, Snapshot)
    check_integer(snapshot.number, "number of a Snapshot")
    if snapshot.number < 0:
        raise ValueError(f"number of a Snapshot = {snapshot.number} must be at least 0")
    if not isinstance(snapshot.blocks, dict):
        raise TypeError(f"blocks of a Snapshot is {type(snapshot.blocks).__name__}; a dict is expected")
    for tier, keys in snapshot.blocks.items():
        _check_keys(tier, keys, "a Snapshot")


def _check_keys(tier: Any, keys: Any, name: str) -> None:
    if not isinstance(tier, str):
        raise TypeError(f"tier of {name} = {tier!r} must be a string")
    if not isinstance(keys, tuple) or not set(map(type, keys)) <= {bytes}:
        raise TypeError(f"keys of {name} must be a tuple of bytes")
