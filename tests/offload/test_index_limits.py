"""The index keeps to its capacity, and nothing is left of an admission that was undone."""

from __future__ import annotations

import pytest

from paddle_kv.offload import BlockIndex, Lru


def test_no_more_than_its_capacity_however_many_slots_are_free() -> None:
    index: BlockIndex[str] = BlockIndex(Lru(), 3)
    slots = list(range(10))
    assert list(index.admit(list("ab"), slots)) == ["a", "b"]
    index.admit(list("cde"), slots)
    assert len(index.slots) == 3
    assert index.evicted_blocks == 2
    assert len(slots) == 7


def test_an_admission_that_goes_wrong_leaves_nothing() -> None:
    class Raising(Lru[str]):
        def on_insert(self, key: str) -> None:
            if key == "b":
                raise RuntimeError("no")
            super().on_insert(key)

    index: BlockIndex[str] = BlockIndex(Raising(), 4)
    slots = [3, 2, 1, 0]
    index.admit(["a"], slots)
    with pytest.raises(RuntimeError, match="no"):
        index.admit(["b", "c", "d"], slots)
    assert index.slots == {"a": 0}
    assert sorted(slots) == [1, 2, 3]
    assert index.evict(4) == [0]


def test_a_block_that_is_forgotten_is_no_longer_arriving() -> None:
    index: BlockIndex[str] = BlockIndex(Lru(), 4)
    slots = list(range(4))
    index.arriving.update(dict.fromkeys(index.admit(["a", "b"], slots), 1))
    slots.append(index.remove("a"))
    index.admit(["a"], slots)
    assert index.lookup(["a", "b"]) == 1
