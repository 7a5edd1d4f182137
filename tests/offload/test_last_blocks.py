"""Whether the last block of a prompt is of use to the one that goes on from it, and what follows from that."""

from __future__ import annotations

import pytest

from paddle_kv.offload.last_blocks import MEMORY, LastBlocks
from paddle_kv.offload.returns import NUM_PARTS
from paddle_kv.offload.score import CLASSES
from paddle_kv.offload.survival import HEAD
from tests.offload.served import Served


def test_the_share_is_what_was_seen_and_begins_with_all() -> None:
    blocks = LastBlocks()
    assert blocks.share == 1.0
    for number in range(1, 4):
        blocks.came_back(False)
        assert blocks.share == pytest.approx(1 / (1 + number), abs=0.01)
    blocks.came_back(True)
    assert blocks.share == pytest.approx(2 / 5, abs=0.01)


def test_what_is_long_ago_counts_less() -> None:
    blocks = LastBlocks()
    for _ in range(1000):
        blocks.came_back(False)
    assert blocks.share < 0.02
    for _ in range(int(MEMORY)):
        blocks.came_back(True)
    assert 0.6 < blocks.share < 0.65
    for _ in range(3000):
        blocks.came_back(True)
    assert blocks.share == pytest.approx(1.0, abs=1e-4)


def test_prompts_that_go_on_tell_whether_their_last_block_came_back() -> None:
    served = Served("survival", 100)
    blocks = served.policy._last_blocks
    served.use(0.0, [1, 2, 3])
    served.use(1.0, [1, 2, 4, 5])  # in the place of 3
    after_one = blocks.share
    assert after_one == pytest.approx(0.5, abs=0.01)
    served.use(2.0, [1, 2, 4, 5, 6])
    assert blocks.share > after_one
    known = blocks.share
    served.use(3.0, [7])
    served.use(4.0, [7, 8, 9])  # what has one block of its own is known by it: it says nothing
    assert blocks.share == known


@pytest.mark.parametrize(("share", "is_let_in"), [(1.0, True), (0.1, False)])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_last_block_competes_with_what_it_is_worth(share: float, is_let_in: bool, goes_on: bool) -> None:
    """Also where the room for several is made at once: for a session that goes on."""
    served = Served("survival", 64)
    policy = served.policy
    served.use(0.0, list(range(1, 61)))
    served.use(0.0, [100, 101, 102, 103])
    worth = [[0.2] * NUM_PARTS for _ in range((HEAD + 1) * CLASSES)]
    policy._returns.worth = lambda: worth
    policy._queues.price()
    policy._guard.trusts = True
    policy._guard.saw = lambda *arguments: None
    policy._last_blocks.share = share
    policy._last_blocks.came_back = lambda last_too: None
    prompt = list(range(100 if goes_on else 200, 220))[: 24 if goes_on else 20]
    served.use(1.0, prompt)
    assert (prompt[-1] in served.index.slots) == is_let_in
    assert set(prompt[:-1]) <= set(served.index.slots)
