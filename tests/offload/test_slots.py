"""Which slots an index is given."""

from __future__ import annotations

from paddle_kv.offload.slots import NumberedSlots


def test_fresh_slots_go_first_then_those_that_came_back_last() -> None:
    slots = NumberedSlots(8)
    assert slots.take(3) == [0, 1, 2]
    slots.give_back([1])
    assert slots.take(2) == [3, 4], "neighbours, as long as there are"
    assert slots.take(9) == [5, 6, 7, 1]
    assert slots.take(1) == []
    slots.give_back([6, 2, 0])
    assert slots.take(2) == [0, 2]
    assert slots.take(2) == [6]
