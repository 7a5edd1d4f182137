from __future__ import annotations

from paddle_kv.offload import Arc, BlockIndex, Lru, S3Fifo


def filled(keys: str, capacity: int) -> tuple[BlockIndex[str], list[int]]:
    index: BlockIndex[str] = BlockIndex(Lru(), capacity)
    slots = list(range(capacity))
    index.admit(list(keys), slots)
    return index, slots


def test_a_prefix_ends_at_the_first_block_that_is_absent_or_not_there_yet() -> None:
    index, _ = filled("abcd", 7)
    assert index.lookup(list("abxd")) == 2
    assert index.lookup(list("xab")) == 0
    index.arriving["b"] = 1
    assert index.lookup(list("abcd")) == 1


def test_admitting_gives_slots_only_to_absent_blocks() -> None:
    index, slots = filled("abc", 5)
    taken = index.admit(list("axcy"), slots)
    assert list(taken) == ["x", "y"]
    assert slots == []
    assert sorted(index.slots.values()) == [0, 1, 2, 3, 4]


def test_a_block_behind_an_absent_one_counts_as_used() -> None:
    index, slots = filled("abc", 4)
    index.admit(["x", "c"], slots)  # b is the next one to go, not c
    index.admit(["y"], slots)
    assert set(index.slots) == {"a", "c", "x", "y"}


def test_a_block_before_the_first_absent_one_is_not_counted_again() -> None:
    index: BlockIndex[int] = BlockIndex(S3Fifo(10), 10)
    slots = list(range(10))
    index.admit([0], slots)
    for _ in range(2):  # three are as many as it counts
        index.lookup([0])
        index.admit([0], slots)
    assert index._policy._counts[0] == 2  # type: ignore[attr-defined]
    index.admit([0, 1], slots)
    assert index._policy._counts == {0: 2, 1: 0}  # type: ignore[attr-defined]


def test_more_blocks_than_fit_keep_the_first() -> None:
    index, _ = filled("abcdefg", 3)
    assert index.lookup(list("abcdefg")) == 3
    assert index.evicted_blocks == 0


def test_no_room_where_everything_is_pinned() -> None:
    index, slots = filled("abc", 3)
    index.pin("abc")
    index.pin("b")
    index.unpin("b")
    assert index.admit(["x", "y"], slots) == {}
    index.unpin("b")
    index.admit(["x"], slots)
    assert set(index.slots) == {"a", "c", "x"}


def test_a_block_of_the_call_that_is_there_makes_no_room_for_the_others() -> None:
    index, slots = filled("abc", 3)
    assert list(index.admit(["x", "a", "y"], slots)) == ["x", "y"]
    assert set(index.slots) == {"a", "x", "y"}
    assert index.admit(["p", "x", "a", "y"], slots) == {}
    assert set(index.slots) == {"a", "x", "y"}
    assert index.pins == {}


def test_the_policy_may_refuse_a_block_of_the_same_call() -> None:
    index: BlockIndex[int] = BlockIndex(S3Fifo(20), 20)
    slots = list(range(20))
    index.admit(range(20), slots)
    for key in range(20):
        for _ in range(2):
            index._policy.on_access(key)  # all of them deserve the main queue
    taken = index.admit(range(100, 120), slots)
    assert 0 < len(taken) < 20
    assert len(index.slots) == 20
    assert sorted(index.slots.values()) == list(range(20))
    assert set(taken) <= set(index.slots)


def test_a_prompt_without_room_loses_its_end_whatever_the_policy_picks() -> None:
    """ARC remembers the end of this one, and would let go of its middle."""
    index: BlockIndex[str] = BlockIndex(Arc(4), 4)
    slots = list(range(4))
    index.admit(list("rqpc"), slots)
    slots = index.evict(1)  # c
    slots.append(index.remove("r"))
    index.pin("pq")
    assert list(index.admit(list("abc"), slots)) == ["a", "b"]
    assert set(index.slots) == set("pqab") and len(set(index.slots.values())) == 4
    index.unpin("pq")
    assert len(index.evict(9)) == 4 and index.slots == {}


def test_a_block_that_was_dropped_while_it_was_held_makes_room_for_the_head_of_its_prompt() -> None:
    index, slots = filled("abcd", 4)
    index.pin("abcd")
    slots = [index.remove("d")]
    assert list(index.admit(["p", "q", "d"], slots)) == ["p"]
    assert set(index.slots) == {"a", "b", "c", "p"}
    index.unpin("abcd")
    assert index.evict(9) and index.slots == {}


def test_what_is_let_go_of_counts_as_evicted() -> None:
    index, _ = filled("abcd", 4)
    assert len(index.evict(3)) == 3
    index.pin(index.slots)
    assert index.evict(1) == []
    assert index.evicted_blocks == 3
