"""The log of what came and went, and the mirror that is rebuilt from it."""

from __future__ import annotations

from paddle_kv.offload import Event, Mirror, Snapshot
from paddle_kv.offload.events import EventLog

A, B, C = b"a", b"b", b"c"


def test_a_log_of_no_events_counts_none() -> None:
    log = EventLog(0)
    log.add("stored", "host", [A])
    assert (log.number, log.take()) == (0, [])


def test_a_log_of_one_event_keeps_the_last() -> None:
    log = EventLog(1)
    log.add("stored", "host", [A])
    log.add("removed", "host", iter([A, B]))
    log.add("removed", "host", [])
    assert log.take() == [Event(2, "removed", "host", (A, B))]
    log.add("cleared", "host")
    assert log.take() == [Event(3, "cleared", "host")] and log.take() == []


def test_a_mirror_stops_at_the_first_gap() -> None:
    mirror = Mirror()
    first, second = Event(1, "stored", "host", (A, B)), Event(2, "removed", "host", (A,))
    assert mirror.apply([first, second]) is True
    assert mirror.apply([first, second]) is True, "both are known"
    assert mirror.apply([Event(4, "stored", "host", (C,)), Event(3, "stored", "host", (C,))]) is False
    assert (mirror.number, mirror.tiers) == (2, {"host": {B}})


def test_a_mirror_goes_on_behind_a_snapshot() -> None:
    mirror = Mirror()
    mirror.apply([Event(1, "stored", "host", (C,))])
    mirror.restore(Snapshot(7, {"disk": (A,)}))
    assert mirror.tiers == {"host": set(), "disk": {A}}
    assert mirror.apply([Event(7, "cleared", "disk"), Event(8, "stored", "disk", (B,))]) is True
    assert [mirror.longest_prefix([A, B, C], tier) for tier in ("disk", "host", "nowhere")] == [2, 0, 0]
    assert mirror.apply([Event(9, "cleared", "disk")]) and mirror.tiers["disk"] == set()
