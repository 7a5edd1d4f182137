"""What the checker remembers of a location: everything that a later access could still race with."""

from __future__ import annotations

import pytest

from paddle_kv.testing.simulator import Location, Log, check

BLOCK = Location("device", 3, 1)


def pairs(log: Log) -> list[tuple[str, str]]:
    found = check(log.entries)
    return [(finding.first.label, finding.second.label) for finding in found if finding.first is not None]


def ordered_write(log: Log, behind: str) -> None:
    log.record(behind, 1)
    log.wait("w", 1)
    log.work("w", "write", writes=[BLOCK])


@pytest.mark.parametrize("behind", ["a", "b", "c"])
def test_each_reader_counts_whichever_was_the_last(behind: str) -> None:
    log = Log()
    for stream in "abc":
        log.work(stream, stream, reads=[BLOCK])
    ordered_write(log, behind)
    assert pairs(log) == [(reader, "write") for reader in "abc" if reader != behind]


def test_of_one_stream_the_last_reader_counts() -> None:
    log = Log()
    log.work("a", "early", reads=[BLOCK])
    log.record("a", 1)
    log.work("a", "late", reads=[BLOCK])
    log.wait("w", 1)
    log.work("w", "write", writes=[BLOCK])
    assert pairs(log) == [("late", "write")]


@pytest.mark.parametrize(("first", "second"), [("reads", "writes"), ("writes", "writes")])
def test_a_write_forgets_nobody_that_it_races_with(first: str, second: str) -> None:
    log = Log()
    log.work("a", "first", **{first: [BLOCK]})
    log.work("b", "second", **{second: [BLOCK]})
    ordered_write(log, "b")
    assert pairs(log) == [("first", "second"), ("first", "write")]


def test_an_unordered_writer_and_what_follows_it_are_both_known() -> None:
    log = Log()
    log.work("a", "first", writes=[BLOCK])
    log.work("b", "second", writes=[BLOCK])
    log.work("c", "reads", reads=[BLOCK])
    assert pairs(log) == [("first", "second"), ("first", "reads"), ("second", "reads")]
