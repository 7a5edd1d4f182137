"""The happens-before checker: vector clocks over a log of submissions.

Each stream, and the host, counts its accesses. The clock of a point is, for each of them, the number of accesses that
are certainly over when the point is reached. A submission starts from the clock of the submission before it on its
stream, joined with what the host knows; ``wait`` joins the clock at the recording, ``observe`` joins it to the host's.
An access is ordered behind an earlier one if its clock has reached the earlier one's count. So the verdict is about the
edges alone, not about the order in which things happened to run.

A replay of a graph may wait for what is submitted after its launch: such a wait, and what its stream has behind it, is
looked at when the mark is recorded.

The host is one party: calls from several threads count as ordered by the order of their entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .log import HOST, Entry, Location

Clock = dict[str, int]


@dataclass(frozen=True)
class Finding:
    """Two accesses without an edge (``first``, ``second``, ``location``), or a forbidden call (``second`` alone)."""

    kind: str
    second: Entry
    first: Entry | None = None
    location: Location | None = None

    def __str__(self) -> str:
        if self.first is None:
            return f"{self.kind}: {self.second.label}\n    stream {self.second.stream}, at {self.second.site}"
        lines = [f"{self.kind} without an edge between them: {self.location}"]
        for role, entry in (("first", self.first), ("then", self.second)):
            lines.append(f"    {role:5} {_verb(entry, self.location)} {entry.label} on stream {entry.stream}")
            lines.append(f"          at {entry.site}")
        return "\n".join(lines)


def _verb(entry: Entry, location: Location | None) -> str:
    return "written by" if location in entry.writes else "read by"


@dataclass(frozen=True)
class _Access:
    stream: str
    count: int
    entry: Entry


class _History:
    """The accesses of one location that a later one has to be ordered against."""

    def __init__(self) -> None:
        self.writes: list[_Access] = []
        self.reads: list[_Access] = []


def check(entries: Sequence[Entry]) -> list[Finding]:
    """All pairs of accesses to one location, at least one a write, that no edge orders; and all forbidden calls.

    One finding for a pair of submissions, however many locations they share.
    """
    clocks: dict[str, Clock] = {HOST: {}}
    marks: dict[int, Clock] = {}
    histories: dict[Location, _History] = {}
    findings: list[Finding] = []
    reported: set[tuple[int, int]] = set()
    recorded = {entry.mark for entry in entries if entry.kind == "record"}

    for entry, host_clock in _in_order(entries, recorded, marks, clocks[HOST]):
        if entry.kind == "misuse":
            findings.append(Finding("forbidden call", entry))
            continue
        clock = clocks.setdefault(entry.stream, {})
        if entry.stream != HOST:
            _join(clock, host_clock)
        if entry.kind == "record":
            marks[entry.mark] = dict(clock)
        elif entry.kind in ("wait", "observe"):
            _join(clock, marks.get(entry.mark, {}))
        else:
            clock[entry.stream] = clock.get(entry.stream, 0) + 1
            access = _Access(entry.stream, clock[entry.stream], entry)
            for location, writing in _locations(entry):
                history = histories.setdefault(location, _History())
                for before in history.writes + (history.reads if writing else []):
                    pair = (id(before.entry), id(entry))
                    if clock.get(before.stream, 0) < before.count and pair not in reported:
                        reported.add(pair)
                        findings.append(_race(before.entry, entry, location))
                _remember(history, access, clock, writing)
    return findings


def _in_order(
    entries: Sequence[Entry], recorded: Collection[int], marks: Mapping[int, Clock], host: Clock
) -> Iterator[tuple[Entry, Clock]]:
    """Each entry with the clock that the host had when it was submitted; what stands behind a wait for a mark that is
    recorded later comes behind that. ``marks`` and ``host`` change meanwhile."""
    held: dict[str, deque[tuple[Entry, Clock]]] = {}  # by stream; the first of each is such a wait

    def is_early(entry: Entry) -> bool:
        return entry.kind == "wait" and entry.mark in recorded and entry.mark not in marks

    for entry in entries:
        if entry.stream in held or (entry.stream != HOST and is_early(entry)):
            held.setdefault(entry.stream, deque()).append((entry, dict(host)))
            continue
        yield entry, host
        free = [stream for stream, queue in held.items() if not is_early(queue[0][0])]
        while free:
            queue = held[free[-1]]
            while queue and not is_early(queue[0][0]):
                yield queue.popleft()
            if not queue:
                del held[free[-1]]
            free = [stream for stream, queue in held.items() if not is_early(queue[0][0])]


def _locations(entry: Entry) -> list[tuple[Location, bool]]:
    written = set(entry.writes)
    read = [(location, False) for location in dict.fromkeys(entry.reads) if location not in written]
    return read + [(location, True) for location in dict.fromkeys(entry.writes)]


def _remember(history: _History, access: _Access, clock: Clock, writing: bool) -> None:
    # What is ordered before a write need not be kept: who is ordered behind the write is ordered behind that, too.
    if writing:
        history.writes = [a for a in history.writes if clock.get(a.stream, 0) < a.count] + [access]
        history.reads = [a for a in history.reads if clock.get(a.stream, 0) < a.count]
    else:
        history.reads = [a for a in history.reads if a.stream != access.stream] + [access]


def _race(first: Entry, second: Entry, location: Location) -> Finding:
    words = ["write" if location in entry.writes else "read" for entry in (second, first)]
    return Finding(f"{words[0]} after {words[1]}", second, first, location)


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count
