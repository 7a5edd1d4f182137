"""The index keeps to its capacity, and nothing is left of an admission that was undone."""

from __future__ import annotations

from paddle_kv.offload import BlockIndex, Lru


def test_no_more_than_its_capacity_however_many_slots_are_free() -> None:
    index: BlockIndex[str] = BlockIndex(Lru(), 3)
    slots = list(range(10))
    assert list(index.admit(list("ab"), slots)) == ["a", "b"]
    index.admit(list("cde"), slots)
    assert len(index.slots) == 3
    assert index.evicted_blocks == 2
    assert len(slots) == 7


def test_an_admission_that_is_undone_leaves_nothing() -> None:
    index: BlockIndex[str] = BlockIndex(Lru(), 4)
    slots = list(range(4))
    index.admit(["a"], slots)
    admitted = index.admit(["b", "c"], slots)
    index.arriving.update(admitted)
    index.pin(admitted)
    assert sorted(index.undo(admitted)) == sorted(admitted.values())
    assert (set(index.slots), index.arriving, index.pins) == ({"a"}, set(), {})
    assert len(index.evict(4)) == 1
