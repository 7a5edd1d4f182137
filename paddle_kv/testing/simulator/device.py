"""A device that runs nothing until it is told what: streams are queues of steps, events are marks between them.

The host program (the scheduler and its user) runs until it looks at the device: asks whether an event was passed, waits
for one, touches memory. There a chooser decides, step by step, which stream goes on, or that the host does. Markers
(waits and records at the head of a queue) cost nothing: they are passed as soon as they can be.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...backend.protocol import Later
from ...tracking.keeper import Waiter
from .chooser import Chooser, Transition
from .memory import Cell, Memory
from .threads import HostThread, HostThreads

PATIENCE = 4  # so often the host may ask for an event in a row and hear no: somebody who polls would poll for ever


class Deadlock(BaseException):
    """The host waits for what can never happen. Not an Exception: the code under test must not swallow it."""


@dataclass(eq=False)
class Mark:
    """One recording of an event."""

    number: int
    passed: bool = False
    error: Exception | None = None
    time: int = 0


@dataclass(eq=False)
class Job:
    """What fails together: one submission."""

    label: str
    site: str
    error: Exception | None = None
    number: int = 0  # of the transfer


@dataclass(eq=False)
class Step:
    """What happens at once."""

    job: Job
    run: Callable[[], None]
    reads: tuple[Cell, ...] = ()
    writes: tuple[Cell, ...] = ()


@dataclass(eq=False)
class _Wait:
    mark: Mark


@dataclass(eq=False)
class _Record:
    mark: Mark
    job: Job | None
    dropped: bool = False


@dataclass(eq=False)
class SimulatedStream:
    """A queue. ``capturing`` as while a CUDA graph is captured; ``held`` streams do not run."""

    name: str
    number: int
    items: list[Step | _Wait | _Record] = field(default_factory=list)
    position: int = 0
    capturing: bool = False
    held: bool = False
    given_back: bool = False

    @property
    def idle(self) -> bool:
        return self.position == len(self.items)


@dataclass(eq=False)
class Watched:
    """Marks that somebody wants to hear of."""

    marks: list[Mark]
    report: Callable[[], Later | None] | None  # None once somebody was told: it keeps what the marks need
    hearer: Waiter | None = None  # of who waits for it himself

    def tell(self) -> None:
        report, self.report = self.report, None
        later = None if report is None else report()
        if later is not None:
            later.soon()


class Device:
    """The queues, and what runs them."""

    def __init__(self, chooser: Chooser, pieces: int) -> None:
        self.chooser = chooser
        self.memory = Memory(pieces)
        self.streams: list[SimulatedStream] = []
        self.problems: list[str] = []  # what went wrong while running, beside what the checker finds
        self.history: list[str] = []  # steps in the order in which they ran
        self.num_broken = 0  # copy steps and submissions that were made to break
        self._until_copy_breaks = 0
        self._until_submission_breaks = 0
        self._time = 0
        self._num_marks = 0
        self._num_looks = 0
        self._polls: dict[Mark | None, int] = {}
        self._watched: list[Watched] = []
        self.threads: HostThreads | None = None  # of the host, while there are several
        self._is_undivided = False
        self.takes_marks = True  # its backends submit layerwise saves as they are marked; else sections do

    # ---- what is submitted ----
    def add_stream(self, name: str) -> SimulatedStream:
        stream = SimulatedStream(name, len(self.streams))
        self.streams.append(stream)
        return stream

    def new_mark(self) -> Mark:
        """One that is still to be recorded."""
        self._num_marks += 1
        return Mark(self._num_marks)

    def record(self, stream: SimulatedStream, job: Job | None = None, mark: Mark | None = None) -> Mark:
        mark = mark or self.new_mark()
        self._submit(stream, _Record(mark, job))
        return mark

    def wait(self, stream: SimulatedStream, mark: Mark) -> None:
        self._submit(stream, _Wait(mark))

    def steps(self, stream: SimulatedStream, steps: Iterable[Step]) -> None:
        self._submit(stream, *steps)

    def _submit(self, stream: SimulatedStream, *items: Step | _Wait | _Record) -> None:
        stream.items.extend(items)
        self._polls.clear()
        self._settle()

    # ---- what the host sees ----
    def look(self, mark: Mark, timeout_s: float | None) -> bool:
        """Lets the device run, and says whether the mark was passed.

        Time stands still here: without a time-out the host waits, with one it leaves only where nothing can run any
        more, and with one of 0 whenever the chooser says so.
        """
        host = self._host([("mark", mark.number)])
        while not mark.passed:
            polls = self._polls.get(mark, 0)
            hurried = timeout_s is not None and timeout_s <= 0 and polls < PATIENCE
            leave = hurried or (timeout_s is not None and not self._can_run())
            ready = functools.partial(getattr, mark, "passed")
            if not self._go_on(host if leave else None, f"event {mark.number} is never passed", ready, timeout_s):
                self._polls[mark] = polls + 1
                return False
        return True

    def run_until(self, over: Callable[[], bool], timeout_s: float | None) -> bool:
        """As :meth:`look`, for a condition of the host."""
        key = self._host().key
        while not over():
            polls = self._polls.get(None, 0)
            hurried = timeout_s is not None and timeout_s <= 0 and polls < PATIENCE
            leave = hurried or (timeout_s is not None and not self._can_run())
            marks = [item.mark for stream in self.streams for item in stream.items if isinstance(item, _Record)]
            host = Transition(key, frozenset(("mark", mark.number) for mark in marks if not mark.passed), frozenset())
            if not self._go_on(host if leave else None, "what the host waits for never comes", over, timeout_s):
                self._polls[None] = polls + 1
                return False
        return True

    def watch(self, marks: list[Mark], report: Callable[[], Later | None]) -> Watched:
        """Reports when all of them were passed."""
        watched = Watched(marks, report)
        self._watched.append(watched)
        self._report()
        return watched

    def hear(
        self,
        watched: Watched,
        wait: Callable[[Waiter], object],
        told: Callable[[], object],
        report: Callable[[], Later | None],
    ) -> None:
        """Waits for that report, and calls ``told`` in its place; ``report`` if that raises."""
        if watched not in self._watched or watched.hearer is not None:
            return
        waiter = watched.hearer = Waiter()
        try:
            wait(waiter)
            if watched not in self._watched:
                watched.report = report
                told()
                watched.report = None
        finally:
            watched.hearer = None
            if watched not in self._watched:
                watched.tell()

    def _report(self) -> None:
        passed = [watched for watched in self._watched if all(mark.passed for mark in watched.marks)]
        self._watched = [watched for watched in self._watched if watched not in passed]
        for watched in passed:
            if watched.hearer is None:
                watched.tell()
            else:
                watched.hearer.release()

    def cancel(self, stream: SimulatedStream, number: int) -> Mark | None:
        """Drops the copies of a transfer that have not begun; the mark behind the first of them."""
        first: Mark | None = None
        begins = 0  # of the group
        kept: list[Step | _Wait | _Record] = []
        for position, item in enumerate(stream.items):
            if isinstance(item, _Record) and item.job is not None and item.job.number == number:
                own = [step for step in kept[begins:] if isinstance(step, Step) and step.job.number == number]
                if own and begins >= stream.position and position >= stream.position:
                    kept[begins:] = [step for step in kept[begins:] if step not in own]
                    item.dropped, first = True, first or item.mark
            kept.append(item)
            if isinstance(item, (_Record, _Wait)):
                begins = len(kept)
        stream.items[:] = kept
        self._settle()
        return first

    def drain(self, streams: Iterable[SimulatedStream]) -> None:
        """Runs until the streams are empty."""
        for stream in streams:
            while not stream.idle:
                self._go_on(None, f"stream {stream.name} never ends")

    def pause(self, reads: Iterable[Cell], writes: Iterable[Cell]) -> None:
        """The host is about to touch memory: others may come first."""
        host = self._host(reads, writes)
        while self._can_run() and self._go_on(host, ""):
            continue

    @contextlib.contextmanager
    def undivided(self) -> Iterator[None]:
        """What stands in it is one step of the host."""
        before, self._is_undivided = self._is_undivided, True
        try:
            yield
        finally:
            self._is_undivided = before

    def switch_point(self) -> None:
        """Another thread of the host may come first."""
        if self.threads is None or self._is_undivided:
            return
        others = self.threads.others(must=False)
        if others:
            options = [other.transition for other in others] + [self._host()]
            chosen = options.index(self.chooser.choose(options))
            if chosen < len(others):
                self.threads.switch(others[chosen], must=False)

    def _host(self, reads: Iterable[Any] = (), writes: Iterable[Any] = ()) -> Transition:
        """The thread that runs goes on."""
        self._num_looks += 1
        key = ("host", self._num_looks) if self.threads is None else self.threads.current.transition.key
        return Transition(key, frozenset(reads), frozenset(writes))

    @property
    def current_stream(self) -> SimulatedStream | None:
        """Of the thread that runs."""
        return None if self.threads is None else self.threads.current.stream

    @property
    def time(self) -> int:
        return self._time

    # ---- running ----
    def _can_run(self) -> bool:
        return any(map(self._runnable, self.streams)) or bool(self.threads and self.threads.others(must=True))

    def _runnable(self, stream: SimulatedStream) -> bool:
        return not stream.held and not stream.idle and isinstance(stream.items[stream.position], Step)

    def _go_on(
        self,
        host: Transition | None,
        dead: str,
        ready: Callable[[], bool] = lambda: False,
        timeout_s: float | None = None,
    ) -> bool:
        """One step of the device, or of another thread until it comes to a choice; False if the chooser lets the host
        go on instead. ``ready``: what this thread waits for, if it cannot go on."""
        runnable: list[SimulatedStream | HostThread] = [s for s in self.streams if self._runnable(s)]
        if self.threads is not None:
            runnable += self.threads.others(must=host is None)
            if not runnable and host is None:
                runnable += self.threads.late()
        if not runnable and host is None:
            queues = ", ".join(f"{s.name}: {len(s.items) - s.position} left" for s in self.streams if not s.idle)
            raise Deadlock(f"{dead}; nothing can run ({queues})")
        options = [self._transition(one) if isinstance(one, SimulatedStream) else one.transition for one in runnable]
        options += [host] if host else []
        chosen = options.index(self.chooser.choose(options))
        if host and chosen == len(runnable):
            return False
        one = runnable[chosen]
        if isinstance(one, SimulatedStream):
            self._run(one)
        else:
            self._leave(one, host is None, ready, timeout_s)
        return True

    def _leave(self, other: HostThread, must: bool, ready: Callable[[], bool], timeout_s: float | None) -> None:
        assert self.threads is not None
        me = self.threads.current
        me.ready, me.timed = (ready, timeout_s is not None) if must else (lambda: True, False)
        try:
            self.threads.switch(other, must=must)
        finally:
            me.ready, me.timed = (lambda: True), False

    def _transition(self, stream: SimulatedStream) -> Transition:
        key = (stream.number, stream.position)
        if not self.chooser.needs_footprints:
            return Transition(key, frozenset(), frozenset())
        step = stream.items[stream.position]
        assert isinstance(step, Step)
        positions = [s.position for s in self.streams]
        positions[stream.number] += 1
        marks = [("mark", mark.number) for mark in self._cascade(positions)]
        return Transition(key, frozenset(step.reads), frozenset([*step.writes, *marks]))

    def _run(self, stream: SimulatedStream) -> None:
        step = stream.items[stream.position]
        assert isinstance(step, Step)
        self._time += 1
        if step.job.error is None:
            try:
                step.run()
            except Exception as error:  # noqa: BLE001  the device goes on; the events behind it carry the error
                step.job.error = error
        self.history.append(f"{self._time:5}  {stream.name}: {step.job.label}{_accesses(step)}")
        stream.position += 1
        self._polls.clear()
        self._settle()

    def _settle(self) -> None:
        positions = [stream.position for stream in self.streams]
        for mark in self._cascade(positions):
            mark.passed, mark.time = True, self._time
        for stream, position in zip(self.streams, positions, strict=True):
            for item in stream.items[stream.position : position]:
                if isinstance(item, _Record) and item.job is not None:
                    item.mark.error = item.job.error or (
                        RuntimeError("the copy was cancelled") if item.dropped else None
                    )
            stream.position = position
        self._report()

    def _cascade(self, positions: list[int]) -> list[Mark]:
        """Moves the positions over all markers that can be passed; the marks that this passes."""
        passed: dict[Mark, None] = {}
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                position = positions[stream.number]
                while position < len(stream.items) and not stream.held:
                    item = stream.items[position]
                    if isinstance(item, Step):
                        break
                    if isinstance(item, _Record):
                        passed[item.mark] = None
                    elif not item.mark.passed and item.mark not in passed:
                        break
                    position += 1
                moved = moved or position != positions[stream.number]
                positions[stream.number] = position
        return list(passed)

    # ---- work ----
    def copy_steps(self, job: Job, pairs: Iterable[tuple[Cell, Cell]]) -> list[Step]:
        """Steps that copy cells to cells, each in pieces."""
        return [
            Step(job, functools.partial(self._copy, job, source, target, piece), (source,), (target,))
            for source, target in pairs
            for piece in range(self.memory.pieces)
        ]

    def break_copy(self, ahead: int) -> None:
        """The copy step that many steps ahead (1: the next one) breaks while it runs."""
        self._until_copy_breaks = ahead

    def break_submission(self, ahead: int) -> None:
        """The submission that many ahead (1: the next one) breaks half way."""
        self._until_submission_breaks = ahead

    def submission_breaks(self) -> bool:
        """Whether the submission that is about to be made is the one to break."""
        self._until_submission_breaks -= 1
        self.num_broken += self._until_submission_breaks == 0
        return self._until_submission_breaks == 0

    def _copy(self, job: Job, source: Cell, target: Cell, piece: int) -> None:
        self._until_copy_breaks -= 1
        if self._until_copy_breaks == 0:
            self.num_broken += 1
            self.memory.poison(target)
            raise RuntimeError("the simulated copy engine failed")
        if not self.memory.copy_piece(source, target, piece):
            self.problems.append(f"{job.label} touches memory that was given back\n    at {job.site}")


def _accesses(step: Step) -> str:
    if step.job.error is not None:
        return f", broken: {step.job.error}"
    both = (("reads", step.reads), ("writes", step.writes))
    return "".join(f", {verb} {' '.join(map(_show, cells))}" for verb, cells in both if cells)


def _show(cell: Cell) -> str:
    return f"{cell.pool}[{cell.slot}].{cell.layer}.{cell.name}"
