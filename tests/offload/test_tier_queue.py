"""The order of what waits for a tier, and how much of it is under way, by itself."""

from __future__ import annotations

import os
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.offload import prefetch as module
from paddle_kv.offload.fetching import TierFetching
from paddle_kv.offload.hints import Expectation
from paddle_kv.offload.prefetch import Prefetch
from paddle_kv.offload.tier_queue import PARTS, TierQueue, blocks_of_part
from paddle_kv.tracking.keeper import Deadline

KEYS = [b"%d" % number for number in range(40)]
BOOKS: Any = SimpleNamespace(group=SimpleNamespace(notify=lambda: None))


class Job:
    """What the tier was given."""

    def __init__(self, num_blocks: int) -> None:
        self.keys, self.cancelled = KEYS[:num_blocks], False
        self.done, self.started_s = False, 0.0

    def cancel(self) -> None:
        self.cancelled = True


def part(num_blocks: int, number: int = 0, *, urgent: bool = False) -> Any:
    return SimpleNamespace(reading=Job(num_blocks), job=SimpleNamespace(id=number), urgent=urgent, awaited=urgent)


def waiting(count: int = 40, **options: Any) -> Prefetch:
    return Prefetch(BOOKS, waiting=KEYS[:count], **options)


@pytest.mark.parametrize(
    ("block_s", "blocks"),
    [(None, 2), (1.0, 1), (0.0051, 1), (0.0049, 2), (0.001, 5), (1e-4, 50), (1e-9, 256)],
)
def test_a_part_is_what_the_tier_needs_some_milliseconds_for(block_s: float | None, blocks: int) -> None:
    assert blocks_of_part(block_s) == blocks


def test_what_is_due_first_comes_first_and_of_equals_the_first_one() -> None:
    queue = TierQueue()
    made = [waiting() for _ in range(4)]
    for one, due_s in zip(made, (3.0, 1.0, 1.0, 2.0), strict=True):
        queue.add(one, due_s)
    queue.add(waiting(0), 0.0)  # nothing of it lies in the tier
    order = []
    while (turn := queue.next(0.001)) is not None:
        assert turn[1] == KEYS[:5]
        order.append(made.index(turn[0]))
        turn[0].waiting = []
    assert order == [1, 2, 3, 0]


def test_of_what_is_expected_the_last_blocks_come_first() -> None:
    queue, one = TierQueue(), waiting(12, expectation=Expectation(KEYS[:12], 0.0, 0))
    queue.add(one, 0.0)
    order = []
    while (turn := queue.next(0.001)) is not None:
        order.append(turn[1])
        one.waiting = one.left_behind(turn[1])
    assert order == [KEYS[7:12], KEYS[2:7], KEYS[:2]]


def test_what_is_expected_waits_for_room_and_holds_up_nothing_else() -> None:
    """Whether it was given up for want of room or not; not what has come, or was given up for another reason."""
    queue, expectations = TierQueue(), [Expectation(KEYS, 0.0, 0) for _ in range(4)]
    expectations[1].over = expectations[1].released = expectations[2].over = True
    made = [waiting(expectation=one) for one in expectations[:3]]
    later, sooner = waiting(), waiting()
    for one, due_s in [*((one, 1.0) for one in made[:2]), (made[2], 4.0), (later, 3.0), (sooner, 2.0)]:
        queue.add(one, due_s)
    queue.is_full = True
    order = []
    while (turn := queue.next(None)) is not None:
        order.append(turn[0])
        turn[0].waiting = []
    assert order == [sooner, later, made[2]]
    queue.is_full = False
    assert queue.next(None) == (made[0], KEYS[-2:])
    made[0].cancel()
    assert queue.next(None) == (made[1], KEYS[-2:])


def test_so_many_parts_are_under_way() -> None:
    queue, one = TierQueue(), waiting()
    queue.add(one, 0.0)
    parts = [part(5, number) for number in range(PARTS)]
    for made in parts:
        assert queue.next(0.001) == (one, KEYS[:5])
        queue.began(made.reading, made)
    assert (queue.next(0.001), queue.num_blocks) == (None, 5 * PARTS)
    assert queue.next(0.0005) == (one, KEYS[:10])  # where more may be under way
    queue.ended(parts[2].reading)
    queue.ended(parts[2].reading)
    assert queue.next(0.001) == (one, KEYS[:5])


