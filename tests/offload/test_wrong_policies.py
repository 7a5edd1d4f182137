"""A policy that names blocks which are not there, or held: it is told, and asked again."""

from __future__ import annotations

from collections.abc import Container, Sequence

import pytest

from paddle_kv.offload import BlockIndex


class Scripted:
    """Names these victims, one after the other, whatever it is told; the last one for ever."""

    def __init__(self, *victims: str | None) -> None:
        self.victims = list(victims)
        self.inserted: list[str] = []
        self.asked = 0

    def on_insert(self, key: str) -> None:
        self.inserted.append(key)

    def on_access(self, key: str) -> None:
        pass

    def on_remove(self, key: str) -> None:
        pass

    def victim(self, incoming: str | None, pinned: Container[str]) -> str | None:
        self.asked += 1
        return self.victims.pop(0) if len(self.victims) > 1 else self.victims[0]


def filled(*victims: str | None) -> tuple[BlockIndex[str], Scripted]:
    policy = Scripted(*victims)
    index: BlockIndex[str] = BlockIndex(policy, 3)
    index.admit(list("abc"), [0, 1, 2])
    index.pin("b")
    policy.inserted.clear()
    return index, policy


@pytest.mark.parametrize("wrong", ["x", "b"], ids=["absent", "held"])
@pytest.mark.parametrize("again", [(), ("x",), ("b",)], ids=["once", "then absent", "then held"])
def test_the_next_one_that_is_right_goes(wrong: str, again: Sequence[str]) -> None:
    index, policy = filled(wrong, *again, "c")
    assert index.evict(1) == [2]
    assert set(index.slots) == {"a", "b"}
    assert policy.inserted == [key for key in (wrong, *again) if key == "b"]  # what is there alone
    index, policy = filled(wrong, *again, "c")
    free: list[int] = []
    assert index.admit(["y"], free) == {"y": 2}
    assert set(index.slots) == {"a", "b", "y"}
    assert policy.inserted == [*(key for key in (wrong, *again) if key == "b"), "y"]


@pytest.mark.parametrize("wrong", ["x", "b"])
def test_a_policy_that_stays_wrong_is_asked_once_for_each_block_and_once_more(wrong: str) -> None:
    index, policy = filled(wrong)
    assert index.evict(1) == []
    assert set(index.slots) == {"a", "b", "c"}
    assert policy.asked == 1 + 4


@pytest.mark.parametrize("wrong", ["x", "b"])
def test_a_policy_that_gives_up_is_asked_no_more(wrong: str) -> None:
    index, policy = filled(wrong, None)
    assert index.evict(1) == []
    assert policy.asked == 2
    assert index.admit(["y"], []) == {}
    assert index.evicted_blocks == 0
