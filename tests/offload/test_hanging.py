"""Which block hangs on which: what is remembered of prompts to come, and how much memory it takes."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from itertools import pairwise

import pytest

from paddle_kv.offload import slot_numbers
from paddle_kv.offload.hanging import COMING_SHARE, MIN_COMING, MOST_AT_ONCE, NOTHING, Hanging


# ---- prompts to come ----
def test_a_part_of_the_capacity_is_remembered_and_then_the_oldest_goes() -> None:
    hanging: Hanging[int] = Hanging({}, 2 * MIN_COMING * COMING_SHARE)
    prompts = [list(range(first, first + MIN_COMING // 2)) for first in range(0, 5 * MIN_COMING // 2, MIN_COMING // 2)]

    def remembered() -> list[int]:
        return [at for at, prompt in enumerate(prompts) if hanging.path(prompt[:1], 0)[2]]

    for prompt in prompts[:4]:
        hanging.saw(prompt, 0)
    assert remembered() == [0, 1, 2, 3]  # just as many as there is room for
    hanging.saw(prompts[4], 0)
    assert remembered() == [1, 2, 3, 4]


def test_of_prompts_with_the_same_block_to_come_the_oldest_goes() -> None:
    hanging: Hanging[int] = Hanging({}, 8)
    prompts = [[1, 100 + number] for number in range(MOST_AT_ONCE + 1)]
    for prompt in prompts:
        hanging.saw(prompt, 0)
    assert hanging.path([1], 0) == (prompts[-1], 0, [(prompt, 0) for prompt in reversed(prompts[1:])])


def test_a_prompt_is_known_by_each_block_up_to_the_first_absent_one() -> None:
    """Blocks may have come since it was looked up: then what was to come begins before."""
    for found in range(4):
        hanging: Hanging[int] = Hanging({}, 8)
        prompt = [7, 1, 2, 3, 4, 5]
        hanging.saw(prompt, 1 + found)
        assert hanging.path([1, 2, 3, 4], 3) == (prompt, 4, [(prompt, 1 + found)])


def test_a_prompt_that_is_to_come_behind_these_is_another() -> None:
    hanging: Hanging[int] = Hanging({}, 8)
    hanging.saw([9, 3, 4], 1)
    assert hanging.path([1, 2, 3], 1) == ([1, 2, 3], 1, [])
    assert hanging.path([1, 2, 3], 0) == ([1, 2, 3], 0, [])


def test_the_same_blocks_in_another_order_are_parts_of_the_prompt() -> None:
    hanging: Hanging[int] = Hanging({}, 8)
    prompt = [1, 2, 3, 4]
    hanging.saw(prompt, 1)
    assert hanging.path([2, 4, 3], 0) == (prompt, 1, [(prompt, 1)])
    assert hanging.path([2, 4], 0) == (prompt, 1, [(prompt, 1)])
    assert hanging.path([2, 4, 5], 0) == ([1, 2, 4, 5], 1, [(prompt, 1)])  # another way behind the same head


# ---- slots ----
def test_what_stands_behind_an_absent_block_does_not_hang_on_what_is_before() -> None:
    hanging: Hanging[str] = Hanging({"a": 0, "c": 1}, 4)
    assert hanging.link(list("abc"), 0) == []
    assert hanging.is_leaf(0) and hanging.is_leaf(1)


def test_a_block_before_may_be_in_a_slot_that_was_never_used() -> None:
    for slot in (1, 2, 900):
        slots = {"a": 0}
        hanging: Hanging[str] = Hanging(slots, 1000)
        assert hanging.link(["a"], 0) == []
        slots["head"] = slot
        assert hanging.link(["head", "a"], 1) == []
        assert not hanging.is_leaf(slot) and hanging.is_leaf(0)


def test_memory_grows_by_steps_up_to_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_numbers, "SLOTS_AT_ONCE", 2)
    slots: dict[int, int] = {}
    hanging: Hanging[int] = Hanging(slots, 5)
    sizes = []
    for slot in range(5):
        slots[slot] = slot
        hanging.link([slot - 1, slot] if slot else [0], min(slot, 1))
        sizes.append(len(hanging._parents))
        assert hanging.is_leaf(slot) and (not slot or not hanging.is_leaf(slot - 1))
    assert sizes == [2, 2, 4, 4, 5] and len(hanging._children or ()) == 5


def test_a_slot_far_behind_the_others_gets_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_numbers, "SLOTS_AT_ONCE", 2)
    numbers = slot_numbers.with_room(array("i"), 6, 100, -1)
    assert numbers.tolist() == [-1] * 7
    numbers[6] = 5
    assert slot_numbers.with_room(numbers, 7, 100, -1).tolist() == [-1] * 6 + [5, -1, -1]
    assert slot_numbers.with_room(numbers, 9, 3, -1).tolist() == [-1] * 6 + [5, -1, -1, -1]  # more than was said


def test_the_oldest_prompts_to_come_are_found_without_a_search() -> None:
    """Behind those that are forgotten the next one stands in front: a table would be searched through its gaps."""
    hanging: Hanging[int] = Hanging({}, 1)
    for number in range(MIN_COMING + 10):
        hanging.saw([number], 0)
    assert isinstance(hanging._coming, OrderedDict)
    assert list(hanging._coming) == list(range(10, MIN_COMING + 10))
    hanging.saw([10], 0)
    hanging.saw([-1], 0)
    assert 10 in hanging._coming and 11 not in hanging._coming  # the one seen last is behind the others


def test_how_many_hang_on_a_block_is_known_from_the_first_question_on() -> None:
    rng = random.Random(4)
    slots = {key: key for key in range(12)}
    early: Hanging[int] = Hanging(slots, 12)
    late: Hanging[int] = Hanging(slots, 12)
    parents: dict[int, int] = {}
    told_early, told_late = 0, 0
    for step in range(200):
        path = rng.sample(range(12), rng.randrange(1, 5))
        parents.pop(path[0], None)
        if step % 3:
            bare = [hanging.link(path, 0) for hanging in (early, late)]
            parents.update((key, above) for above, key in pairwise(path))
        else:
            bare = [[one for one in [hanging.gone(path[0])] if one != NOTHING] for hanging in (early, late)]
        leaves = [key not in parents.values() for key in range(12)]
        assert [early.is_leaf(slot) for slot in range(12)] == leaves
        if step < 100:
            assert bare[1] == []
            told_early += len(bare[0])
        else:
            assert [late.is_leaf(slot) for slot in range(12)] == leaves
            told_late += len(bare[1])
        assert step <= 100 or bare[0] == bare[1]
    assert told_early and told_late
