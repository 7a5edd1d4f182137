"""The side that reads."""

from __future__ import annotations

import functools
import itertools
import math
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...checks import check_process
from ...layout import check_positive
from ...peers.connection import Loop
from ...peers.unix_socket import checked_path
from ...timeouts import check_time, check_timeout
from ...tracking.keeper import Deadline, log
from ...tracking.worker import Worker
from .. import at_exit
from ..protocol import Outcome, Read, Write, arrived, ended
from .messages import MOST_NAMES
from .neighbour import Answer, Memory, Neighbour

BATCH_BYTES = 16 << 20  # of objects that are asked for together: the first ones are copied while others are prepared
PART_BYTES = 1 << 20  # copied and then checked, while a cache of the processor has them
LONGEST_READ_S = 60.0  # of items without a deadline
MOST_THREADS = 64


@dataclass(eq=False)
class _Work:
    """Objects of one answer, before the next stage of them."""

    lender: Neighbour
    answer: Answer
    left: list[tuple[Read, int]]
    stage: int = 0


class NeighbourEngine:
    """Reads objects out of host memory that other processes of this host lend: see :class:`Lender`. Nothing is stored.

    Each lender's memory is mapped here, and its bytes are copied, stage by stage, by threads that do not hold the
    interpreter's lock. What lenders have they say by themselves: ``exists`` asks nobody. A lender that is not there is
    called again until it is, one that has ended is forgotten with all it had, one that does not answer for two seconds
    is left alone until it says something. An object that one lender has no more is asked of the next one.

    Args:
        paths: ``lender.path`` of each; those that come first are asked first.
        threads: that copy.

    Raises:
        TypeError: not a list of paths.
        ValueError: no path, one twice, one that cannot name a socket, or threads that no machine has.
    """

    name = "neighbours"

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, threads: int = 2) -> None:
        if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Sequence):
            raise TypeError(f"paths is {paths!r}; a list of paths is expected")
        checked = [checked_path(path) for path in paths]
        if not checked or len(set(checked)) < len(checked):
            raise ValueError(f"paths = {paths!r} must have at least one path, and none twice")
        if check_positive(threads, "threads") > MOST_THREADS:
            raise ValueError(f"threads = {threads} must be in [1, {MOST_THREADS}]")
        self._changed = threading.Condition()
        self._loop = Loop("paddle_kv-neighbours")
        self._neighbours = [Neighbour(self._loop, path, self._connected) for path in checked]
        self._works: queue.PriorityQueue[tuple[float, int, _Work | None]] = queue.PriorityQueue()  # first stages first
        self._numbers = itertools.count()
        self._process_id = os.getpid()
        self._closed = False
        self._threads = [Worker(self._run, f"paddle_kv-neighbours-{number}") for number in range(threads)]
        for thread in self._threads:
            thread.start()
        for one in self._neighbours:
            self._loop.post(one.call)
        at_exit.engines.add(self)

    def register(self, memory: np.ndarray) -> None:
        """A copy needs no registration."""

    def write(self, items: Sequence[Write]) -> None:
        """Drops them: what this process has it may lend itself."""
        check_process(self._process_id, "engine")
        ended([(item, Outcome.DROPPED) for item in items])

    def read(self, items: Sequence[Read]) -> None:
        check_process(self._process_id, "engine")
        with self._changed:
            if not self._closed:
                self._loop.post(functools.partial(self._ask, list(items), Outcome.MISSING))
                return
        ended([(item, Outcome.DROPPED) for item in items])

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Whether a lender that is there and answers has said so."""
        found = [map(one.names.__contains__, names) for one in self._neighbours if one.asked]
        return list(map(any, zip(*found, strict=True))) if found else [False] * len(names)

    def delete(self, names: Sequence[bytes]) -> None:
        """Forgets them, until they are lent anew: they are their lenders'."""
        for one in self._neighbours:
            one.names.difference_update(names)

    def stats(self) -> dict[str, float]:
        """``objects``, ``used_bytes`` and ``capacity_bytes`` of all lenders together, ``evicted`` (not lent any more),
        ``errors`` (questions that were not answered), ``resting_roots`` (lenders that are not there, or do not answer),
        ``refused_messages``."""
        there = [(one, memory) for one in self._neighbours if (memory := one.memory) is not None]
        return {
            "objects": sum(len(one.names) for one, _ in there),
            "used_bytes": sum(len(one.names) * memory.object_bytes for one, memory in there),
            "capacity_bytes": sum(memory.num_blocks * memory.object_bytes for _, memory in there),
            "evicted": sum(one.removed for one in self._neighbours),
            "errors": sum(one.errors for one in self._neighbours),
            "resting_roots": sum(not one.asked for one in self._neighbours),
            "refused_messages": sum(one.refused for one in self._neighbours),
        }

    def wait_connected(self, timeout_s: float) -> None:
        """Blocks until all lenders are there and have said what they have. Nothing else waits for that.

        Raises:
            TimeoutError: not after ``timeout_s``.
            TypeError, ValueError: a time that is none.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: all(one.told for one in self._neighbours), check_time(timeout_s)):
                missing = [one.path for one in self._neighbours if not one.told]
                raise TimeoutError(f"nobody lends at {missing} after timeout_s = {timeout_s}")

    def close(self, timeout_s: float | None = None) -> None:
        """Drops what has not begun, and waits for copies under way. Again: does nothing.

        Raises:
            TimeoutError: they were not over in time.
        """
        check_timeout(timeout_s)
        if self._process_id != os.getpid():
            return
        deadline = Deadline(timeout_s)
        with self._changed:
            self._closed = True
        self._loop.post(self._close_here)
        self._loop.close(deadline.left_s())
        for _ in self._threads:
            self._works.put((math.inf, next(self._numbers), None))
        for thread in self._threads:
            thread.join(deadline.left_s())
        if any(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"copies from neighbours were not over after timeout_s = {timeout_s}")
        ended([(item, Outcome.DROPPED) for one in self._neighbours for item in one.busy])
        for one in self._neighbours:
            one.busy = []

    def __enter__(self) -> NeighbourEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(30.0)

    # ---- in the thread of the channel ----
    def _close_here(self) -> None:
        for one in self._neighbours:
            one.close()

    def _connected(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _ask(self, items: list[Read], otherwise: Outcome) -> None:
        """Whoever has them; those that nobody has are ended."""
        batches: dict[Neighbour, list[Read]] = {}
        for item in items:
            lender = self._lender_of(item)
            if self._closed:
                ended([(item, Outcome.DROPPED)])
            elif item.deadline.over:
                ended([(item, Outcome.LATE)])
            elif lender is not None:
                batches.setdefault(lender, []).append(item)
            elif any(item.name in one.names for one in self._neighbours):  # of one that does not answer
                ended([(item, Outcome.FAILED)])
            else:
                ended([(item, otherwise)])
        for lender, some in batches.items():
            step = max(1, min(MOST_NAMES, BATCH_BYTES // some[0].size_bytes))
            for first in range(0, len(some), step):
                self._ask_one(lender, some[first : first + step])

    def _ask_one(self, lender: Neighbour, items: list[Read]) -> None:
        left_s = [LONGEST_READ_S if (left := item.deadline.left_s()) is None else left for item in items]
        timeout_s = min(LONGEST_READ_S, max(left_s))  # of the last one: the tier looks at the deadline of each
        lender.ask(items, timeout_s, functools.partial(self._answered, lender, items))

    def _lender_of(self, item: Read) -> Neighbour | None:
        for one in self._neighbours:
            memory = one.memory
            if one.asked and item.name in one.names and memory is not None and memory.object_bytes == item.size_bytes:
                return one
        return None

    def _answered(self, lender: Neighbour, items: list[Read], answer: Answer | None) -> None:
        if answer is None:
            self._ask(items, Outcome.FAILED)
            return
        self._ask(answer.absent, Outcome.MISSING)
        if answer.found:
            lender.num_reading += 1
            self._go_on(_Work(lender, answer, answer.found))
        else:
            answer.done()
        if lender.num_reading:
            lender.busy += answer.busy
        else:  # others read so much
            ended([(item, Outcome.DROPPED) for item in answer.busy])

    def _read_through(self, lender: Neighbour) -> None:
        """Something was read, which makes room for what was too much."""
        lender.num_reading -= 1
        again, lender.busy = lender.busy, []
        self._ask(again, Outcome.MISSING)

    # ---- in any thread ----
    def _go_on(self, work: _Work) -> None:
        """With its next stage, behind all that waits for the same one."""
        if work.left:
            self._works.put((work.stage, next(self._numbers), work))
            return
        work.answer.done()
        self._loop.post(functools.partial(self._read_through, work.lender))

    # ---- in the threads that copy ----
    def _run(self) -> None:
        while (work := self._works.get()[2]) is not None:
            memory, stage = work.answer.memory, work.stage
            work.left = [one for part in _parts(work) for one in self._copy(memory, part, stage)]
            work.stage += 1
            self._go_on(work)

    def _copy(self, memory: Memory, part: list[tuple[Read, int]], stage: int) -> list[tuple[Read, int]]:
        """A stage of these; those of which more is wanted. The others are ended."""
        wanted: list[tuple[Read, int]] = []
        over: list[tuple[Read, Outcome]] = []
        try:
            for item, block_id in part:
                asked = None if self._closed else item.buffers(stage)
                if asked is None:
                    over.append((item, Outcome.DROPPED))
                else:
                    memory.copy(block_id, *asked)
                    wanted.append((item, block_id))
            going_on = arrived([(item, stage) for item, _ in wanted])
        except BaseException:  # noqa: BLE001  the thread lives
            log.exception("an error while blocks came from a neighbour")
            ended([(item, Outcome.FAILED) for item, _ in part])
            return []
        left: list[tuple[Read, int]] = []
        for one, go in zip(wanted, going_on, strict=True):
            if go and stage + 1 < one[0].num_stages:
                left.append(one)
            else:
                over.append((one[0], Outcome.DONE))
        ended(over)
        return left


def _parts(work: _Work) -> list[list[tuple[Read, int]]]:
    """Of what is left, as many at a time as are copied before they are checked."""
    step = max(1, PART_BYTES // work.left[0][0].stage_bytes(work.stage))
    return [work.left[first : first + step] for first in range(0, len(work.left), step)]
