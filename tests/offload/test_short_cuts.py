"""What a policy does for several blocks at once is what it does for one after the other."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv.offload import POLICIES, BlockIndex, make_policy
from paddle_kv.offload.returns import NUM_PARTS
from paddle_kv.offload.score import CLASSES
from paddle_kv.offload.slot_lru import SlotLru
from paddle_kv.offload.survival import HEAD, Survival
from tests.offload.index_traffic import hold_and_drop


class FourMethods:
    """The same policy without its short cuts."""

    def __init__(self, policy: Any) -> None:
        self.on_insert, self.on_access = policy.on_insert, policy.on_access
        self.on_remove, self.victim = policy.on_remove, policy.victim
        for name in ("on_prompt", "on_save", "on_end", "by_order", "attach"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))


def survival(capacity: int, *, trusted: bool) -> Survival[int]:
    """Time stands still; what runs are worth is not the same for all."""
    policy: Survival[int] = Survival(capacity, lambda: 0.0)
    policy._guard.saw = lambda *_: None  # type: ignore[method-assign]
    policy._guard.trusts = trusted
    worth = [[(7 * klass % 5) / 5] * NUM_PARTS for klass in range((HEAD + 1) * CLASSES)]
    policy._returns.worth = lambda: worth  # type: ignore[method-assign]
    policy._queues.price()
    return policy


MADE: dict[str, Any] = {
    **{name: lambda capacity, name=name: make_policy(name, capacity) for name in POLICIES},
    "by slot": SlotLru,
    "trusted": lambda capacity: survival(capacity, trusted=True),
    "not trusted": lambda capacity: survival(capacity, trusted=False),
}


class Both:
    """An index whose policy may take short cuts, and one whose policy may not."""

    def __init__(self, name: str, capacity: int) -> None:
        policy = MADE[name](capacity)
        assert hasattr(policy, "replace") or hasattr(policy, "replace_all")
        self.indexes = [BlockIndex(one, capacity) for one in (policy, FourMethods(MADE[name](capacity)))]
        self.free = [list(range(capacity)) for _ in self.indexes]
        for index in self.indexes:
            index.evicted = []

    def each(self, call: Any) -> Any:
        """What both give."""
        found = [call(index, free) for index, free in zip(self.indexes, self.free, strict=True)]
        assert found[0] == found[1]
        short, long = self.indexes
        assert list(short.slots.items()) == list(long.slots.items())
        assert (short.evicted, short.evicted_blocks, short.pins) == (long.evicted, long.evicted_blocks, long.pins)
        assert self.free[0] == self.free[1]
        return found[0]

    def serve(self, prompt: list[int]) -> int:
        found: int = self.each(lambda index, _: index.lookup(prompt))
        self.each(lambda index, free: list(index.admit(prompt[found:], free).items()))
        return found


@pytest.mark.parametrize("name", list(POLICIES))
@given(
    capacity=st.integers(1, 15),
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 30), max_size=8), st.sets(st.integers(0, 30), max_size=20)), max_size=40
    ),
)
def test_among_pinned_blocks(name: str, capacity: int, prompts: list[tuple[list[int], set[int]]]) -> None:
    both = Both(name, capacity)
    for prompt, pinned in prompts:
        held = pinned & set(both.indexes[0].slots)
        both.each(lambda index, _, held=held: index.pin(held))
        both.serve(prompt)
        assert held <= set(both.indexes[0].slots)
        both.each(lambda index, _, held=held: index.unpin(held))
    both.each(lambda index, _: index.evict(capacity))  # in the same order


@pytest.mark.parametrize("name", ["survival", "by slot", "trusted", "not trusted"])
def test_a_prompt_that_names_a_block_twice(name: str) -> None:
    both = Both(name, 12)
    both.serve(list(range(12)))
    both.serve([20, 21, 22, 23, 24, 20, 25, 26])
    assert set(both.indexes[0].slots.values()) == set(range(12))  # no slot is lost
    both.each(lambda index, _: index.evict(12))


@pytest.mark.parametrize("name", ["survival", "by slot", "trusted", "not trusted"])
@pytest.mark.parametrize("seed", range(3))
def test_in_traffic(name: str, seed: int) -> None:
    """Sessions go on, branch and begin alike; saves come late, in parts, and of what was never looked up; blocks are
    held, dropped, and over."""
    rng = random.Random(seed)
    both = Both(name, rng.choice([30, 90, 200]))
    sessions: list[list[int]] = []
    late: list[list[int]] = []
    held: list[list[int]] = []
    fresh = iter(range(10**9))
    for _ in range(350):
        if sessions and rng.random() < 0.6:
            prompt = rng.choice(sessions[-25:])
            if rng.random() < 0.3:
                prompt = prompt[: rng.randrange(len(prompt) + 1)]
        else:
            prompt = []
        prompt = [*prompt, *(next(fresh) for _ in range(rng.randrange(1, 25)))]
        sessions.append(prompt)
        found: int = both.each(lambda index, _, prompt=prompt: index.lookup(prompt))
        late.append(prompt[found:] if rng.random() < 0.8 else prompt[rng.randrange(found + 1) :])
        if rng.random() < 0.3:
            late[-1] = [*late[-1], *(next(fresh) for _ in range(rng.randrange(9)))]
        while len(late) > rng.randrange(3):
            blocks = late.pop(rng.randrange(len(late)))
            stop = rng.randrange(len(blocks) + 1) if rng.random() < 0.2 else len(blocks)
            for part in (blocks[:stop], blocks[stop:]):
                both.each(lambda index, free, part=part: list(index.admit(part, free).items()))
        hold_and_drop(rng, list(both.indexes[0].slots), held, both.each, most_held=1 / 4)
        if rng.random() < 0.02:
            over = rng.choice(sessions)
            both.each(lambda index, _, over=over: index.end(over))


@pytest.mark.parametrize("name", ["survival", "trusted", "not trusted"])
def test_a_block_that_stands_twice_in_a_run_goes_once(name: str) -> None:
    both = Both(name, 9)
    both.serve([1, 2, 3, 4, 5, 9, 8])
    both.each(lambda index, free: free.append(index.remove(9)))
    both.each(lambda index, free: list(index.admit([8, 9, 10], free).items()))
    both.serve(list(range(100, 109)))
