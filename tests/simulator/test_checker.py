"""The checker on hand-written logs: which edges count, and which do not."""

from __future__ import annotations

import pytest

from paddle_kv.testing.simulator import HOST, Location, Log, check

BLOCK = Location("device", 3, 1)
OTHER = Location("device", 3, 2)


def kinds(log: Log) -> list[str]:
    return [finding.kind for finding in check(log.entries)]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("reads", "reads", []),
        ("reads", "writes", ["write after read"]),
        ("writes", "reads", ["read after write"]),
        ("writes", "writes", ["write after write"]),
    ],
)
def test_two_streams_without_an_edge(first: str, second: str, expected: list[str]) -> None:
    log = Log()
    log.work("a", "one", **{first: [BLOCK]})
    log.work("b", "two", **{second: [BLOCK]})
    assert kinds(log) == expected


def test_different_layers_do_not_conflict() -> None:
    log = Log()
    log.work("a", "one", writes=[BLOCK])
    log.work("b", "two", writes=[OTHER])
    assert kinds(log) == []


def test_one_stream_is_in_order() -> None:
    log = Log()
    log.work("a", "one", writes=[BLOCK])
    log.work("a", "two", writes=[BLOCK])
    assert kinds(log) == []


def test_edge_covers_what_is_before_the_record_and_behind_the_wait() -> None:
    log = Log()
    log.work("a", "before", writes=[BLOCK])
    log.record("a", 1)
    log.work("a", "late", writes=[OTHER])
    log.wait("b", 1)
    log.work("b", "reads both", reads=[BLOCK, OTHER])
    [finding] = check(log.entries)
    assert finding.location == OTHER and finding.first is not None and finding.first.label == "late"


def test_wait_that_comes_too_late_does_not_order() -> None:
    log = Log()
    log.work("a", "one", writes=[BLOCK])
    log.record("a", 1)
    log.work("b", "two", reads=[BLOCK])
    log.wait("b", 1)
    assert kinds(log) == ["read after write"]


def test_edges_are_transitive() -> None:
    log = Log()
    log.work("a", "one", writes=[BLOCK])
    log.record("a", 1)
    log.wait("b", 1)
    log.record("b", 2)
    log.wait("c", 2)
    log.work("c", "two", writes=[BLOCK])
    assert kinds(log) == []


def test_host_orders_what_it_has_seen_before_what_it_submits() -> None:
    log = Log()
    log.work("a", "one", writes=[BLOCK])
    log.record("a", 1)
    log.observe(1)
    log.work("b", "two", writes=[BLOCK])
    assert kinds(log) == []


def test_device_work_is_not_over_for_the_host_that_submitted_it() -> None:
    log = Log()
    log.work("a", "copy", reads=[BLOCK])
    log.record("a", 1)
    log.work(HOST, "free", writes=[BLOCK])
    assert kinds(log) == ["write after read"]


def test_host_access_comes_before_later_submissions() -> None:
    log = Log()
    log.work(HOST, "fill", writes=[BLOCK])
    log.work("a", "copy", reads=[BLOCK])
    assert kinds(log) == []


def test_reader_of_an_earlier_version_is_remembered() -> None:
    log = Log()
    log.work("a", "reads", reads=[BLOCK])
    log.work("b", "reads", reads=[BLOCK])
    log.record("a", 1)
    log.wait("c", 1)
    log.work("c", "writes", writes=[BLOCK])
    [finding] = check(log.entries)
    assert finding.kind == "write after read" and finding.first is not None and finding.first.stream == "b"


def test_one_finding_for_a_pair_and_its_text_names_both_sites() -> None:
    log = Log()
    log.work("a", "save", reads=[BLOCK, OTHER])
    log.work("b", "compute", writes=[BLOCK, OTHER])
    [finding] = check(log.entries)
    text = str(finding)
    assert "save" in text and "compute" in text and text.count("test_checker.py:") == 2


def test_forbidden_calls_are_findings() -> None:
    log = Log()
    log.misuse("a", "stream wait for an event that is not recorded")
    [finding] = check(log.entries)
    assert finding.kind == "forbidden call" and "not recorded" in str(finding)
