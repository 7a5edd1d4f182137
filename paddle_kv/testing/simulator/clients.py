"""Threads of a server on the simulator: one manager and one adapter, called by all of them at random."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ...integrations import CacheTransferManager, LayerHooks
from ...layout import KVCacheSpec
from ...memory import DeviceCache, HostPool
from ...offload import KVOffloadManager
from ...schedule.scheduler import LayerwiseScheduler
from ...tracking.group import change
from .chooser import LateChooser, RandomChooser
from .client import KEYS, LAYERS, OWN_BLOCKS, Client, content_of
from .simulation import Simulation

SPEC = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=4, block_size=1, dtype="float16", latent=True)
HOST_BLOCKS, CAPACITY_BLOCKS = 8, 4
CLOSE_TIMEOUT_S = 10.0


class Site(NamedTuple):
    """What the threads call."""

    scheduler: LayerwiseScheduler
    manager: KVOffloadManager
    mover: CacheTransferManager


class HookedLayer:
    """Stands for a ``paddle.nn.Layer``."""

    def __init__(self) -> None:
        self._before: list[Callable[[Any], object]] = []
        self._behind: list[Callable[[Any], object]] = []
        self.register_forward_pre_hook = self._before.append
        self.register_forward_post_hook = self._behind.append

    def __call__(self, forward: Callable[[], object]) -> None:
        for hook in self._before:
            hook(self)
        forward()
        for hook in self._behind:
            hook(self)


class Clients:
    """The threads, what they share, and what must hold in the end.

    Args:
        seed: decides everything.
        num_threads: of the server.
        calm: nothing is cancelled, closed or made to fail; so no call may fail.
        forks: how often one more thread forks the process, and looks at the child.
        prefer: names of calls, as the trace has them, that are made more often.
        lines: threads can be left at each line, not only at sections, waits and calls of the backend.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_threads: int = 3,
        calm: bool = False,
        forks: int = 0,
        prefer: Collection[str] = (),
        lines: bool = False,
    ) -> None:
        self.simulation = Simulation(RandomChooser(seed))
        self.simulation.device.takes_marks = seed % 2 == 0
        self.cache = DeviceCache(SPEC, num_threads * OWN_BLOCKS, "cpu")
        self.pool = HostPool(SPEC, HOST_BLOCKS)
        self.policy = ("lru", "arc", "s3fifo")[seed % 3]
        self.site = self._open()
        self.layers = [HookedLayer() for _ in range(LAYERS)]
        self.hooks = LayerHooks(self.layers)
        self.seed, self.calm, self.forks, self.prefer, self.lines = seed, calm, forks, frozenset(prefer), lines
        self.trace: list[str] = []
        self._renewing = False
        self.clients = [Client(self, number, seed) for number in range(num_threads)]

    def _open(self) -> Site:
        scheduler = LayerwiseScheduler(self.cache, self.pool, backend=self.simulation.backend())
        capacity_bytes = CAPACITY_BLOCKS * SPEC.block_bytes * LAYERS
        manager = KVOffloadManager(scheduler, policy=self.policy, capacity_bytes=capacity_bytes)
        return Site(scheduler, manager, CacheTransferManager(scheduler))

    def run(self, num_steps: int) -> None:
        functions: list[Callable[[], object]] = [functools.partial(client.run, num_steps) for client in self.clients]
        self._in_threads([*functions, *([self._fork] if self.forks else [])])

    def _in_threads(self, functions: list[Callable[[], object]]) -> None:
        streams = [client.stream for client in self.clients]
        self.simulation.host.run(functions, streams=streams, lines=self.lines)

    @property
    def moves(self) -> int:
        """Blocks that were moved."""
        return sum(client.moves for client in self.clients)

    def renew(self) -> None:
        """Closes what the threads call, under them, and opens it anew."""
        if not self._renewing:
            self._renewing = True
            self.site.manager.close()
            self.site.scheduler.close()
            self.site = self._open()
            self._renewing = False

    def _fork(self) -> None:
        chance = random.Random(self.seed)
        for _ in range(self.forks):
            for _ in range(chance.randint(1, 6)):
                self.simulation.device.switch_point()
            self.note("fork")
            status = self.simulation.host.fork(self._check_child)
            assert status == 0, f"a forked child ended with status {status}"

    def _check_child(self) -> None:
        """All of it is whole, whatever the other threads were about, and can be used."""
        held = change(self.pool.domain, lambda: self.pool.domain.busy(range(HOST_BLOCKS)))
        held += change(self.cache.domain, lambda: self.cache.domain.busy(range(self.cache.num_blocks)))
        assert not held and not self.pool.domain.group.transfers, f"held in the child: {held}"
        manager = self.site.manager
        if not manager._books.closed:
            self._check_books()
            for key in KEYS:
                if manager.peek([key]):
                    slot = manager._books.index.slots[key]
                    found = [self.simulation.contents(self.pool, slot, layer) for layer in range(LAYERS)]
                    assert found == [one.version for one in content_of(key)], f"{key!r} holds {found} in the child"
        self.simulation.device.break_copy(0)
        self.simulation.device.break_submission(0)
        self.cache.mark_rewritten([0])
        with LayerwiseScheduler(self.cache, self.pool, backend=self.simulation.backend()) as scheduler:
            scheduler.offload([0], [0]).wait()

    def _check_books(self) -> None:
        books = self.site.manager._books

        def compare() -> None:
            books.settle()
            slots = list(books.index.slots.values())
            assert len(set(slots)) == len(slots) and set(slots) == books.slots.taken <= self.pool._allocated, (
                f"the manager has {slots}, has taken {books.slots.taken} of {self.pool._allocated}"
            )
            assert books.index.arriving.keys() <= set(books.index.slots), "something arrives that is not there"
            brought = {key for one in books.moves.moving for job in one.jobs for key in job.keys}
            assert books.index.arriving.keys() <= brought, "nothing brings what is arriving"

        change(books, compare)

    def finish(self) -> None:
        """All ends, nothing is held, every byte that was read was right, and each access had its order."""
        self.trace.append("finish")
        self._in_threads([client.finish for client in self.clients])
        self.site.scheduler.drain(CLOSE_TIMEOUT_S)
        self._check_books()
        self.site.manager.close()
        self.site.scheduler.close(CLOSE_TIMEOUT_S)
        self.simulation.verify()
        for client in self.clients:
            client.check()
        assert self.pool.num_free_blocks == HOST_BLOCKS, f"{self.pool.num_free_blocks} of {HOST_BLOCKS} are free"
        self.pool.close()

    def abandon(self) -> None:
        """After a failure: nothing of this run may disturb the next one."""
        self.simulation.device.chooser = LateChooser()
        with contextlib.suppress(Exception):
            self.simulation.run()
            self.site.scheduler.close(1.0)

    def note(self, line: str) -> None:
        self.trace.append(line)
