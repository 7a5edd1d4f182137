"""An engine with two tensor-parallel ranks: one process schedules, one process a rank computes and moves.

    python examples/two_ranks.py

The scheduling process has the directory and imports no Paddle. Each rank has a cache, a pool and a mover; it gets steps
over a pipe and sends results back. The model is a pattern: a block's bytes follow from its key, its layer and its rank,
so that each block that was loaded can be compared. Ranks that die are started again, and come back empty.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from paddle_kv.offload import Directory, Hello, Job, Outcome, Result

RANKS, TIMEOUT_S = 2, 5.0


@dataclass(frozen=True)
class Sizes:
    """Of each rank."""

    device_blocks: int = 64
    host_blocks: int = 48
    block_elements: int = 16  # of a tensor of a layer


@dataclass(frozen=True)
class Step:
    """What all ranks do at once. ``computed``: device blocks that the model fills, with the keys that they get."""

    jobs: list[Job]
    computed: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A rank's answer. ``wrong``: loads that have brought other bytes than the key promises."""

    rank: int
    results: list[Result]
    wrong: list[int] = field(default_factory=list)


# ---- a rank: cache, pool, mover; everything that needs Paddle ----
def run_rank(connection: Any, rank: int, sizes: Sizes, wait_for: Callable[..., Any] = wait) -> None:
    """Serves steps until the other end closes."""
    import numpy as np

    from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, PaddleKVError
    from paddle_kv.integrations import ForwardPass
    from paddle_kv.offload import Mover

    elements = sizes.block_elements
    spec = KVCacheSpec(num_layers=3, num_kv_heads=1, head_dim=elements, block_size=1, dtype="int32")
    cache = DeviceCache(spec, sizes.device_blocks, "cpu")
    tensors = [[as_array(cache.tensor(name, layer)) for name in spec.tensor_names] for layer in range(spec.num_layers)]
    count = np.arange(elements, dtype=np.int32)

    def pattern(keys: Sequence[bytes], layer: int) -> Any:
        seeds = np.frombuffer(b"".join(key[:4] for key in keys), np.int32)
        return (seeds[:, None] + count * (7 * layer + rank + 1))[:, None, None, :]

    def serve(step: Step) -> list[int]:
        submitted = mover.submit(step.jobs)
        loads = [job for job in step.jobs if job.kind == "load"]
        blocks, keys = [block for block, _ in step.computed], [key for _, key in step.computed]
        cache.mark_rewritten(blocks)  # those that a failed load has left without data, too
        wrong = set()
        try:
            with ForwardPass(submitted.loads, submitted.saves, timeout_s=TIMEOUT_S) as layers:
                for layer in range(spec.num_layers):
                    with layers.layer(layer):
                        written = pattern(keys, layer)
                        expected = [(job, list(job.device_ids), pattern(job.keys, layer)) for job in loads]
                        for tensor in tensors[layer]:
                            tensor[blocks] = written
                            wrong.update(job.id for job, ids, bits in expected if (tensor[ids] != bits).any())
            for load in submitted.loads:
                load.wait(TIMEOUT_S)
        except (PaddleKVError, TimeoutError):
            pass  # the directory hears of it, and all ranks compute these blocks
        return sorted(wrong)

    pool = HostPool(spec, sizes.host_blocks)
    with pool, LayerwiseScheduler(cache, pool) as scheduler, Mover(scheduler, rank=rank) as mover:
        connection.send(mover.hello())
        descriptor = scheduler.fileno()
        while True:
            ready = wait_for([connection, descriptor], 0.2)
            wrong: list[int] = []
            try:
                if connection in ready:
                    wrong = serve(connection.recv())
                if descriptor in ready:
                    scheduler.finished()  # what it told of
                results = mover.finished()
                if results or wrong:
                    connection.send(Report(rank, results, wrong))
            except (EOFError, OSError):
                return


def as_array(tensor: Any) -> Any:
    """The memory of a tensor on the CPU, to be written in place."""
    import ctypes

    import numpy as np

    size = int(np.prod(tensor.shape))
    return np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(tensor.data_ptr())).reshape(tensor.shape)


