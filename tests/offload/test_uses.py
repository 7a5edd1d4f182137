"""Which blocks have been offered often enough to be saved."""

from __future__ import annotations

from paddle_kv.offload.uses import UseCounts

A, B, C, D = b"a", b"b", b"c", b"d"


def test_the_use_that_makes_it_enough_counts_and_begins_anew() -> None:
    counts = UseCounts(10)
    assert [counts.often([A], 3, ()) for _ in range(6)] == [[], [], [A], [], [], [A]]


def test_what_is_kept_is_always_named_and_never_counted() -> None:
    counts = UseCounts(10)
    assert [counts.often([A, B], 2, {A}) for _ in range(2)] == [[A], [A, B]]
    assert counts.often([A], 2, ()) == []


def test_two_generations_are_remembered() -> None:
    counts = UseCounts(2)
    assert counts.often([A, B], 2, ()) == []  # the younger generation is full
    assert counts.often([C], 2, ()) == []
    assert counts.often([A], 2, ()) == [A], "the older one is still known"
    assert counts.often([A], 2, ()) == [], "but no longer what was enough"
    assert counts.often([D], 2, ()) == []
    assert counts.often([B], 2, ()) == [], "two generations ago"
