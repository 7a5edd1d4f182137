"""With the policies that promise it, what is there are prefixes: no block goes while one hangs on it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paddle_kv.offload import BlockIndex, make_policy
from paddle_kv.offload.hanging import MIN_COMING, MOST_AT_ONCE, NOTHING, Hanging
from paddle_kv.offload.returns import NUM_PARTS
from paddle_kv.offload.score import CLASSES
from paddle_kv.offload.survival import HEAD

CAPACITY = 24
Path = tuple[int, ...]


class Server:
    """Requests over prompts that share their beginnings. A block is the path to it."""

    def __init__(self, policy: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.policy: Any = make_policy(policy.split()[0], CAPACITY, lambda: self.now_s)
        self.index: BlockIndex[Path] = BlockIndex(self.policy, CAPACITY)
        self.free = list(range(CAPACITY))
        if "trusted" in policy:
            self._always_trusted()
        self.evicted = self.refused = 0

    def _always_trusted(self) -> None:
        """And heads are worth nothing, so that only what hangs on them keeps them."""
        self.policy._guard.saw = lambda *arguments: None
        self.policy._guard.trusts = True
        worth = [[self.random.random() for _ in range(NUM_PARTS)] for _ in range((HEAD + 1) * CLASSES)]
        worth[HEAD * CLASSES :] = [[0.0] * NUM_PARTS] * CLASSES
        self.policy._returns.worth = lambda: worth
        self.policy._queues.price()

    def prompt(self) -> list[Path]:
        whole = tuple(self.random.randrange(2 if depth < 4 else 9) for depth in range(self.random.randint(1, 9)))
        return [whole[: depth + 1] for depth in range(len(whole))]

    def look_up(self) -> tuple[list[Path], int]:
        """What is found is held, as a lease holds it."""
        prompt = self.prompt()
        found = self.index.lookup(prompt)
        self.index.pin(prompt[:found])
        self.check()
        return prompt, found

    def save(self, prompt: list[Path], found: int) -> None:
        """At once, or in two chunks; perhaps with the blocks that were found, and with an answer."""
        first = 0 if found == len(prompt) else self.random.choice([found, found, 0])
        middle = self.random.choice([len(prompt), self.random.randint(first, len(prompt))])
        keys = list(prompt)
        if middle == len(prompt) and self.random.random() < 0.3:
            keys += [(*prompt[-1], 99)]
            middle += 1
        for chunk in (keys[first:middle], keys[middle:]):
            before = len(self.index.slots)
            admitted = self.index.admit(chunk, self.free)
            self.refused += len(admitted) < len(set(chunk)) and before == CAPACITY
            self.check()
            if not all(key in self.index.slots for key in chunk):
                break  # what comes behind is no use
        self.index.unpin(prompt[:found])

    def hint(self) -> None:
        prompt = self.prompt()
        if self.random.random() < 0.6:
            self.index.end(prompt)
        else:
            self.index.expect(prompt, self.now_s + self.random.randrange(3))

    def evict(self) -> None:
        count = self.random.choice([1, 1, 2, 20])
        slots = self.index.evict(count)
        self.free += slots
        self.evicted += len(slots)
        self.check()

    def check(self) -> None:
        slots = self.index.slots
        bare = [key for key in slots if key[:-1] and key[:-1] not in slots]
        assert not bare, "what they hang on has gone"
        assert sorted([*self.free, *slots.values()]) == list(range(CAPACITY))
        if self.index._on_end is None:
            hanging = self.index.ended.hanging
            parents = [slots[key[:-1]] for key in slots if key[:-1]]
            assert all(hanging.is_leaf(slot) == (slot not in parents) for slot in slots.values())

    def run(self, steps: int, at_once: int) -> None:
        waiting: list[tuple[list[Path], int]] = []
        for _ in range(steps):
            self.now_s += self.random.choice([0.1, 3.0, 30.0])
            what = self.random.choice(["look up", "look up", "save", "save", "evict", "hint"])
            if what == "look up" and len(waiting) < at_once:
                waiting.append(self.look_up())
            elif what == "save" and waiting:
                self.save(*waiting.pop(self.random.randrange(len(waiting))))
            elif what == "evict":
                self.evict()
            elif what == "hint":
                self.hint()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("policy", "at_once"), [("lru", 2), ("survival", 1), ("survival trusted", 1)])
def test_what_is_there_are_prefixes(policy: str, at_once: int, seed: int) -> None:
    server = Server(policy, seed)
    server.run(1500, at_once)
    assert server.evicted > 200 and server.refused


def test_the_head_of_a_prompt_is_younger_than_what_was_saved_behind_it() -> None:
    index: BlockIndex[str] = BlockIndex(make_policy("lru", 4), 4)
    slots = list(range(4))
    index.admit(["a"], slots)
    assert index.lookup(list("abc")) == 1
    index.admit(list("bc"), slots)
    gone = []
    while index.slots:
        before = set(index.slots)
        index.evict(1)
        gone += before - index.slots.keys()
    assert gone == ["c", "b", "a"]


def test_a_prompt_loses_no_head_to_its_end() -> None:
    for name in ("lru", "arc", "s3fifo", "survival"):
        index: BlockIndex[str] = BlockIndex(make_policy(name, 4), 4)
        slots = list(range(4))
        index.admit(list("abc"), slots)
        assert index.lookup(list("abcdef")) == 3
        index.admit(list("def"), slots)
        assert set(index.slots) == set("abcd"), name


# ---- what hangs on what ----
def test_blocks_that_were_left_behind_hang_on_the_next_one_until_they_go() -> None:
    slots = {"a": 0, "b": 1, "c": 2}
    hanging: Hanging[str] = Hanging(slots, 4)
    assert hanging.link(list("abc"), 0) == []
    assert [hanging.is_leaf(slot) for slot in range(9)] == [False, False] + [True] * 7
    slots["x"] = slots.pop("a")
    assert hanging.gone(0) == NOTHING
    assert not hanging.is_leaf(0)  # b cannot be told from a child of x
    slots["a"] = 3
    assert hanging.link(list("ab"), 0) == [0]  # it has been met again
    assert hanging.is_leaf(0) and not hanging.is_leaf(3)
    assert hanging.gone(slots.pop("c")) == 1
    assert hanging.gone(7) == NOTHING
    hanging.clear()
    assert hanging.is_leaf(3)


def test_what_hangs_on_what_needs_memory_for_the_blocks_that_are_there() -> None:
    slots = {"a": 0, "b": 1, "c": 2}
    hanging: Hanging[str] = Hanging(slots, 10**15)
    assert hanging.link(["a", "b", "c"], 1) == []
    assert [hanging.is_leaf(slot) for slot in range(4)] == [False, False, True, True]
    slots |= {"d": 3, "far": 1000}
    assert hanging.link(["d", "b", "far"], 1) == [0], (
        "also where the first that it hangs on, or the last, is in a slot never used"
    )
    assert [hanging.is_leaf(slot) for slot in (0, 1, 2, 3, 1000)] == [True, False, True, False, True]
    assert hanging.gone(1000) == NOTHING
    assert hanging.gone(2) == 1
    assert hanging.gone(1) == 3


def test_what_never_comes_is_forgotten() -> None:
    hanging: Hanging[int] = Hanging({}, 8)
    for number in range(0, 10 * MIN_COMING, 64):
        hanging.saw(list(range(number, number + 64)), 0)
    assert hanging._num_coming == 64 * len(hanging._coming) <= MIN_COMING
    longest = list(range(-2 * MIN_COMING, 0))
    hanging.saw(longest, 5)
    assert len(hanging._coming) == 1
    assert hanging.path(longest[5:9], 0) == (longest, 5, [(longest, 5)])


@pytest.mark.parametrize("seed", range(3))
def test_prompts_to_come_are_counted_as_they_are_kept(seed: int) -> None:
    """Of a count that is too large too much is forgotten, of one that is too small memory grows without end."""
    rng = random.Random(seed)
    hanging: Hanging[int] = Hanging({}, 8)
    hanging._max_coming, most = 300, 0
    prompts = [list(range(first, first + rng.randint(1, 12))) for first in (rng.randrange(8) for _ in range(60))]
    for _ in range(400):
        prompt = rng.choice(prompts)
        found = rng.randrange(len(prompt))
        hanging.saw(prompt, found)
        kept = [one for known in hanging._coming.values() for one in known]
        assert hanging._num_coming == sum(len(one) for one, _ in kept)
        assert hanging._num_coming <= 300 or len(hanging._coming) == 1
        most = max(most, *map(len, hanging._coming.values()))
        *_, last = hanging._coming
        assert (last, hanging._coming[last][-1]) == (prompt[found], (prompt, found))  # what was seen last goes last
        assert all(one[0][one[1]] == first for first, known in hanging._coming.items() for one in known)
    assert most == MOST_AT_ONCE
    hanging.clear()
    assert (hanging._num_coming, hanging._coming) == (0, {})


def test_of_prompts_with_the_same_block_to_come_the_one_seen_last_counts() -> None:
    hanging: Hanging[int] = Hanging({}, 8)
    first, last = [1, 2, 3, 4], [9, 2, 3, 5]
    hanging.saw(first, 1)
    hanging.saw(last, 1)
    assert hanging.path([2, 3], 0) == (last, 1, [(last, 1), (first, 1)])
    hanging.saw(first, 1)
    assert hanging.path([2, 3], 0) == (first, 1, [(first, 1), (last, 1)])
