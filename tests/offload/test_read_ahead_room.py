"""How much may be under way at a tier of what is read ahead."""

from __future__ import annotations

import pytest

from paddle_kv.offload.tier_queue import (
    AHEAD_S,
    FIRST_BLOCKS,
    MOST_BLOCKS,
    MOST_MORE_BLOCKS,
    PARTS,
    Room,
    blocks_of_part,
)


@pytest.mark.parametrize(
    ("block_s", "num_blocks"),
    [
        (None, FIRST_BLOCKS),
        (AHEAD_S / PARTS / 3, 3),
        (AHEAD_S / PARTS / 2.5, 3),
        (AHEAD_S / PARTS, 1),
        (10.0, 1),
        (1e-9, MOST_BLOCKS),
    ],
)
def test_the_parts_together_take_the_tier_so_long(block_s: float | None, num_blocks: int) -> None:
    assert blocks_of_part(block_s) == num_blocks


def test_there_is_more_room_as_long_as_parts_take_no_longer_for_it() -> None:
    room = Room()
    for number in range(1, 5):
        room.came(8, 0.02)
        assert room.more_blocks == 8 * number
    room.came(8, 0.03)  # half as long again at most
    assert room.more_blocks == 40
    room.came(8, 0.0301)
    assert room.more_blocks == 20
    for _ in range(100):
        room.came(8, 0.02)
    assert room.more_blocks == MOST_MORE_BLOCKS


def test_a_shorter_time_is_what_the_others_are_held_against() -> None:
    room = Room()
    room.came(8, 0.02)
    room.came(8, 0.01)
    assert room.more_blocks == 16
    room.came(8, 0.02)
    assert room.more_blocks == 8


def test_a_storage_that_has_become_slower_is_believed_in_the_end() -> None:
    room = Room()
    for _ in range(10):
        room.came(8, 0.01)
    slow = 0
    while room.more_blocks or not slow:
        room.came(8, 0.04)
        slow += 1
    while not room.more_blocks:
        room.came(8, 0.04)
        slow += 1
    assert 10 < slow < 40
    room.came(8, 0.01)  # and is quick again at once
    room.came(8, 0.02)
    assert room.more_blocks == 8
