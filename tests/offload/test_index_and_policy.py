"""What an index tells its policy, and what it holds while the policy makes room."""

from __future__ import annotations

from collections.abc import Container
from itertools import takewhile
from typing import Any

import pytest

from paddle_kv.offload import BlockIndex, Lru


class Told(Lru[str]):
    """An order of use that notes what it hears of prompts and uses."""

    by_order = False

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []
        self.has_counted = False

    def on_prompt(self, keys: list[str]) -> bool:
        self.log.append(("prompt", "".join(keys)))
        return self.has_counted

    def on_use(self, keys: list[str]) -> None:
        self.log.append(("use", "".join(keys)))
        for key in reversed(keys):
            self.on_access(key)

    def on_end(self, keys: list[str]) -> None:
        self.log.append(("end", "".join(keys)))


class ToldInOrder(Told):
    by_order = True

    def on_use(self, keys: list[str]) -> None:  # which no class inherits
        super().on_use(keys)


class Together(Lru[str]):
    """Takes many at once, which all have to be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def replace_all(self, incoming: list[str], pinned: Container[str]) -> list[str]:
        self.calls.append("".join(incoming))
        assert self._order.keys().isdisjoint(incoming)
        victims = [key for key in self._order if key not in pinned][: len(incoming)]
        for key, victim in zip(incoming, victims, strict=False):
            del self._order[victim]
            self._order[key] = None
        return victims


class Refuses(Together):
    """Lets nothing in that is in upper case."""

    def replace_all(self, incoming: list[str], pinned: Container[str]) -> list[str]:
        small = list(takewhile(str.islower, incoming))
        return super().replace_all(small, pinned) if small else []

    def victim(self, incoming: str | None, pinned: Container[str]) -> str | None:
        self.calls.append(f"{incoming}?")
        return incoming if incoming is not None and incoming.isupper() else super().victim(incoming, pinned)

    def also_refused(self, incoming: list[str], pinned: Container[str]) -> int:
        self.calls.append(f"{''.join(incoming)}??")
        return len(list(takewhile(str.isupper, incoming)))


def filled(policy: Any, keys: str, capacity: int) -> tuple[BlockIndex[str], list[int]]:
    index: BlockIndex[str] = BlockIndex(policy, capacity)
    slots = list(range(capacity))
    index.admit(list(keys), slots)
    return index, slots


def order(index: BlockIndex[str]) -> str:
    """Of use, the oldest first."""
    policy: Any = index._policy
    return "".join(policy._order)


# ---- uses ----
def test_a_policy_that_has_counted_a_prompt_is_told_of_no_use() -> None:
    policy = Told()
    index, _ = filled(policy, "abc", 5)
    policy.log.clear()
    assert index.lookup(list("abx")) == 2
    assert index.lookup(["x"]) == 0
    assert policy.log == [("prompt", "abx"), ("use", "ab"), ("prompt", "x")]
    policy.log.clear()
    policy.has_counted = True
    assert index.lookup(list("abx")) == 2
    assert index.lookup(list("bc"), prompt=list("abc")) == 2  # of which it cannot know where it ends
    assert policy.log == [("prompt", "abx"), ("prompt", "abc"), ("use", "bc")]


@pytest.mark.parametrize(("policy", "uses"), [(Told, []), (ToldInOrder, [("use", "ab")])])
def test_where_the_order_decides_the_head_of_a_prompt_is_used_again_behind_its_end(policy: Any, uses: Any) -> None:
    index, slots = filled(policy(), "ab", 4)
    index.lookup(list("abcd"))
    told: Any = index._policy
    told.log.clear()
    assert list(index.admit(["c"], slots)) == ["c"]
    assert told.log == uses


def test_the_head_of_a_prompt_of_which_nothing_was_let_in_is_not_used_again() -> None:
    index, _ = filled(Lru(), "zab", 3)
    index.lookup(list("abcd"))
    index.lookup(["z"])
    assert order(index) == "baz"
    index.pin("zab")
    assert index.admit(["c"], []) == {}
    assert order(index) == "baz"


def test_behind_a_refusal_a_policy_is_asked_once_how_many_more_it_refuses() -> None:
    policy = Refuses()
    index, _ = filled(policy, "abcdefghij", 10)
    policy.calls.clear()
    assert list(index.admit(list("uvwxyzKLM"), [])) == list("uvwxyz")
    assert policy.calls == ["M?", "LKzyxwvu??", "z?", "yxwvu"]
    assert set(index.slots) == set("abcduvwxyz") and index.pins == {}
    policy.calls.clear()
    assert index.admit(list("PQRST"), []) == {}
    assert policy.calls == ["T?", "SRQP??"]


def test_where_hints_decide_too_each_block_is_asked_for() -> None:
    policy = Refuses()
    index, _ = filled(policy, "abcdefghij", 10)
    index.expect(["a"], 1.0)
    policy.calls.clear()
    assert index.admit(list("PQRST"), []) == {}
    assert policy.calls == ["T?", "S?", "R?", "Q?", "P?"]


# ---- what is held ----
def test_the_head_of_a_prompt_makes_no_room_for_its_end() -> None:
    index, _ = filled(Lru(), "zab", 3)
    index.lookup(list("abcd"))
    assert list(index.admit(list("cd"), [])) == ["c"]
    assert set(index.slots) == set("abc") and index.pins == {}


def test_the_one_block_behind_makes_no_room_for_the_others() -> None:
    index, _ = filled(Lru(), "ab", 2)
    index.pin("a")
    assert index.admit(["x", "b"], []) == {}
    assert set(index.slots) == set("ab") and index.pins == {"a": 1}


def test_what_comes_of_a_prompt_call_by_call_hangs_on_what_came_before() -> None:
    index, slots = filled(Lru(), "", 6)
    index.lookup(list("abcdef"))
    for part, head in (("ab", "ab"), ("c", "abc"), ("de", "abcde")):
        index.admit(list(part), slots)
        assert "".join(index.hung_on(["f" if part == "de" else "d" if part == "c" else "c"])) == head


# ---- many at once ----
def test_what_is_absent_takes_the_places_of_others_together_behind_the_free_ones() -> None:
    index, slots = filled(Together(), "abcdefgh", 10)
    assert list(index.admit(list("stuvwxyz"), slots)) == list("stuvwxyz")
    policy: Any = index._policy
    assert (policy.calls, index.evicted_blocks, slots) == (["xwvuts"], 6, [])
    assert set(index.slots) == set("abstuvwxyz") and sorted(index.slots.values()) == list(range(10))
    assert index.pins == {}


def test_where_one_of_many_is_there_they_come_one_by_one() -> None:
    index, _ = filled(Together(), "abcdefgh", 8)
    assert list(index.admit(list("tuvwxyzh"), [])) == list("tuvwxyz")
    policy: Any = index._policy
    assert (policy.calls, index.evicted_blocks) == ([], 7)
    assert set(index.slots) == set("tuvwxyzh")


# ---- hints ----
def test_what_is_expected_and_was_met_is_as_if_it_were_used() -> None:
    index, _ = filled(Lru(), "abc", 3)
    index.expect(["c"], 100.0)
    index.lookup(list("ab"))
    assert order(index) == "cba"
    index.admit(["x"], [])
    assert order(index) == "acx"  # or it would be met by each that comes
    index.admit(["y"], [])
    assert order(index) == "cxy"  # which did not meet it


def test_what_is_expected_and_not_there_stays_expected_where_all_is_held() -> None:
    index, _ = filled(Lru(), "ab", 2)
    index.expect(["q"], 100.0)
    index.pin("ab")
    assert index.admit(["x"], []) == {}
    assert "q" in index.expected.blocks


@pytest.mark.parametrize("slot_is_used_again", [False, True])
def test_nothing_hangs_on_a_block_by_what_was_removed(slot_is_used_again: bool) -> None:
    index, slots = filled(Lru(), "ab", 3)
    index.admit(["z"], slots)
    index.end(list("ab"))
    assert index.evict(0) == []
    slot = index.remove("b")
    if slot_is_used_again:
        index.admit(["n"], [slot])
    index._policy.on_access("a")
    index.evict(1)
    assert set(index.slots) == ({"z", "n"} if slot_is_used_again else {"z"})  # a is over, and has nothing behind it
