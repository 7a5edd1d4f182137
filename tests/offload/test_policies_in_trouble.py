"""Policies that raise, forget what they knew, refuse, or name a wrong block: index and policy agree afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from typing import Any

import pytest

from paddle_kv.offload import BlockIndex

KEYS = "abcdefghijkl"
CAPACITY = 6


class Trouble(Exception):
    """What a policy of this page raises."""


class Ordered:
    """Knows the blocks in the order of use, and is in trouble once, in the call after so many others."""

    by_order = True

    def __init__(self) -> None:
        self.known: list[str] = []  # oldest first
        self.calls: list[tuple[Any, ...]] = []
        self.left, self.how = -1, ""

    def in_trouble(self, after: int, how: str) -> None:
        """``how``: "before" or "after" the work, "lost" without anything that it knew; "absent", "held", "refused",
        "none": what it names as a victim."""
        self.left, self.how = after, how

    def _call(self, name: str, key: str | None, work: Callable[[], Any]) -> Any:
        self.calls.append((name, key))
        self.left -= 1
        how = self.how if self.left == -1 else ""
        if how == "before":
            raise Trouble
        found = work()
        if how == "lost":
            self.known.clear()
        if how in ("after", "lost"):
            raise Trouble
        return found

    def on_insert(self, key: str) -> None:
        def work() -> None:
            assert key not in self.known
            self.known.append(key)

        self._call("insert", key, work)

    def on_access(self, key: str) -> None:
        def work() -> None:
            self.known.remove(key)
            self.known.append(key)

        self._call("access", key, work)

    def on_remove(self, key: str) -> None:
        self._call("remove", key, lambda: self.known.remove(key))

    def _out(self, incoming: str | None, pinned: Container[str]) -> str | None:
        how = self.how if self.left == -1 else ""
        if how == "absent":
            return "?"
        if how in ("refused", "none"):
            return incoming if how == "refused" else None
        found = next((key for key in self.known if (key in pinned) == (how == "held")), None)
        if found is not None:
            self.known.remove(found)
        return found

    def victim(self, incoming: str | None, pinned: Container[str]) -> str | None:
        found: str | None = self._call("victim", incoming, lambda: self._out(incoming, pinned))
        return found


class Replacing(Ordered):
    def replace(self, incoming: str, pinned: Container[str]) -> str | None:
        def work() -> str | None:
            found = self._out(incoming, pinned)
            if found is not None and found != incoming:
                self.known.append(incoming)
            return found

        found: str | None = self._call("replace", incoming, work)
        return found


class Ending(Ordered):
    """Wants to hear of ends."""

    by_order = False

    def on_end(self, keys: list[str]) -> None:
        self._call("end", None, lambda: None)


HOWS = ("before", "after", "lost", "absent", "held", "refused", "none")
POLICIES = pytest.mark.parametrize("kind", [Ordered, Replacing, Ending])


class Ground:
    def __init__(self, kind: type[Ordered], filled: str = "") -> None:
        self.policy = kind()
        self.index: BlockIndex[str] = BlockIndex(self.policy, CAPACITY)
        self.free = list(range(CAPACITY))
        self.pins: dict[str, int] = {}
        if filled:
            self.index.admit(list(filled), self.free)
            self.check()

    def check(self) -> None:
        slots = list(self.index.slots.values())
        assert sorted([*slots, *self.free]) == list(range(CAPACITY))
        assert self.index.pins == self.pins
        assert sorted(self.policy.known) == sorted(self.index.slots)

    def evict_all(self) -> str:
        found = ""
        while taken := self.index.take_out(1):
            found += "".join(taken)
            self.free += taken.values()
        return found


@POLICIES
@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_policy_does_index_and_policy_agree(kind: type[Ordered], seed: int) -> None:
    rng = random.Random(seed)
    ground = Ground(kind)
    index = ground.index
    for _ in range(120):
        keys = rng.sample(KEYS, rng.randint(1, 5))
        ground.policy.in_trouble(rng.randint(0, 6), rng.choice(HOWS))
        what = rng.choice(
            ["lookup", "admit", "admit", "admit", "expect", "end", "evict", "remove", "pin", "unpin", "clear"]
        )
        before = set(index.slots)
        try:
            if what == "lookup":
                index.lookup(keys)
            elif what == "admit":
                admitted = index.admit(keys, ground.free)
                assert list(admitted) == [key for key in keys if key in admitted]
                assert set(admitted) == set(index.slots) - before
            elif what == "expect":
                index.expect(keys, rng.random())
            elif what == "end":
                index.end(keys)
            elif what == "evict":
                ground.free += index.evict(rng.randint(1, 3))
            elif what == "remove" and index.slots:
                ground.free.append(index.remove(rng.choice(list(index.slots))))
            elif what == "pin" and len(ground.pins) < CAPACITY:
                index.pin(keys)
                for key in keys:
                    ground.pins[key] = ground.pins.get(key, 0) + 1
            elif what == "unpin" and ground.pins:
                key = rng.choice(list(ground.pins))
                index.unpin([key])
                ground.pins[key] -= 1
                ground.pins = {key: count for key, count in ground.pins.items() if count}
            elif what == "clear" and rng.random() < 0.1:
                ground.free += index.clear()
                assert not index.slots
        except Trouble:
            assert what in ("lookup", "admit", "expect", "end", "evict")
            if what == "admit":
                assert set(index.slots) <= before  # of what was to come nothing did
        ground.policy.in_trouble(-2, "")
        ground.check()
    index.unpin([key for key, count in ground.pins.items() for _ in range(count)])
    ground.pins.clear()
    ground.evict_all()
    ground.check()
    assert index.slots == {}


@POLICIES
@pytest.mark.parametrize("how", ["before", "after", "lost"])
@pytest.mark.parametrize("what", ["lookup", "expect", "end", "admit", "insert"])
def test_what_a_policy_raises_is_told_and_it_is_told_anew(kind: type[Ordered], how: str, what: str) -> None:
    ground = Ground(kind, "abcdef")
    index = ground.index
    ground.policy.in_trouble(0, how)
    calls: dict[str, Callable[[], Any]] = {
        "lookup": lambda: index.lookup(list("abc")),
        "expect": lambda: index.expect(list("abc"), 0.0),
        "end": lambda: index.end(list("abc")),
        "admit": lambda: index.admit(list("xy"), ground.free),  # the victim
        "insert": lambda: index.admit(list("xy"), ground.free),
    }
    if what == "insert":
        if kind is Replacing:
            return
        ground.policy.in_trouble(3, how)  # the second one's
    if what == "end" and kind is not Ending:
        calls["end"]()  # it is not asked
    else:
        with pytest.raises(Trouble):
            calls[what]()
    ground.policy.in_trouble(-2, "")
    ground.check()
    left = set("abcdef") - ({"a", "b"} if what == "insert" else {"a"} if what == "admit" and how != "before" else set())
    if what in ("admit", "insert"):
        assert set(index.slots) <= set("abcdef")
    else:
        assert set(index.slots) == left
    assert sorted(ground.evict_all()) == sorted(index.slots) or not index.slots
    ground.check()


def test_what_replaces_is_not_told_a_second_time() -> None:
    ground = Ground(Replacing, "abcdef")
    ground.policy.calls.clear()
    assert list(ground.index.admit(["x"], ground.free)) == ["x"]
    assert ground.policy.calls == [("replace", "x")]
    ground.check()


@pytest.mark.parametrize(
    ("how", "calls"),
    [
        ("refused", [("replace", "y"), ("replace", "x")]),  # "y" stays away, "x" comes
        ("none", [("replace", "y"), ("replace", "x")]),
        ("absent", [("replace", "y"), ("remove", "y"), ("victim", None), ("insert", "y"), ("replace", "x")]),
    ],
)
def test_a_policy_that_replaces_and_names_none_or_a_wrong_one(how: str, calls: list[tuple[str, str | None]]) -> None:
    ground = Ground(Replacing, "abcdef")
    ground.policy.calls.clear()
    ground.policy.in_trouble(0, how)
    admitted = ground.index.admit(list("xy"), ground.free)
    assert [call for call in ground.policy.calls if call[0] != "access"] == calls
    assert list(admitted) == (["x", "y"] if how == "absent" else ["x"])
    ground.check()


@pytest.mark.parametrize("kind", [Ordered, Replacing])
def test_the_last_block_of_a_call_makes_room_where_all_is_held(kind: type[Ordered]) -> None:
    ground = Ground(kind, "abcde")
    ground.pins = dict.fromkeys("abcde", 1)
    ground.index.pin("abcde")
    assert list(ground.index.admit(list("xyz"), ground.free)) == ["x"]
    ground.check()
    assert set(ground.policy.known) == set("abcdex")


def test_what_is_expected_counts_as_used_from_its_end_on() -> None:
    ground = Ground(Ordered, "abcdef")
    ground.index.lookup(list("abcdef"))
    ground.index.expect(list("cd"), 0.0)
    ground.index.expected.release_farthest()
    assert ground.policy.known == list("febadc")
    assert ground.evict_all() == "febadc"


def test_an_admission_that_raises_leaves_nothing_that_others_hang_on() -> None:
    """The heads of a prompt are used again when what follows them was let in; that call raises."""
    ground = Ground(Ordered, "ab")
    ground.policy.calls.clear()
    ground.index.lookup(list("abxy"))
    before = len(ground.policy.calls)
    ground.policy.in_trouble(2, "after")  # behind both inserts
    with pytest.raises(Trouble):
        ground.index.admit(list("xy"), ground.free)
    assert [name for name, _ in ground.policy.calls[before:][:3]] == ["insert", "insert", "access"]
    ground.policy.in_trouble(-2, "")
    ground.check()
    hanging = ground.index.ended.hanging
    assert all(hanging.is_leaf(slot) for slot in [*ground.free, ground.index.slots["b"]])
    ground.index.end(list("ab"))
    assert ground.evict_all() == "ba"
