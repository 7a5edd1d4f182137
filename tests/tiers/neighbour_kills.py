"""Kills or stops a lender, or a reader, at a point of its work, and looks at what is left on the other side.

In a hunt: ``python -m tests.tiers.neighbour_kills 200``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from paddle_kv import HostPool
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.peers.connection import Line
from paddle_kv.testing.tiers.rig import ALIGNED, POISON, WAIT_S, Rig, keys
from paddle_kv.tiers import Job, Outcome
from paddle_kv.tiers.neighbours import Lender, NeighbourEngine
from paddle_kv.tiers.neighbours import engine as engine_module
from paddle_kv.tiers.neighbours import lender as lender_module
from paddle_kv.tiers.neighbours import neighbour as neighbour_module
from paddle_kv.tiers.neighbours.lent import Leased, Lent
from paddle_kv.tiers.neighbours.neighbour import Memory
from tests.peers.conftest import until
from tests.peers.prefill import context

KEYS = keys(8)
LENDER_POINTS = 20  # of one load
READER_POINTS = 65
TARGETS = [13, 2, 9, 4, 11, 0, 7, 3]
SHORT_S = 0.2


class Points:
    """The process ends, or is stopped, at one of the points that it passes: in front of and behind each message, each
    making of headers, each copy; and in the middle of these two."""

    def __init__(self, at: int, sign: int) -> None:
        self._left, self._sign = at, sign
        self._write, self._headers, self._copy = Line._write, Lent.write_headers, Memory.copy
        Line._write = lambda line, data: self._around(lambda: self._write(line, data))  # type: ignore[method-assign]
        Lent.write_headers = lambda lent, leased: self._write_some(lent, leased)  # type: ignore[method-assign]
        Memory.copy = lambda *given: self._copy_some(*given)  # type: ignore[method-assign]

    def pass_one(self) -> None:
        self._left -= 1
        if self._left == -1:
            os.kill(os.getpid(), self._sign)

    def _around(self, call: Any) -> None:
        self.pass_one()
        call()
        self.pass_one()

    def _write_some(self, lent: Lent, leased: Leased) -> None:
        self.pass_one()
        self._headers(lent, Leased(leased.objects[:1], None))
        self.pass_one()
        self._headers(lent, leased)

    def _copy_some(self, memory: Memory, block_id: int, offset: int, targets: Any) -> None:
        self.pass_one()
        self._copy(memory, block_id, offset, [target[: len(target) // 2] for target in targets[:1]])
        self.pass_one()
        self._copy(memory, block_id, offset, targets)


def lend(pipe: Connection, path: str | None, at: int | None, sign: int) -> None:
    """The process of a lender: block i is that of key i."""
    pool = HostPool(ALIGNED, len(KEYS) * 2, layout="block_first", shared=True)
    rows = block_rows(pool)
    for block_id, key in enumerate(KEYS):
        rows[block_id] = content(rows, key)
    lender = Lender(pool, model=b"model", path=path)
    lender.lend(KEYS, range(len(KEYS)))
    if at is not None:
        Points(at, sign)
    pipe.send(lender.path)
    with contextlib.suppress(EOFError):
        pipe.recv()


def content(rows: np.ndarray, key: bytes) -> np.ndarray:
    """As the rig of a reader has it."""
    return np.asarray(np.random.default_rng(zlib.crc32(key)).integers(0, 256, rows.shape[1], np.uint8))


def read(pipe: Connection, path: str, at: int | None, sign: int) -> None:
    """The process of a reader: loads all keys, and says how it went and what is wrong."""
    with small_batches():
        if at is not None:
            Points(at, sign)
        engine = NeighbourEngine([path])
        rig = Rig(engine)
        engine.wait_connected(WAIT_S)
        job = rig.load(KEYS, TARGETS, timeout_s=WAIT_S)
        pipe.send(([outcome.value if outcome else None for outcome in job.outcomes], rig.wrong(job)))
        rig.close()
        engine.close(WAIT_S)


class Other:
    """The handle of such a process."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.pipe, there = multiprocessing.Pipe()
        self.process = context.Process(target=function, args=(there, *given), daemon=True)
        self.process.start()
        there.close()

    def hear(self) -> Any:
        """None: it is dead."""
        try:
            assert self.pipe.poll(WAIT_S), "the other process does not answer"
            return self.pipe.recv()
        except (EOFError, OSError):
            return None

    def signal(self, sign: int) -> None:
        os.kill(self.process.pid or 0, sign)

    def goes_on(self) -> bool:
        """Whether or not it stands."""
        self.signal(signal.SIGCONT)
        return True

    def end(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        self.pipe.close()


@contextlib.contextmanager
def small_batches() -> Iterator[None]:
    """Several questions for one load, and no long wait for an answer."""
    before = engine_module.BATCH_BYTES, engine_module.PART_BYTES, neighbour_module.ANSWER_S
    engine_module.BATCH_BYTES, engine_module.PART_BYTES = 110_000, 60_000
    neighbour_module.ANSWER_S = 3 * SHORT_S
    try:
        yield
    finally:
        engine_module.BATCH_BYTES, engine_module.PART_BYTES, neighbour_module.ANSWER_S = before


def stop_a_lender(at: int, sign: int = signal.SIGKILL) -> str:
    """How the load ended."""
    other = Other(lend, None, at, sign)
    path = other.hear()
    with contextlib.ExitStack() as stack, small_batches():
        stack.callback(other.end)
        engine = NeighbourEngine([path])
        stack.callback(engine.close, WAIT_S)
        rig = Rig(engine)
        stack.callback(rig.close)
        until(lambda: engine._neighbours[0].names or other.process.exitcode is not None or at < 6)
        job = Job(KEYS, TARGETS, timeout_s=2.0)
        rig.rows[:] = POISON
        rig.tier.load([job])
        rig.tier.drain(WAIT_S)  # over, and not only settled: nothing waits for the other one
        assert job.over
        assert rig.wrong(job) == []
        assert set(job.outcomes) <= {Outcome.DONE, Outcome.FAILED, Outcome.MISSING, Outcome.LATE}
        others = sorted(set(range(len(rig.rows))) - set(TARGETS))
        assert (rig.rows[others] == POISON).all()
        if sign == signal.SIGSTOP:

            def served() -> bool:
                # Each time: it may come to that point only now, and an answer too late for its short bound.
                return other.goes_on() and rig.tier.exists(KEYS) == [True] * len(KEYS) and rig.load(KEYS, TARGETS).done

            until(served)
        else:
            other.process.join(SHORT_S)
            if other.process.exitcode is None:  # it did not come to that point
                other.signal(signal.SIGKILL)
            other.process.join(WAIT_S)
            assert other.process.exitcode == -signal.SIGKILL
            until(lambda: not any(rig.tier.exists(KEYS)))
        return "done" if job.done else "partly" if Outcome.DONE in job.outcomes else "nothing"


def stop_a_reader(at: int, sign: int = signal.SIGKILL) -> str:
    """How it ended for the reader."""
    pool = HostPool(ALIGNED, 2 * len(KEYS), layout="block_first", shared=True)
    rows = block_rows(pool)
    own = pool.allocate(len(KEYS))
    for block_id, key in zip(own, KEYS, strict=True):
        rows[block_id] = content(rows, key)
    before = rows.copy()
    longest, lender_module.LONGEST_LEASE_S = lender_module.LONGEST_LEASE_S, 60.0
    if sign == signal.SIGSTOP:
        lender_module.LONGEST_LEASE_S = SHORT_S
    try:
        with Lender(pool, model=b"model") as lender:
            lender.lend(KEYS, own)
            other = Other(read, lender.path, at, sign)
            answer = None
            if sign == signal.SIGKILL:
                answer = other.hear()
            elif not other.pipe.poll(SHORT_S * 5):  # it stands still
                lender.take_back(KEYS)
                with pool.lease(own, write=True, timeout_s=WAIT_S):  # its leases are over, and it may still copy
                    rows[own] = rows[own[::-1]]
                lender.lend(KEYS[::-1], own)
                before = rows.copy()
                until(lambda: other.goes_on() and other.pipe.poll(0))
            answer = answer or other.hear()
            assert answer is None or answer[1] == []
            until(lambda: not lender.stats()["leased_blocks"])
            other.end()
            until(lambda: not lender.stats()["readers"])
            lender.take_back(KEYS)
            with pool.lease(range(pool.num_blocks), write=True, timeout_s=WAIT_S):
                assert (rows == before).all()
        pool.free(own)
        assert pool.num_free_blocks == pool.num_blocks
    finally:
        lender_module.LONGEST_LEASE_S = longest
        pool.close()
    return "killed" if answer is None else "done" if set(answer[0]) == {"done"} else "partly"


def main(count: int) -> None:
    rng, found = random.Random(), dict[str, int]()
    for number in range(count):
        sign = signal.SIGSTOP if number % 4 > 1 else signal.SIGKILL
        stop, most = ((stop_a_lender, LENDER_POINTS), (stop_a_reader, READER_POINTS))[number % 2]
        end = f"{stop.__name__}, {sign.name}: {stop(rng.randrange(most), sign)}"
        found[end] = found.get(end, 0) + 1
        print(f"\r{number + 1} of {count}; {found}", end="", flush=True)
    print()


if __name__ == "__main__":
    main(int(sys.argv[1]))
