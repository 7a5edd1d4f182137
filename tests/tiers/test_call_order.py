"""Which of several works is read next."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from paddle_kv.tiers.call_order import CallOrder


@dataclass(eq=False)
class Work:
    call: int
    name: str
    stage: int = 0


def test_a_call_comes_to_its_end_before_the_next_one_and_goes_layer_by_layer() -> None:
    order: CallOrder[Work] = CallOrder()
    calls = [order.new_call() for _ in range(3)]
    assert len({*calls}) == 3
    for call, name in ((calls[1], "c"), (calls[0], "a"), (calls[0], "b"), (calls[2], "d")):
        order.append(Work(call, name))
    seen = []
    while len(order):
        work = order.popleft()
        seen.append(f"{work.name}{work.stage}")
        work.stage += 1
        if work.stage < 3:
            order.append(work)
    assert seen == ["a0", "b0", "a1", "b1", "a2", "b2", "c0", "c1", "c2", "d0", "d1", "d2"]


def test_none_waits() -> None:
    order: CallOrder[Work] = CallOrder()
    with pytest.raises(IndexError):
        order.popleft()
    assert not order


def test_what_comes_again_goes_on_where_its_call_is() -> None:
    rng = random.Random(3)
    order: CallOrder[Work] = CallOrder()
    works = [Work(order.new_call(), str(number)) for number in range(20)]
    for work in rng.sample(works, 20):
        order.append(work)
    first = order.popleft()
    assert first is works[0]
    first.stage = 5
    order.append(first)
    assert [order.popleft() for _ in works] == works
