"""The engine "mooncake": the memory of many machines, through a Mooncake Store that somebody runs."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..checks import check_process
from ..layout import check_positive
from ..timeouts import check_timeout
from ..tracking.keeper import Deadline, log
from ..tracking.worker import Worker
from . import at_exit
from .call_order import CallOrder
from .health import Health
from .mooncake_store import GIVES_UP_S, SIZE_CODES, MooncakeError, Move, connect, is_fault, outcome_of
from .protocol import Outcome, Read, Write, arrived, buffers_of, ended

CALL_BYTES = 256 << 20  # that one call moves, or one object
STORE_CALL_BYTES = 128 << 20  # of stores: while one call is under way the checksums for the next one are made
DELETE_S = 2.0  # what a deletion is waited for
# That one call reads: the library reads them one after the other, and spends a second on each that is on a dead node.
CALL_RANGES = 8
DEAD_S = 0.5  # a call of so many ranges that takes longer and reports a fault has met a dead node
_METRICS = {
    "master_key_count": "objects",
    "master_allocated_bytes": "used_bytes",
    "master_total_capacity_bytes": "capacity_bytes",
    "master_evicted_key_count": "evicted",
}


class _Work:
    """Objects that are stored, or read stage by stage, together."""

    def __init__(self, items: list[Any], call: int, *, whole: bool = False) -> None:
        self.items = items
        self.call = call
        self.stage = 0
        self.whole = whole  # without a session, all stages at once
        self.session: list[str] = []  # names of which the store has been asked where they are
        self.moves: list[Move] | None = None  # of a store that is ready for its call


class MooncakeEngine:
    """Objects in a Mooncake Store, to and from the pool without a copy.

    Args:
        master: ``host:port`` of the store's master.
        hostname: of this machine, as the other ones reach it.
        segment_bytes: memory of this process that the store may use; a multiple of 16 MiB. 0: it stores nothing here.
        protocol: ``tcp`` or ``rdma``, with its ``devices``.
        metadata: how clients find each other.
        prefix: of the names in the store.
        metrics: ``host:port`` of the master's metrics, for :meth:`stats`.
        threads: calls of the store at once.
        objects_per_call: the most that one call moves; of a load no more than 256 MiB, of a store than 128 MiB, or one
            object. A larger call costs less of the processor, but goes on when its objects are not wanted any more.
            Byte ranges come in calls of eight.
        answer_s: what :meth:`exists` and :meth:`stats` wait for the master; what is not known by then is not there.

    Attributes:
        store: the client of the store.

    Raises:
        ImportError: Mooncake is not installed.
        TierError: no master, or it refuses (:class:`~paddle_kv.tiers.mooncake_store.MooncakeError`).
    """

    name = "mooncake"

    def __init__(
        self,
        master: str,
        *,
        hostname: str = "127.0.0.1",
        segment_bytes: int = 0,
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        prefix: str = "paddle_kv/",
        metrics: str | None = None,
        threads: int = 4,
        objects_per_call: int = 1024,
        answer_s: float = 0.05,
    ) -> None:
        check_timeout(answer_s)
        self._objects_per_call = check_positive(objects_per_call, "objects_per_call")
        self.prefix, self._metrics, self._answer_s = prefix, metrics, answer_s
        self.reads = Health(f"reading from the Mooncake Store of {master}")
        self.writes = Health(f"writing to the Mooncake Store of {master}")
        self.asks = Health(f"asking the Mooncake Store of {master}")
        self.store = connect(
            master,
            hostname=hostname,
            segment_bytes=segment_bytes,
            protocol=protocol,
            devices=devices,
            metadata=metadata,
        )
        self._memory: list[np.ndarray] = []
        self._lost: list[Read | Write] = []  # the store may still touch their memory, until it is closed
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._preparing = threading.Lock()
        self._in_session: set[str] = set()
        self._reads: CallOrder[_Work] = CallOrder()
        self._writes: deque[_Work] = deque()
        self._ready: deque[_Work] = deque()  # the next store; one more where two threads meet
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for each piece of work; False: the end
        self._questions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._counts = dict.fromkeys(_METRICS.values(), 0.0)
        self._process_id = os.getpid()
        self._closed = self._over = False
        work = [(f"mooncake-{number}", self._run) for number in range(check_positive(threads, "threads"))]
        self._threads = [
            Worker(target, f"paddle_kv-{name}") for name, target in [*work, ("mooncake-asks", self._answer)]
        ]
        for thread in self._threads:
            thread.start()
        at_exit.engines.add(self)

    # ---- calls ----
    def register(self, memory: np.ndarray) -> None:
        """Makes memory known to the transport, once."""
        self._check_process()
        code = self.store.register_buffer(memory.ctypes.data, memory.nbytes)
        if code:
            raise MooncakeError(f"registering {memory.nbytes} bytes", code)
        self._memory.append(memory)

    def write(self, items: Sequence[Write]) -> None:
        self._check_process()
        self._queue(items, self.writes, self._writes, STORE_CALL_BYTES)

    def read(self, items: Sequence[Read]) -> None:
        self._check_process()
        self._queue(items, self.reads, self._reads, CALL_BYTES)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """What the master says within ``answer_s``; else False."""
        keys = [self._key(name) for name in names]
        found = None if self.reads.resting else self._ask(lambda: self.store.batch_is_exist(keys), self._answer_s)
        return [code == 1 for code in found] if found else [False] * len(names)

    def delete(self, names: Sequence[bytes]) -> None:
        """Whoever may be reading them: they have checksums. Gives up after two seconds."""
        remove = functools.partial(self.store.batch_remove, [self._key(name) for name in names], True)
        if threading.current_thread() in self._threads:
            remove()
        else:
            self._ask(remove, DELETE_S)

    def stats(self) -> dict[str, float]:
        """``objects``, ``used_bytes``, ``capacity_bytes`` and ``evicted`` of the whole store, if ``metrics`` was given;
        ``errors``, ``resting_roots`` and ``given_up`` (objects whose memory waits for the end of the engine)."""
        if self._metrics and not self._closed:
            self._ask(self._read_metrics, self._answer_s)
        healths = (self.reads, self.writes, self.asks)
        return self._counts | {
            "errors": sum(one.errors for one in healths),
            "resting_roots": float(any(one.resting for one in healths)),
            "given_up": len(self._lost),
        }

    def close(self, timeout_s: float | None = None) -> None:
        """Drops what has not begun, waits for what has, and leaves the store. Again: does nothing.

        Raises:
            TimeoutError: a call of the store has not returned. Another call waits again.
        """
        check_timeout(timeout_s)
        if self._over or self._process_id != os.getpid():
            return
        deadline = Deadline(timeout_s)
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tickets.put(False)
                self._questions.put(None)
        for thread in self._threads:
            thread.join(deadline.left_s())
        if any(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"the Mooncake Store did not answer within timeout_s = {timeout_s}")
        self._over = True
        for memory in self._memory:
            self.store.unregister_buffer(memory.ctypes.data)
        self.store.close()
        while self._lost:
            self._lost.pop().ended(Outcome.FAILED)

    def __enter__(self) -> MooncakeEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(30.0)

    # ---- asking the master ----
    def _ask(self, question: Callable[[], Any], timeout_s: float) -> Any:
        """The answer; None if there is none in time, or if it is not worth asking."""
        self._check_process()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if self._closed or self.asks.resting:
            return None
        self._questions.put(lambda: answers.put(question()))
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            self.asks.failed(TimeoutError(f"no answer in {timeout_s} s"))
            return None
        codes = answer if isinstance(answer, list) else []
        if codes and all(is_fault(code) for code in codes):
            self.asks.failed(MooncakeError("asking", codes[0]))
        else:
            self.asks.worked()
        return answer

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                question()
            except BaseException as error:  # noqa: BLE001  whoever asked has a time-out
                self.asks.failed(error)

    def _read_metrics(self) -> None:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=DELETE_S) as page:
            lines = page.read().decode().splitlines()
        told = dict(line.split(" ", 1) for line in lines if line.startswith("master_") and " " in line)
        self._counts = {ours: float(told.get(theirs, 0)) for theirs, ours in _METRICS.items()}

    # ---- work ----
    def _queue(
        self, items: Sequence[Any], health: Health, work: CallOrder[_Work] | deque[_Work], call_bytes: int
    ) -> None:
        refused = list(items)
        most = max(1, min(self._objects_per_call, call_bytes // max((item.size_bytes for item in items), default=1)))
        step = -(-len(items) // max(1, -(-len(items) // most)))  # calls of one size: each costs as much as any other
        with self._lock:
            if not (self._closed or health.resting):
                call = self._reads.new_call()
                for first in range(0, len(items), step):
                    work.append(_Work(refused[first : first + step], call))
                    self._tickets.put(True)
                return
        for item in refused:
            item.ended(Outcome.DROPPED)

    def _run(self) -> None:
        while self._tickets.get():
            self._serve()
        while self._serve():  # nobody begins it any more: it is dropped
            pass

    def _serve(self) -> bool:
        """Whether there was something to do. Reads come first; one call stores at a time, since those that wait for
        their bytes to leave cost a core each. The checksums of the next one are made meanwhile."""
        with contextlib.suppress(IndexError):
            self._do(self._reads.popleft(), self._read_stage, self.reads)
            return True
        if not self._writing.acquire(blocking=False):
            self._prepare()  # whoever stores goes on with it
            return False
        try:
            work = (self._ready or self._writes).popleft()
        except IndexError:
            return False
        else:
            if self._writes:
                self._tickets.put(True)
            self._do(work, self._write, self.writes)
            return True
        finally:
            self._writing.release()
            if self._ready or self._writes:
                self._tickets.put(True)

    def _prepare(self) -> None:
        """The next store, while another one's call is under way."""
        if self._ready or not self._preparing.acquire(blocking=False):
            return
        try:
            work = self._writes.popleft()
        except IndexError:
            return
        else:
            self._do(work, self._make_ready, self.writes)
            if work.moves:
                self._ready.append(work)
                self._tickets.put(True)
        finally:
            self._preparing.release()

    def _make_ready(self, work: _Work) -> None:
        found = buffers_of(work.items)
        work.moves = self._moves(work, [None if buffers is None else (0, buffers) for buffers in found])
        work.items = [move.item for move in work.moves]

    def _do(self, work: _Work, serve: Callable[[_Work], None], health: Health) -> None:
        items = list(work.items)
        try:
            if self._closed or health.resting:
                self._end_session(work)
                for item in items:
                    item.ended(Outcome.DROPPED)
            else:
                serve(work)
        except BaseException:  # noqa: BLE001  the thread lives
            log.exception("an error in a thread of the engine mooncake")
            for item in items:
                item.ended(Outcome.FAILED)
            self._end_session(work)

    def _write(self, work: _Work) -> None:
        if work.moves is None:
            self._make_ready(work)
        moves, work.items = work.moves or [], []
        store = self.store.batch_put_from_multi_buffers
        codes, gave_up = self._call(self.writes, moves, lambda: store(*_columns(moves)))
        outcomes = [Outcome.DONE if code == 0 else outcome_of(code) for code in codes]
        self._end([(move.item, outcome) for move, outcome in zip(moves, outcomes, strict=True)], gave_up)

    def _read_stage(self, work: _Work) -> None:
        """One stage of all objects by byte ranges; without a session all stages at once, which costs more."""
        if work.stage == 0:
            self._begin_reading(work)
        if not work.items:
            return
        stages = range(work.stage, work.stage + 1 if work.session else work.items[0].num_stages)
        moves = self._moves(work, [_buffers(item, stages) for item in work.items])
        if work.session:
            codes, gave_up = self._call(self.reads, moves, lambda: self._get_ranges(moves))
        else:
            get = functools.partial(self.store.batch_get_into_multi_buffers, *_columns(moves))
            codes, gave_up = self._call(self.reads, moves, get)
        if left := [move.item for move in moves[len(codes) :]]:
            moves = moves[: len(codes)]
            if work.stage == 0:
                self._again(_Work(left, work.call, whole=True))  # all that is on the dead node fails at once
            else:
                self._end([(item, Outcome.FAILED) for item in left])
        ends = []
        came = [code == sum(move.sizes) for move, code in zip(moves, codes, strict=True)]
        wanted = iter(_arrivals([move.item for move, whole in zip(moves, came, strict=True) if whole], stages))
        for move, code, whole in zip(moves, codes, came, strict=True):
            outcome = next(wanted) if whole else self._why(move, code)
            if outcome is None:
                work.items.append(move.item)
            else:
                ends.append((move.item, outcome))
        work.stage = stages.stop
        if work.items:
            self._again(work)
        else:
            self._end_session(work)  # before the job is over: the next one may ask for the same objects
        self._end(ends, gave_up)

    def _get_ranges(self, moves: list[Move]) -> list[int]:
        """In calls of few ranges. After one that has met a dead node, what is left has no code."""
        codes: list[int] = []
        step = max(1, CALL_RANGES // max(len(move.starts) for move in moves))
        for first in range(0, len(moves), step):
            part = moves[first : first + step]
            offsets = [move.offsets for move in part]
            started_s = time.monotonic()
            codes += self.store.batch_get_into_multi_buffer_ranges(*_columns(part), offsets)
            if time.monotonic() - started_s > DEAD_S and any(is_fault(code) for code in codes[first:]):
                break
        return codes

    def _again(self, work: _Work) -> None:
        self._reads.append(work)
        self._tickets.put(True)

    def _begin_reading(self, work: _Work) -> None:
        """The store has one session for each name, and mixes up what is twice in a call: a name that is busy is read
        later, in a call of its own."""
        mine: dict[str, Any] = {}
        later = []
        with self._lock:
            for item in work.items:
                key = self._key(item.name)
                if key in mine or (not work.whole and key in self._in_session):
                    later.append(item)
                else:
                    mine[key] = item
            if not work.whole:
                work.session = list(mine)
                self._in_session.update(mine)
        work.items = list(mine.values())
        if later:
            self._again(_Work(later, work.call, whole=True))
        if work.session:
            start = self.store.batch_get_session_start
            codes, _ = self._call(self.reads, work.session, lambda: start(work.session))
            work.items = []
            for item, code in zip(mine.values(), codes, strict=True):
                if code < 0:
                    self._end([(item, outcome_of(code))])
                else:
                    work.items.append(item)
            if not work.items:
                self._end_session(work)

    def _end_session(self, work: _Work) -> None:
        if work.session:
            names, work.session = work.session, []
            self.store.batch_get_session_end(names)
            with self._lock:
                self._in_session.difference_update(names)

    def _moves(self, work: _Work, found: Sequence[tuple[int, list[memoryview]] | None]) -> list[Move]:
        """Of what is still wanted; the rest is dropped."""
        items, work.items = work.items, []
        moves = []
        for item, asked in zip(items, found, strict=True):
            if asked is None:
                item.ended(Outcome.DROPPED)
            else:
                moves.append(Move.of(item, self._key(item.name), *asked))
        return moves

    def _call(self, health: Health, what: Sequence[Any], function: Callable[[], list[int]]) -> tuple[list[int], bool]:
        """What the store says, and whether it may have given up a transfer that is still under way."""
        if not what:
            return [], False
        started_s = time.monotonic()
        codes = function()
        if not all(is_fault(code) for code in codes):
            health.worked()
        else:
            health.failed(MooncakeError(f"{len(codes)} objects", codes[0]))
        return codes, time.monotonic() - started_s > GIVES_UP_S

    def _why(self, move: Move, code: int) -> Outcome:
        """An object of another size is refused with codes that mean other things too."""
        if code < 0 and (code not in SIZE_CODES or self.asks.resting):
            return outcome_of(code)
        found = self.store.get_size(move.key)
        if is_fault(found):
            self.asks.failed(MooncakeError("asking for a size", found))
        other = found >= 0 and found != move.item.size_bytes
        return Outcome.DAMAGED if other else outcome_of(min(code, -1))

    def _end(self, ends: Sequence[tuple[Any, Outcome]], gave_up: bool = False) -> None:
        lost = [item for item, outcome in ends if gave_up and outcome is Outcome.FAILED]
        with self._lock:
            self._lost += lost
        ended([one for one in ends if one[0] not in lost])

    def _key(self, name: bytes) -> str:
        return self.prefix + name.hex()

    def _check_process(self) -> None:
        check_process(self._process_id, "engine")


def _columns(moves: list[Move]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return [move.key for move in moves], [move.starts for move in moves], [move.sizes for move in moves]


def _buffers(item: Read, stages: range) -> tuple[int, list[memoryview]] | None:
    """Of stages that follow each other."""
    parts = [part for stage in stages if (part := item.buffers(stage)) is not None]
    return (parts[0][0], [one for _, buffers in parts for one in buffers]) if len(parts) == len(stages) else None


def _arrivals(items: Sequence[Any], stages: range) -> list[Outcome | None]:
    """None: there is another stage."""
    found: list[Outcome | None] = [None] * len(items)
    for stage in stages:
        left = [position for position, outcome in enumerate(found) if outcome is None]
        for position, wanted in zip(left, arrived([(items[one], stage) for one in left]), strict=True):
            if not wanted or stage + 1 == items[position].num_stages:
                found[position] = Outcome.DONE
    return found
