from __future__ import annotations

import random

import pytest

from paddle_kv.testing.prefixes.link_queue import LinkQueue, Urgency


def test_the_earliest_need_comes_first_and_urgent_before_bulk() -> None:
    queue: LinkQueue[str] = LinkQueue(1000)
    for what, urgency, needed_s in (
        ("save", Urgency.SAVE, 0.0),
        ("ahead", Urgency.BULK, 1.0),
        ("layer 1", Urgency.URGENT, 3.0),
        ("layer 0", Urgency.URGENT, 2.0),
        ("other 0", Urgency.URGENT, 2.0),
    ):
        assert queue.add(what, 10, urgency, needed_s) == []
    assert len(queue) == 5 and queue.num_bytes == 50
    assert [queue.take() for _ in range(6)] == ["layer 0", "other 0", "layer 1", "ahead", "save", None]
    assert not queue and queue.num_bytes == 0


def test_bulk_becomes_urgent_when_its_turn_comes() -> None:
    queue: LinkQueue[str] = LinkQueue(1000)
    for what, urgency, needed_s in (
        ("save", Urgency.SAVE, 0.0),
        ("of 2", Urgency.BULK, 2.0),
        ("of 1, first", Urgency.BULK, 1.0),
        ("of 1, second", Urgency.BULK, 1.0),
    ):
        queue.add(what, 10, urgency, needed_s)
    queue.hurry(lambda what: what.startswith("of 1"))
    queue.add("of 1, third", 10, Urgency.URGENT, 1.0)
    queue.add("of 0", 10, Urgency.BULK)
    order = ["of 1, first", "of 1, second", "of 1, third", "of 0", "of 2"]
    assert queue.loads() == order
    assert len(queue) == 6 and queue.num_bytes == 60
    assert [queue.take() for _ in range(6)] == [*order, "save"]


def test_saves_are_dropped_for_loads_and_loads_never() -> None:
    queue: LinkQueue[int] = LinkQueue(100)
    assert queue.add(1, 50, Urgency.SAVE) == [] and queue.add(2, 40, Urgency.SAVE) == []
    assert queue.add(3, 20, Urgency.SAVE) == [3]
    assert queue.add(4, 30, Urgency.URGENT) == [2]
    assert queue.add(5, 500, Urgency.BULK) == [1]
    assert queue.add(6, 500, Urgency.BULK) == [] and queue.num_bytes == 1030
    assert [queue.take() for _ in range(4)] == [4, 5, 6, None]


def test_a_load_waits_for_one_piece_of_a_save_at_most() -> None:
    """The link takes a piece when it is free: loads that come at any moment against a queue full of saves."""
    rng = random.Random(3)
    queue: LinkQueue[tuple[str, float]] = LinkQueue(1 << 40)
    for _ in range(1000):
        queue.add(("save", 0.0), 1, Urgency.SAVE)
    for piece in range(500):  # each takes a second
        arrived_s = piece + rng.random()
        queue.add(("load", arrived_s), 1, Urgency.BULK, arrived_s)
        taken = queue.take()  # at the end of the piece under way
        assert taken is not None and taken[0] == "load" and piece + 1 - taken[1] <= 1.0
        if rng.random() < 0.5:
            assert queue.take() == ("save", 0.0)


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="most_bytes = 0 must be"):
        LinkQueue(0)