def served(queue: TierQueue, monkeypatch: pytest.MonkeyPatch, took_s: float, **what: Any) -> int:
    """A part of five blocks was under way so long. Returns how many parts may be under way then."""
    made = part(5, 99)
    made.reading.done, made.reading.started_s = True, 100.0
    vars(made).update({name: value for name, value in what.items() if name == "urgent"})
    vars(made.reading).update({name: value for name, value in what.items() if name != "urgent"})
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + took_s)
    queue.began(made.reading, made)
    queue.ended(made.reading)
    parts: list[Any] = []
    while queue.next(0.001) is not None:
        parts.append(part(5, len(parts)))
        queue.began(parts[-1].reading, parts[-1])
    for made in parts:
        queue.ended(made.reading)
    return len(parts)


def test_more_is_under_way_as_long_as_none_takes_longer_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TierQueue()
    queue.add(waiting(), 0.0)
    assert served(queue, monkeypatch, 1.0, done=False) == PARTS  # it says nothing
    assert served(queue, monkeypatch, 1.0, started_s=0.0) == PARTS
    assert served(queue, monkeypatch, 1.0, urgent=True) == PARTS
    assert [served(queue, monkeypatch, seconds) for seconds in (1.0, 1.4, 0.9)] == [PARTS + more for more in (1, 2, 3)]
    for _ in range(100):
        most = served(queue, monkeypatch, 1.3)
    assert most == PARTS + 51  # 256 blocks
    times_s = [1.36] + [2.0] * 5  # behind others: the shortest time was 0.9, and is believed a bit less each time
    halves = [served(queue, monkeypatch, seconds) for seconds in times_s]
    assert halves == [31, 18, 12, 9, 7, PARTS]  # 128 blocks more, 64, 32, 16, 8, 4
    assert served(queue, monkeypatch, 0.5) == PARTS + 1
    assert served(queue, monkeypatch, 0.8) == PARTS


@pytest.mark.parametrize("kind", ["part", "load"])
def test_what_is_urgent_holds_up_what_waits(kind: str) -> None:
    queue, one, urgent = TierQueue(), waiting(), part(1, urgent=True)
    queue.add(one, 0.0)
    queue.began(urgent.reading, urgent if kind == "part" else None)
    assert queue.next(None) is None
    queue.ended(urgent.reading)
    assert queue.next(None) == (one, KEYS[:2])


def test_what_comes_before_is_counted() -> None:
    queue = TierQueue()
    first, second, third = (part(count, count) for count in (3, 4, 5))
    queue.began(first.reading, first)
    queue.began(Job(7))  # type: ignore[arg-type]
    queue.began(second.reading, second)
    queue.began(third.reading, third)
    assert [queue.blocks_until(some) for some in ([], [first], [second], [first, third])] == [0, 3, 14, 19]
    queue.ended(first.reading)
    assert queue.blocks_until([second]) == 11


