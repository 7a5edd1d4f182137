"""Checks of what a directory and a manager are given. Without NumPy, as the directory is."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from ..lists import listed
from ..ranges import count_of
from ..timeouts import is_no_float
from .jobs import HOST

# Made once: a call that has them in its body makes them each time, and each request is checked several times.
LISTS = (list, tuple)
BYTES = {bytes}
INTS = {int}


def checked_hashes(hashes: Sequence[bytes], name: str = "hashes") -> list[bytes]:
    """As a list; TypeError unless all of it are bytes."""
    if not isinstance(hashes, LISTS) and (isinstance(hashes, (bytes, str)) or not isinstance(hashes, Sequence)):
        raise TypeError(f"{name} is {type(hashes).__name__}; a list of bytes is expected")
    if not BYTES.issuperset(map(type, hashes)):
        position = next(i for i, key in enumerate(hashes) if type(key) is not bytes)
        raise TypeError(f"{name}[{position}] is {type(hashes[position]).__name__}; bytes are expected")
    return list(hashes)


def check_integer(value: object, name: str) -> None:
    """TypeError unless it is an int, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} = {value!r} is {type(value).__name__}; an int is expected")


def checked_count(value: object, name: str, least: int = 0) -> int:
    """As an int; TypeError or ValueError unless it counts something, from ``least`` on."""
    if type(value) is int and least <= value < 2**63:
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; an integer is expected")
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; an integer is expected") from None
    if not least <= found < 2**63:
        raise ValueError(f"{name} = {found} must be in [{least}, 2**63)")
    return found


def check_number(value: float, name: str, least: float, most: float) -> None:
    """TypeError or ValueError unless it is a number in [``least``, ``most``]."""
    if type(value) is float and least <= value <= most:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; a number is expected")
    if not least <= value <= most or is_no_float(value):
        raise ValueError(f"{name} = {value} must be in [{least}, {most}]")


def checked_list(values: Iterable[Any], name: str, of: str) -> list[Any]:
    """What can be gone through, as a list; else TypeError. A string is no list of its letters."""
    found = listed(values)
    if found is None:
        raise TypeError(f"{name} is {type(values).__name__}; a list of {of} is expected")
    return found


def checked_device_ids(keys: list[bytes], given: Iterable[int], *, distinct: bool = True) -> list[int]:
    """As a list: as many as keys; of loads, each once."""
    ids = given if isinstance(given, range) else checked_list(given, "device_block_ids", "int")
    if (count := count_of(ids)) != len(keys):
        raise ValueError(f"hashes has {len(keys)} blocks, device_block_ids has {count}; both need the same number")
    ids = list(ids)
    if not ids:
        return ids
    if not INTS.issuperset(map(type, ids)):
        raise TypeError("device_block_ids holds something else than int; ints are expected: use tolist() of an array")
    if min(ids) < 0:
        raise ValueError(f"device_block_ids names block {min(ids)}; it must not be negative")
    if max(ids) >= 2**63:
        raise ValueError(f"device_block_ids names block {max(ids)}; it must be in [0, 2**63)")
    if distinct and len(set(ids)) != len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ValueError(f"device_block_ids names block {twice} more than once; each may occur only once")
    return ids


def check_tier(tier: str) -> None:
    """TypeError unless it is a name; ValueError for none, and for host memory: what is there the directory knows by its
    jobs."""
    if not isinstance(tier, str):
        raise TypeError(f"tier is {tier!r}; the name of a tier is expected")
    if tier in ("", HOST):
        raise ValueError(f"tier = {tier!r} must be one below host memory")


def check_seconds(seconds: float | None, name: str) -> float:
    """0 for None; TypeError or ValueError unless it is a time from now on."""
    if seconds is None:
        return 0.0
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{name} is {seconds!r}; a number of seconds or None is expected")
    if not 0 <= seconds < float("inf") or is_no_float(seconds):
        raise ValueError(f"{name} = {seconds} must be a finite number of seconds, at least 0")
    return float(seconds)
