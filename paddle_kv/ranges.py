"""Ranges that callers give: whatever their length, their ends say what is wrong. Without NumPy, as a directory is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def count_of(values: Sequence[Any]) -> int:
    """``len``, which raises OverflowError for ranges of more than 2**63 - 1."""
    if not isinstance(values, range):
        return len(values)
    return (values[-1] - values[0]) // values.step + 1 if values else 0


def check_ends(values: range, name: str, low: int, high: int) -> None:
    """IndexError, of the first one that does not, unless each lies in [low, high)."""
    if not values or (low <= values[0] < high and low <= values[-1] < high):
        return
    first, step, position = values[0], values.step, 0
    if low <= first < high:
        position = -((first - high) // step) if step > 0 else (first - low) // -step + 1
    raise IndexError(f"{name}[{position}] = {shown(values[position])} must be in [{low}, {high})")


def shown(value: Any) -> str:
    """A value for a message; Python refuses to write integers of thousands of digits."""
    return f"an integer of {value.bit_length()} bits" if type(value) is int and value.bit_length() > 256 else str(value)
