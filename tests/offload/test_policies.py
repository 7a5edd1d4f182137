"""Each policy against the plain-list reading of its paper: the same block goes at every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv.offload import POLICIES, Arc, BlockIndex, S3Fifo, make_policy
from tests.reference.policies import ArcReference, LruReference, S3FifoReference

# Survival goes by the order of use until it has learnt.
REFERENCES: dict[str, Any] = {
    "lru": LruReference,
    "arc": ArcReference,
    "s3fifo": S3FifoReference,
    "survival": LruReference,
}
names = pytest.mark.parametrize("name", list(POLICIES))


def request(index: BlockIndex[int], key: int, free_slots: list[int]) -> int | None:
    """One use of one block, as the references see it; the block that went."""
    if index.lookup([key]):
        return None
    before = set(index.slots)
    index.admit([key], free_slots)
    gone = before - set(index.slots)
    assert len(gone) <= 1
    return gone.pop() if gone else None


def compare(name: str, capacity: int, stream: list[int]) -> int:
    index: BlockIndex[int] = BlockIndex(make_policy(name, capacity), capacity)
    reference = REFERENCES[name](capacity)
    free_slots, hits = list(range(capacity)), 0
    for step, key in enumerate(stream):
        hits += key in reference
        assert (key in index.slots) == (key in reference), step
        assert request(index, key, free_slots) == reference.request(key), step
    assert sorted([*free_slots, *index.slots.values()]) == list(range(capacity))
    return hits


@names
@given(capacity=st.integers(1, 25), stream=st.lists(st.integers(0, 40), max_size=300))
def test_same_victims_as_the_paper_on_any_stream(name: str, capacity: int, stream: list[int]) -> None:
    compare(name, capacity, stream)


@names
@pytest.mark.parametrize("capacity", [7, 50, 130])
def test_same_victims_as_the_paper_on_scans_and_a_hot_set(name: str, capacity: int) -> None:
    rng = random.Random(capacity)
    stream: list[int] = []
    for _ in range(60):
        stream += [int(rng.paretovariate(0.6)) % 300 for _ in range(40)]
        start = rng.randrange(10_000)
        stream += range(start, start + rng.randrange(1, 60))
    assert compare(name, capacity, stream) > 0


@names
@given(data=st.data())
def test_a_pinned_block_is_never_a_victim(name: str, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 12))
    index: BlockIndex[int] = BlockIndex(make_policy(name, capacity), capacity)
    free_slots = list(range(capacity))
    for key in data.draw(st.lists(st.integers(0, 20), max_size=60)):
        request(index, key, free_slots)
    pinned = {key for key in list(index.slots) if data.draw(st.booleans())}
    index.pin(pinned)
    unpinned = len(index.slots) - len(pinned)
    assert len(index.evict(capacity + 1)) == unpinned
    assert set(index.slots) == pinned
    assert index.evict(1) == []


@names
def test_a_removed_block_leaves_nothing_behind(name: str) -> None:
    index: BlockIndex[str] = BlockIndex(make_policy(name, 3), 3)
    free_slots = [0, 1, 2]
    index.admit(["a", "b"], free_slots)
    free_slots.append(index.remove("a"))
    assert sorted([*free_slots, index.slots["b"]]) == [0, 1, 2]
    assert len(index.evict(5)) == 1
    assert index.slots == {}


def test_a_block_that_is_only_remembered_cannot_be_removed() -> None:
    policy: S3Fifo[int] = S3Fifo(4)
    index, free_slots = BlockIndex(policy, 4), list(range(4))
    for key in range(5):
        request(index, key, free_slots)
    assert policy._counts.keys() - index.slots.keys() == {0}
    with pytest.raises(KeyError, match="0"):
        policy.on_remove(0)


def test_the_memory_for_ghosts_does_not_grow() -> None:
    capacity, rng = 30, random.Random(1)
    policy: S3Fifo[int] = S3Fifo(capacity)
    index, free_slots = BlockIndex(policy, capacity), list(range(capacity))
    for _ in range(4000):
        request(index, rng.randrange(45), free_slots)  # most of them return as ghosts
        assert len(policy._counts) <= 2 * capacity
        assert len(policy._ghosts) <= 2 * capacity


def test_arc_remembers_as_much_as_its_paper_allows_and_no_more() -> None:
    capacity, rng = 5, random.Random(2)
    policy: Arc[int] = Arc(capacity)
    index, free_slots, most = BlockIndex(policy, capacity), list(range(capacity)), 0
    for _ in range(4000):
        request(index, int(rng.paretovariate(0.5)) % 30, free_slots)
        used_once = len(policy._once) + len(policy._once_ghosts)
        all_known = used_once + len(policy._often) + len(policy._often_ghosts)
        assert used_once <= capacity and all_known <= 2 * capacity
        most = max(most, all_known)
    assert most == 2 * capacity


@names
def test_a_policy_that_was_made_for_fewer_blocks_still_finds_the_next_to_go(name: str) -> None:
    if name == "lru":
        return  # it knows of no capacity, or refuses a slot that it lacks
    index: BlockIndex[int] = BlockIndex(make_policy(name, 2), 9)
    free_slots, rng = list(range(9)), random.Random(3)
    for _ in range(3000):
        request(index, rng.randrange(15), free_slots)
    assert len(index.slots) == 9


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match=r"'mru' must be one of lru, arc, s3fifo"):
        make_policy("mru", 3)


@pytest.mark.parametrize("name", [None, 5, ["lru"]])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match=r"^name is .*; the name of a policy is expected"):
        make_policy(name, 3)


@names
@pytest.mark.parametrize("capacity", [0, -1])
def test_a_policy_for_no_blocks_is_refused(name: str, capacity: int) -> None:
    with pytest.raises(ValueError, match=rf"^capacity_blocks = {capacity} must be in \[1, 2\*\*63\)"):
        make_policy(name, capacity)
    assert compare(name, 1, [0, 1, 1, 0, 2]) == 1
