"""What every fabric has to do. For pytest::

class TestMyFabric(FabricConformance):
    make_fabric = staticmethod(make_my_fabric)  # that can be sent to another process
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...errors import PeerError
from ...peers.fabrics import Fabric, Sink, Write
from ...tracking.keeper import Deadline
from .other_process import POISON, WAIT_S, OtherProcess

NUM_BLOCKS = 2048
NUM_BYTES = NUM_BLOCKS * 1024  # of the keys there
ODD = (1, 3, 4096, 33, 65537, 7, 1024, 2, 511)


class Ended:
    """Hears of writes."""

    def __init__(self) -> None:
        self._told = threading.Semaphore(0)
        self.why: list[str] = []

    def __call__(self, why: str) -> None:
        self.why.append(why)
        self._told.release()

    def wait(self, count: int = 1) -> list[str]:
        for _ in range(count):
            if not self._told.acquire(timeout=WAIT_S):
                raise TimeoutError(f"a write has not ended; {len(self.why)} have")
        return self.why


class FabricConformance:
    """Each ``test_`` method makes what it needs; one process serves all but those that kill it."""

    make_fabric: Callable[[], Fabric]

    @staticmethod
    def start(function: Callable[..., object], *arguments: Any) -> Any:
        """Calls the function in another process, which it returns."""
        process = multiprocessing.get_context("spawn").Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    @contextlib.contextmanager
    def other(self) -> Iterator[OtherProcess]:
        """The process for one test."""
        made = OtherProcess(self.start, type(self).make_fabric, NUM_BLOCKS)
        try:
            yield made
        finally:
            made.kill()

    @contextlib.contextmanager
    def ways(self) -> Iterator[tuple[OtherProcess, Way]]:
        """With a way into it."""
        with self.other() as other, contextlib.closing(Way(type(self).make_fabric(), other)) as way:
            yield other, way

    def test_every_byte_and_none_beside_it(self) -> None:
        with self.ways() as (other, way):
            rng = np.random.default_rng(3)
            for number in range(12):
                sizes = np.array(ODD * 4, np.int64)[rng.permutation(4 * len(ODD))]
                gaps = rng.integers(1, 40, len(sizes))
                targets = np.cumsum(sizes + gaps) - sizes
                sources = rng.permutation(len(sizes)) * 70_000 + number
                way.write(sources, targets, sizes)
                assert way.ended.wait() == [""]
                way.ended = Ended()
                way.check(sources, targets, sizes)  # at once: it was told that they are there
                other.poison()
                way.expected[:] = POISON

    def test_more_pieces_than_an_engine_takes_at_once(self) -> None:
        with self.ways() as (_, way):
            count = 10_000
            targets = np.random.default_rng(1).permutation(count) * 200
            way.write(np.arange(count) * 150, targets, np.full(count, 97))
            assert way.ended.wait() == [""]
            way.check(np.arange(count) * 150, targets, np.full(count, 97))

    def test_writes_that_are_under_way_together_end_once_each(self) -> None:
        with self.ways() as (_, way):
            everything = [(np.arange(4) * 999 + n, np.arange(4) * 64 + n * 4096, np.full(4, 61)) for n in range(60)]
            for moved in everything:
                way.write(*moved)
            assert way.ended.wait(60) == [""] * 60
            for sources, targets, sizes in everything:
                way.note(sources, targets, sizes)
            way.compare()

    def test_what_nobody_wants_is_not_written(self) -> None:
        with self.ways() as (_, way):
            way.write([0], [0], [100], wanted=lambda: False)
            assert way.ended.wait() != [""]
            way.compare()
            way.write([5], [300], [100])  # the sink goes on
            assert way.ended.wait()[1] == ""
            way.check([5], [300], [100])

    def test_a_deadline_that_is_over_writes_nothing_and_breaks_the_sink(self) -> None:
        with self.ways() as (_, way):
            way.write([0], [0], [100], timeout_s=0.0)
            way.write([0], [200], [100])
            assert "" not in way.ended.wait(2)
            way.write([0], [400], [100])
            assert way.ended.wait()[2] != ""
            way.compare()

    def test_memory_that_is_not_registered_is_not_written(self) -> None:
        with self.ways() as (_, way):
            way.write_to([0], [way.beside], [64])
            assert way.ended.wait() != [""]
            way.compare()

    def test_a_process_that_dies_fails_what_is_written_to_it(self) -> None:
        with self.ways() as (other, way):
            way.write([0], [0], [100])
            assert way.ended.wait() == [""]
            other.kill()
            if not way.survives_its_process:
                way.write(np.arange(64) * 9999, np.arange(64) * 9999, np.full(64, 9000))
                assert way.ended.wait()[1] != ""
                way.write([0], [0], [100])
                assert way.ended.wait()[2] != ""

    def test_a_sink_that_is_closed_ends_what_it_has(self) -> None:
        with self.ways() as (_, way):
            for number in range(40):
                way.write(np.arange(500) * 3000, np.arange(500) * 4000, np.full(500, 2000 + number))
            way.sink.close(WAIT_S)
            way.sink.close(WAIT_S)
            assert len(way.ended.wait(40)) == 40
            way.write([0], [0], [1])
            assert way.ended.wait()[40] != ""

    def test_addresses_of_nobody_are_refused(self) -> None:
        fabric = type(self).make_fabric()
        for wrong in (b"", b"nobody", bytes(range(256))):
            try:
                fabric.connect(wrong)
            except PeerError:
                continue
            raise AssertionError(f"{wrong!r} was not refused")
        fabric.close(WAIT_S)


class Way:
    """A sink into the other process, own memory that is registered, and what should be there."""

    def __init__(self, fabric: Fabric, other: OtherProcess) -> None:
        self._fabric = fabric
        self._other = other
        remote = other.remote
        self._first = remote.pointers["key"][0]
        self.beside = 1 << 46  # an address at which nothing is
        self.survives_its_process = remote.fabric == "shared_memory"  # memory that is mapped here too
        self.own = np.random.default_rng(7).integers(0, 256, 3 << 20, np.uint8)
        self._address = self.own.ctypes.data
        fabric.register(self.own)
        self.sink: Sink = fabric.connect(remote.address)
        self.ended = Ended()
        self.expected = np.full(NUM_BYTES, POISON, np.uint8)

    def write(self, sources: Any, targets: Any, sizes: Any, **options: Any) -> None:
        """From offsets of the own memory to offsets of the keys there."""
        self.write_to(sources, np.asarray(targets, np.int64) + self._first, sizes, **options)

    def write_to(
        self, sources: Any, targets: Any, sizes: Any, timeout_s: float = WAIT_S, wanted: Any = lambda: True
    ) -> None:
        lists = (np.asarray(sources, np.int64) + self._address, np.asarray(targets, np.int64), np.asarray(sizes))
        self.sink.write(Write(*lists, Deadline(timeout_s), self.ended, wanted))

    def note(self, sources: Any, targets: Any, sizes: Any) -> None:
        for source, target, size in zip(sources, targets, sizes, strict=True):
            self.expected[target : target + size] = self.own[source : source + size]

    def compare(self) -> None:
        np.testing.assert_array_equal(self._other.bytes(), self.expected)

    def check(self, sources: Any, targets: Any, sizes: Any) -> None:
        self.note(sources, targets, sizes)
        self.compare()

    def close(self) -> None:
        self.sink.close(WAIT_S)
        self._fabric.close(WAIT_S)
