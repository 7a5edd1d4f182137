"""Lists that callers give. Without NumPy: a directory takes them too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def listed(values: Any) -> list[Any] | None:
    """What can be gone through, as a list; else None. A string is no list of its letters."""
    if isinstance(values, (list, tuple)):
        return list(values)
    if isinstance(values, (bytes, bytearray, str)) or not isinstance(values, Iterable):
        return None
    try:
        found = iter(values)
    except TypeError:  # an array without dimensions
        return None
    return list(found)
