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


class Told:
    """A room that is told of one part behind the other."""

    def __init__(self) -> None:
        self.room, self.now_s = Room(), 100.0

    def __call__(self, seconds: float) -> int:
        self.now_s += seconds
        self.room.came(8, self.now_s - seconds, self.now_s)
        return self.room.more_blocks


def test_there_is_more_room_as_long_as_parts_take_no_longer_for_it() -> None:
    came = Told()
    assert [came(0.02) for _ in range(4)] == [8, 16, 24, 32]
    assert came(0.0299) == 40  # less than half as long again
    assert came(0.0301) == 20
    assert [came(0.02) for _ in range(100)][-1] == MOST_MORE_BLOCKS


def test_a_shorter_time_is_what_the_others_are_held_against() -> None:
    came = Told()
    assert [came(0.02), came(0.01), came(0.02)] == [8, 16, 8]


def test_a_storage_that_has_become_slower_is_believed_in_the_end() -> None:
    came = Told()
    assert [came(0.01) for _ in range(3)] == [8, 16, 24]
    slow = [came(0.04) for _ in range(40)]
    assert slow[:5] == [12, 6, 3, 1, 0]
    believed = next(number for number in range(5, 40) if slow[number])
    assert 15 < believed < 35 and slow[believed:] == sorted(slow[believed:])
    assert [came(0.01), came(0.02)] == [slow[-1] + 8, (slow[-1] + 8) // 2]  # and is quick again at once


def test_parts_that_a_hold_up_met_together_are_no_slower_storage() -> None:
    came = Told()
    for _ in range(3):
        came(0.01)
    begun_s, room = came.now_s, came.room
    for number in range(60):  # all under way by then
        room.came(8, begun_s, begun_s + 0.5 + number / 1000)
    assert room.more_blocks == 0
    assert came.room._least_s == pytest.approx(0.01)
