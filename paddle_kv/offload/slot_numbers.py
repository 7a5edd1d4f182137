"""A number for each slot, in 4 bytes: room for the slots that are used, since a capacity may be more than there is
memory."""

from __future__ import annotations

from array import array

SLOTS_AT_ONCE = 2**23  # 32 MB: so much malloc takes from the system by itself; of less its heap would keep the holes


def with_room(numbers: array[int], slot: int, capacity: int, value: int) -> array[int]:
    """For this slot, which is behind those that there are; the further ones have this value."""
    size = max(1 + slot, min(len(numbers) + SLOTS_AT_ONCE, capacity))
    more = array("i", [value]) * (size - len(numbers))
    if not numbers:
        return more
    numbers.extend(more)
    return numbers
