"""What a tier is measured to take, and what is told of the end of a load from there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.offload.below import RATE_WEIGHT, Below, Clearing, Rate


def test_a_load_took_as_long_as_all_that_was_under_way() -> None:
    rate = Rate()
    assert rate.seconds(7) == 0.0  # nothing is known
    assert (rate.began(2), rate.began(3)) == (2, 5)
    rate.ended(3, 5, 10.0)  # with the two before it: 2 s a block
    assert (rate.seconds(0), rate.seconds(1)) == (0.0, (2 + 1) * 2.0)
    rate.ended(2, 2, None)  # a failed one says nothing of others
    assert rate.seconds(4) == 4 * 2.0
    rate.began(1)
    rate.ended(1, 1, 12.0)
    assert rate.seconds(1) == pytest.approx(2.0 + RATE_WEIGHT * (12.0 - 2.0))


def test_what_was_dropped_is_not_loaded_while_it_may_be_there_still() -> None:
    saver: Any = SimpleNamespace(
        told=None, when="write_through", tier=SimpleNamespace(engine=SimpleNamespace(name="x"))
    )
    below, keys = Below(saver), frozenset({b"a", b"b", b"c"})
    below.storing = {b"a"}
    below.forget([b"a", b"b"])
    below.forget([b"b"])  # by another thread
    assert below.not_forgotten(keys) == {b"c"}
    below.deleted([b"a", b"b"])
    assert below.not_forgotten(keys) == {b"c"}  # "a" is on its way down, the other call goes on
    below.deleted([b"b"])
    assert below.not_forgotten(keys) == {b"b", b"c"}
    below.forgotten.discard(b"a")
    assert below.not_forgotten(keys) == keys
    call = Clearing()
    below.forget_all(call)
    assert below.not_forgotten(keys) == frozenset()
    below.cleared(call)
    assert below.not_forgotten(keys) == {b"b", b"c"}
