"""One simulated device with its log: what a test works with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Hashable, Iterable
from typing import Any

from ...backend.protocol import Backend
from .backend import SimulatedBackend
from .checker import Finding, check
from .chooser import Chooser, LateChooser
from .device import Device, Job, SimulatedStream, Step
from .host import SimulatedHost
from .log import HOST, Location, Log, call_site
from .memory import Cell, PoolMemory, whole
from .mutations import MutatedBackend
from .recorder import RecordingBackend

Block = tuple[Any, int, int]  # pool, slot, layer


class OrderingError(AssertionError):
    """The run shows that something is not ordered, not kept alive or not given back."""


class Computation:
    """Work on a compute stream. ``seen`` fills when it runs."""

    def __init__(self, version: Hashable) -> None:
        self.version = version
        self.seen: dict[Location, list[Hashable]] = {}

    def saw(self, location: Location) -> Hashable:
        """The version that it read; poison if it read a mixture."""
        return whole(self.seen[location])


class Simulation:
    """A device on which schedulers run, late by default, or as the chooser says.

    Args:
        chooser: decides what runs next.
        drop: names from :data:`~paddle_kv.testing.simulator.mutations.REMOVALS`: what the backend leaves out.
        pieces: into how many pieces a block of a tensor is torn.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.testing.simulator import Simulation
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> cache, pool = DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)
        >>> simulation = Simulation()
        >>> scheduler = LayerwiseScheduler(cache, pool, backend=simulation.backend())
        >>> _ = simulation.compute(writes=[(cache, 2, layer) for layer in range(2)], version="prompt")
        >>> save = scheduler.offload([2], [0])
        >>> _ = simulation.compute(writes=[(cache, 2, 0)])  # too early: save is not over
        >>> scheduler.close()
        >>> [finding.kind for finding in simulation.findings()]
        ['write after read']
    """

    def __init__(self, chooser: Chooser | None = None, *, drop: Collection[str] = (), pieces: int = 2) -> None:
        self.log = Log()
        self.device = Device(chooser or LateChooser(), pieces)
        self.host = SimulatedHost(self.device)
        self.compute_stream = self.stream("compute")
        self._drop = frozenset(drop)
        self._versions = itertools.count(1)
        self._backends: list[SimulatedBackend] = []
        self._mutated: list[MutatedBackend] = []
        self._directions: dict[Any, str] = {}

    def backend(self) -> Backend:
        """A backend for one more scheduler on this device."""
        simulated = SimulatedBackend(self.device, self.host, self.log, self.compute_stream)
        self._backends.append(simulated)
        recording: Backend = RecordingBackend(simulated, self.log)
        if not self._drop:
            return recording
        self._mutated.append(MutatedBackend(recording, self._drop, self._directions))
        return self._mutated[-1]

    def restore(self) -> None:
        """From now on the backends leave nothing out, and no replay waits at its gates."""
        for mutated in self._mutated:
            mutated.restore()
        for backend in self._backends:
            for gates in backend.gates:
                gates.open_all()

    def give_up(self, *, turn: int, layer: int) -> None:
        """The time of a gate is over: of this layer, in the replay that was armed as that many."""
        for backend in self._backends:
            for gates in backend.gates:
                gates.give_up(turn, layer)

    def stream(self, name: str) -> SimulatedStream:
        """One more compute stream."""
        return self.device.add_stream(name)

    # ---- what the user does beside the scheduler ----
    def compute(
        self,
        *,
        reads: Iterable[Block] = (),
        writes: Iterable[Block] = (),
        stream: SimulatedStream | None = None,
        version: Hashable = None,
        label: str = "compute",
    ) -> Computation:
        """Work on a compute stream that reads blocks, then writes ``version`` to blocks."""
        stream = stream or self.compute_stream
        done = Computation(version if version is not None else f"v{next(self._versions)}")
        read, written = self._locations(reads), self._locations(writes)
        self.log.work(stream.name, label, read, written)
        self.device.steps(stream, self._steps_of(done, Job(label, call_site()), read, written))
        return done

    def touch_on_host(
        self,
        *,
        reads: Iterable[Block] = (),
        writes: Iterable[Block] = (),
        version: Hashable = None,
        label: str = "host",
    ) -> Computation:
        """The host thread reads and writes blocks itself, at once."""
        done = Computation(version if version is not None else f"v{next(self._versions)}")
        read, written = self._locations(reads), self._locations(writes)
        steps = self._steps_of(done, Job(label, call_site()), read, written)
        self.device.pause([cell for step in steps for cell in step.reads], [c for step in steps for c in step.writes])
        self.log.work(HOST, label, read, written)
        for step in steps:
            step.run()
        return done

    def order(self, before: SimulatedStream, after: SimulatedStream) -> None:
        """What ``after`` gets from now on runs behind what ``before`` has."""
        number = self.log.next_mark()
        self.log.record(before.name, number)
        self.log.wait(after.name, number)
        self.device.wait(after, self.device.record(before))

    # ---- what came of it ----
    def location(self, pool: Any, slot: int, layer: int) -> Location:
        return self.log.location(pool, slot, layer)

    def contents(self, pool: Any, slot: int, layer: int) -> Hashable:
        """The version that a block of a layer holds now; poison if half written."""
        cells = self._cells(self._locations([(pool, slot, layer)])[0])
        return whole(version for cell in cells for version in self.device.memory.versions(cell))

    def run(self) -> None:
        """Lets the device finish all that it has."""
        self.device.drain(self.device.streams)

    def held(self) -> dict[str, int]:
        """What schedulers took and did not give back."""
        total: dict[str, int] = {}
        for backend in self._backends:
            for name, count in backend.held.items():
                total[name] = total.get(name, 0) + count
        return total

    def findings(self) -> list[Finding]:
        """What the happens-before checker says about all that was submitted so far."""
        return check(self.log.entries)

    def verify(self, *, closed: bool = True) -> None:
        """Finishes, and raises OrderingError if anything was wrong.

        ``closed``: all schedulers are closed, so they must hold nothing.
        """
        self.run()
        problems = [str(finding) for finding in self.findings()] + self.device.problems
        if closed and any(self.held().values()):
            problems.append(f"not given back after close: {self.held()}")
        if problems:
            raise OrderingError("\n".join([f"{len(problems)} problems", *problems[:5]]))

    # ---- helpers ----
    def _locations(self, blocks: Iterable[Block]) -> list[Location]:
        locations = []
        for pool, slot, layer in blocks:
            location = self.log.location(pool, slot, layer)
            if not self.device.memory.knows(location.pool):
                self.device.memory.add(PoolMemory(location.pool, pool))
            locations.append(location)
        return locations

    def _cells(self, location: Location) -> list[Cell]:
        return self.device.memory.cells(location.pool, location.slot, location.layer)

    def _steps_of(
        self, done: Computation, job: Job, reads: Iterable[Location], writes: Iterable[Location]
    ) -> list[Step]:
        memory = self.device.memory
        sources = [(location, tuple(self._cells(location))) for location in reads]
        targets = tuple(cell for location in writes for cell in self._cells(location))

        def read(piece: int) -> None:
            for location, cells in sources:
                done.seen.setdefault(location, []).extend(memory.versions(cell)[piece] for cell in cells)

        def write(piece: int) -> None:
            for cell in targets:
                memory.write_piece(cell, piece, done.version)

        flat = tuple(cell for _, cells in sources for cell in cells)
        pieces = range(memory.pieces)
        reading = [Step(job, functools.partial(read, piece), reads=flat) for piece in pieces if flat]
        return reading + [Step(job, functools.partial(write, piece), writes=targets) for piece in pieces if targets]