# ---- the scheduling process ----
class Engine:
    """Serves one prompt after the other.

    Args:
        start_rank: starts the process of a rank; returns the process and the connection to it.
        wait_for: sleeps until one of the connections can be read.
        sizes: of each rank.
        num_ranks, timeout_s: of the directory.
    """

    def __init__(
        self,
        start_rank: Callable[[int], tuple[Any, Any]],
        sizes: Sizes = Sizes(),
        *,
        num_ranks: int = RANKS,
        timeout_s: float = TIMEOUT_S,
        wait_for: Callable[..., Any] = wait,
    ) -> None:
        self.directory = Directory(sizes.host_blocks, num_ranks=num_ranks, timeout_s=timeout_s)
        self.loaded_blocks = self.computed_blocks = self.recomputed_blocks = self.wrong = 0
        self._start_rank, self._wait_for = start_rank, wait_for
        self.processes: list[Any] = [None] * num_ranks
        self._connections: list[Any] = [None] * num_ranks
        self._greeted: set[int] = set()  # ranks that have said hello
        self._free = list(range(sizes.device_blocks))
        self._of_job: dict[int, list[int]] = {}  # job -> the device blocks that it touches
        self._users: dict[int, int] = {}  # device block -> jobs that touch it
        self._suspects: set[int] = set()  # loads of which a rank says that the bytes are wrong
        self._awaited: dict[int, Outcome | None] = {}  # loads
        for rank in range(num_ranks):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Its hello comes later; until then nothing is found and nothing is kept."""
        self.processes[rank], self._connections[rank] = self._start_rank(rank)

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.directory.ready:
            if time.monotonic() > deadline_s:
                raise TimeoutError("a rank has not said hello")
            self.receive()

    def serve(self, keys: list[bytes]) -> int:
        """One prompt: loads what is found, computes and saves the rest. How many blocks were loaded."""
        self.receive(0)
        table = self._take(len(keys))
        jobs = []
        with self.directory.lookup(keys) as found:
            count = len(found.keys)
            if count:
                jobs.append(self.directory.plan_load(found.keys, table[:count]))
        computed_from = [job.id for job in jobs]
        save = self.directory.plan_save(keys[count:], table[count:], layerwise=True, computed_from=computed_from).job
        jobs += [save] if save is not None else []
        computed = list(zip(table[count:], keys[count:], strict=True))
        self._send(Step(jobs, computed))
        self.computed_blocks += len(computed)
        if computed_from:
            loaded = self._outcome(computed_from[0])
            if loaded.failed:  # on one rank or on all: all of them compute it
                again = list(zip(table, keys, strict=True))
                self.settle()
                self._send(Step([], again))
                self.recomputed_blocks += len(again)
                count = 0
            elif computed_from[0] in self._suspects:
                self.wrong += 1
            self.loaded_blocks += count
        self._give_back(table)
        return count

    def receive(self, timeout_s: float = 0.1) -> None:
        """Takes what the ranks have sent, and tells the directory; also of ranks that are gone."""
        alive = [one for one in self._connections if one is not None]
        ready = self._wait_for(alive, timeout_s) if alive else []
        results: list[Result] = []
        for rank, connection in enumerate(self._connections):
            try:
                while connection is not None and connection in ready and connection.poll():
                    message = connection.recv()
                    if isinstance(message, Hello):
                        self._greeted.add(rank)
                        self._note(self.directory.join(message))
                    else:
                        results += message.results
                        self._suspects.update(message.wrong)
            except (EOFError, OSError):
                self._lose(rank)
        self._note(self.directory.complete(results))
        for rank in self.directory.lost_ranks & self._greeted:
            self._lose(rank)  # it has let all its time pass
        for rank, process in enumerate(self.processes):
            if process is None:
                self.start(rank)

    def settle(self) -> None:
        """Until no rank moves anything. What was loaded late must not overwrite what is computed now."""
        while self._of_job:
            self.receive()

    def close(self) -> None:
        for connection in self._connections:
            if connection is not None:
                connection.close()
        for process in self.processes:
            if process is not None:
                process.join(10)
                process.kill()
                process.join()

    def _lose(self, rank: int) -> None:
        self._note(self.directory.lost(rank))
        self._greeted.discard(rank)
        self._connections[rank].close()
        self.processes[rank].kill()
        self.processes[rank].join()
        self.processes[rank] = self._connections[rank] = None

    def _send(self, step: Step) -> None:
        for job in step.jobs:
            self._of_job[job.id] = list(job.device_ids)
            if job.kind == "load":
                self._awaited[job.id] = None
            for block in job.device_ids:
                self._users[block] = self._users.get(block, 0) + 1
        for rank, connection in enumerate(self._connections):
            if connection is not None:
                try:
                    connection.send(step)
                except OSError:
                    self._lose(rank)

    def _outcome(self, job_id: int) -> Outcome:
        while (found := self._awaited[job_id]) is None:  # ends: each job has a deadline
            self.receive()
        del self._awaited[job_id]
        return found

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.job_id in self._awaited:
                self._awaited[outcome.job_id] = self._awaited[outcome.job_id] or outcome
            if not outcome.late:  # nothing of it moves any more
                for block in self._of_job.pop(outcome.job_id, ()):
                    self._users[block] -= 1
                    if not self._users[block]:
                        del self._users[block]

    def _take(self, count: int) -> list[int]:
        while True:
            idle = [block for block in self._free if block not in self._users]
            if len(idle) >= count:
                taken = set(idle[:count])
                self._free = [block for block in self._free if block not in taken]
                return idle[:count]
            self.receive()

    def _give_back(self, table: list[int]) -> None:
        self._free += table


def start_process(rank: int, sizes: Sizes = Sizes(), method: str = "spawn") -> tuple[Any, Any]:
    """A rank in a process of its own, and a pipe to it."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=run_rank, args=(theirs, rank, sizes), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def prompts(count: int, shared: int = 3, own: int = 4) -> list[list[bytes]]:
    """Prompts of a few conversations: the first blocks of several are the same. Real ones: ``PrefixHasher``."""
    return [
        [b"%04d" % block for block in range(shared)]
        + [b"%04d" % (100 * (1 + number % 7) + block) for block in range(own)]
        for number in range(count)
    ]


def main() -> Engine:
    """Three rounds of prompts, with the death of a rank in the second one."""
    engine = Engine(start_process)
    engine.wait_until_ready()
    for number in range(3):
        for position, keys in enumerate(prompts(12)):
            if (number, position) == (1, 6):
                engine.processes[1].kill()
            engine.serve(keys)
            engine.settle()
        engine.wait_until_ready()
    print(
        f"{engine.loaded_blocks} blocks loaded, {engine.computed_blocks} computed, one rank killed and back, "
        f"{engine.wrong} loads with wrong bytes"
    )
    engine.close()
    return engine


if __name__ == "__main__":
    main()
