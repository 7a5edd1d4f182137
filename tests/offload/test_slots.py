"""Which slots an index is given."""

from __future__ import annotations

import pytest

from paddle_kv.offload.slot_lru import SlotLru
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


@pytest.mark.parametrize(
    ("pinned", "incoming", "victims", "order"),
    [
        ("", "xyz", "abc", "defxyz"),
        ("ac", "xyz", "bde", "acfxyz"),
        ("abce", "wxyz", "df", "abcewx"),  # no more than there are
        ("abcdef", "xyz", "", "abcdef"),
    ],
)
def test_a_policy_by_slot_replaces_several_at_once(pinned: str, incoming: str, victims: str, order: str) -> None:
    policy: SlotLru[str] = SlotLru(6)
    slots = {key: slot for slot, key in enumerate("abcdef")}
    policy.attach(slots)
    for key in "abcdef":
        policy.on_insert(key)
    assert policy.replace_all(list(incoming), set(pinned)) == list(victims)
    for victim, key in zip(victims, incoming, strict=False):
        slots[key] = slots.pop(victim)
    assert [policy.victim(None, ()) for _ in range(7)] == [*order, None]