def test_what_a_request_may_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, made = TierQueue(), part(3, 7)
    queue.began(made.reading, made)
    assert (queue.bringing(7), queue.bringing(8)) == (made, None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # in a child it never ends
        assert queue.bringing(7) is None
    made.reading.cancel()
    assert queue.bringing(7) is None
    made.reading.cancelled = False
    queue.ended(made.reading)
    assert queue.bringing(7) is None


def test_the_end_drops_what_waits_and_lets_loads_go_on() -> None:
    """What a request waits for is no exception: it is computed."""
    queue, load = TierQueue(), Job(2)
    made, parts = [waiting() for _ in range(3)], [part(3, 0), part(3, 1), part(3, 2, urgent=True), part(3, 3)]
    for one in made:
        queue.add(one, 0.0)
    queue.began(load)  # type: ignore[arg-type]
    for some in parts:
        queue.began(some.reading, some)
    queue.end()
    assert [one.cancelled for one in made] == [True] * 3
    assert [some.reading.cancelled for some in parts] == [True] * 4
    assert (queue.next(None), load.cancelled) == (None, False)


def test_what_is_behind_a_block_that_was_dropped_is_of_no_use() -> None:
    queue = TierQueue()
    made = [waiting(20), waiting(4)]
    for one in made:
        queue.add(one, 0.0)
    queue.forget({KEYS[5], KEYS[7], b"other"})
    assert [len(one.waiting) for one in made] == [5, 4]
    queue.forget_all()
    assert [one.done for one in made] == [True, True]


def test_what_waits_is_cut_wherever_in_its_prompt_the_block_stood() -> None:
    queue = TierQueue()
    made = [waiting(4), Prefetch(BOOKS, waiting=KEYS[4:8], prefix=KEYS[:8])]
    for one in made:
        queue.add(one, 0.0)
    queue.forget({KEYS[6]})  # the first one lacks it
    assert [one.waiting for one in made] == [KEYS[:4], KEYS[4:6]]
    queue.forget({KEYS[0]})  # the second one does not wait for it
    assert [one.waiting for one in made] == [[], []]


def test_who_forgets_blocks_hears_whether_anything_has_waited_behind_them() -> None:
    queue = TierQueue()
    first, second = waiting(4, prefix=KEYS[:4]), waiting(4, prefix=KEYS[:8])
    queue.add(first, 0.0)
    queue.add(second, 0.0)
    assert not queue.forget({KEYS[30]})
    assert not queue.forget({KEYS[6]})  # nothing of the second one waits behind it any more
    assert [one.waiting for one in (first, second)] == [KEYS[:4]] * 2
    second.waiting, left = KEYS[:2], first.waiting
    assert queue.forget({KEYS[2]})  # of the first one alone, though the second one has it too
    assert [one.waiting for one in (first, second)] == [KEYS[:2]] * 2
    assert left == KEYS[:4]  # who reads it meanwhile sees it as it was


def test_who_waits_for_what_was_forgotten_still_waits_for_what_is_on_its_way() -> None:
    """Other than who has cancelled it."""
    queue, one, other = TierQueue(), waiting(), part(3)
    other.known = False
    one.beside = [other]
    queue.add(one, 0.0)
    queue.forget_all()
    assert (one.waits, one.done) == (False, False)
    other.known = True
    assert one.done


@pytest.mark.parametrize("ahead", [False, True])
def test_a_part_is_given_up_when_nobody_needs_it_unless_it_was_read_ahead(ahead: bool) -> None:
    made: Any = TierFetching.__new__(TierFetching)
    made._is_ahead, made.reading, made.num_blocks = ahead, Job(3), 3
    looks: list[None] = []
    made._books = SimpleNamespace(look_at_turns=lambda: looks.append(None))
    made.urgent = True
    users = [Prefetch(BOOKS, [made]) for _ in range(2)]
    made.users = weakref.WeakSet(users)
    for user in users:
        assert not made.reading.cancelled
        assert made.awaited
        user.cancel()
    assert made.reading.cancelled == (not ahead)
    assert (made.awaited, looks) == (False, [None])  # it may be late for long: others' turn comes
    made.leave(waiting())  # it was read ahead for
    assert looks == [None]


def test_a_prefetch_ends_with_its_time_and_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not waiting().done
    assert waiting(deadline=Deadline(0.0)).done
    one = waiting(timeout_s=3.0, deadline=Deadline(100.0))
    assert one.waits and 99.0 < one.left_s <= 100.0
    assert waiting(timeout_s=3.0).left_s == 3.0
    assert (waiting().left_s, waiting().blocks_until) == (0.0, 0)
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    assert one.done


@pytest.mark.parametrize(
    ("own_s", "timeout_s", "asked"),
    [
        (None, 5.0, [5.0]),
        (9.0, 5.0, [5.0, 5.0]),
        (2.0, 5.0, [2.0, 5.0]),
        (2.0, None, [2.0, None]),
        (None, None, [None]),
    ],
)
def test_who_waits_looks_again_when_the_time_of_what_waits_is_over(
    own_s: float | None, timeout_s: float | None, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[Any] = []
    monkeypatch.setattr(module, "wait_until", lambda books, condition, seconds: times.append(seconds))
    assert waiting(deadline=Deadline(own_s)).wait(timeout_s) is False
    assert [time if time is None else round(time) for time in times] == asked
