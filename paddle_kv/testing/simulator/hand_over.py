"""A receiver and its senders, each a process of its own, on the simulator: with messages that are late, lost, doubled,
out of order and forged, senders that die, and deadlines that pass whenever chance says so.

All of it runs in one process. What makes two of it: a sender has the receiver's pool as another process has it, with
the same memory and a tracking of its own (:class:`OtherView`); and nothing goes from one to the other but messages.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import PaddleKVError
from ...layout import KVCacheSpec
from ...memory import DeviceCache, HostPool
from ...memory.free_extents import FreeExtents
from ...peers import Receiver, Sender
from ...peers.grant import Grant
from ...peers.messages import encode
from ...peers.receiver import receivers
from ...schedule.scheduler import LayerwiseScheduler
from ...schedule.transfer import Transfer
from ...tracking.domain import BlockDomain
from ...tracking.group import change
from .chooser import LateChooser, RandomChooser
from .simulation import Computation, Simulation

LAYERS = 3
SPEC = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=4, block_size=1, dtype="float16")
BLOCKS, HOST_BLOCKS, NUM_SENDERS = 6, 5, 2
# How often a message overtakes others, is lost, is late, comes twice. Those of the first two cost no load.
NETWORKS = ((0.0, 0.0, 0.4, 0.0), (0.0, 0.0, 0.4, 0.4), (0.0, 0.3, 0.0, 0.0), (0.1, 0.02, 0.03, 0.05))
MOST_ROUNDS = 60  # of delivering and of alarms, until all must be over
TIMEOUT_S = 10.0


class OtherView(HostPool):
    """A pool as another process has it that has attached its memory."""

    def __init__(self, pool: HostPool) -> None:
        self._set_up(pool.spec, pool.num_blocks)
        self._memory = list(pool._memory)
        self._pointers.update(pool._pointers)
        self._strides.update(pool._strides)
        self.domain = BlockDomain(pool.domain.tensors, pool.num_blocks)
        self._free = FreeExtents(self.num_blocks)
        self._free.allocate(self.num_blocks)
        self._attached = True


class Alarms:
    """Whose time comes when somebody says so."""

    def __init__(self) -> None:
        self.left: list[Callable[[], object]] = []

    def add(self, at_s: float, function: Callable[[], object]) -> None:
        self.left.append(function)

    def close(self) -> None:
        self.left = []


@dataclass(eq=False)
class Save:
    """What a sender does with a grant."""

    transfer: Transfer
    blocks: list[int]
    version: str
    unmarked: list[int]


@dataclass(eq=False)
class Process:
    """A sender: the peer of the receiver, and what runs at the other end."""

    number: int
    site: HandOver
    cache: DeviceCache
    scheduler: LayerwiseScheduler
    stream: Any
    streams: list[Any]
    sender: Any = None
    saves: list[Save] = field(default_factory=list)
    dead: bool = False
    cut: bool = False  # nothing is heard of it any more

    def send(self, data: bytes) -> None:
        """From the receiver."""
        if not self.cut:
            self.site.put(self, lambda: self.dead or self.sender.received(data))

    def say(self, data: bytes) -> None:
        """To the receiver."""
        if not (self.dead or self.cut):
            self.site.put(self, lambda: self.site.receiver.received(self, data), data)

    def forget(self) -> None:
        """How its saves have ended is told: nobody else asks."""
        for save in self.saves:
            _ = save.transfer.error

    @property
    def busy(self) -> set[int]:
        return {block for save in self.saves if not save.transfer.done() for block in save.blocks}


@dataclass(eq=False)
class Load:
    """What the receiver waits for."""

    transfer: Transfer
    grant: Grant
    blocks: list[int]
    version: str
    waited: int = 0  # layers
    seen: list[tuple[int, Computation]] = field(default_factory=list)
    offered: bool = False


class HandOver:
    """Args:
    seed: of all choices.
    drop: what the backends leave out, see :class:`Simulation`.
    """

    def __init__(self, seed: int, *, drop: Collection[str] = ()) -> None:
        self.random = random.Random(seed)
        self.simulation = Simulation(RandomChooser(seed), drop=drop)
        self.cache, self.pool = DeviceCache(SPEC, BLOCKS, "cpu"), HostPool(SPEC, HOST_BLOCKS, shared=True)
        self.scheduler = LayerwiseScheduler(self.cache, self.pool, backend=self.simulation.backend())
        self.receiver = Receiver(self.scheduler)
        receivers.discard(self.receiver)  # it is another process's
        self.alarms = Alarms()
        setattr(self.receiver, "_alarms", self.alarms)  # noqa: B010  they are never early or late by a clock
        self.in_flight: list[tuple[Callable[[], object], bytes, Process]] = []
        self.delivering = self.over = False
        self.loads: list[Load] = []
        self.kept: dict[int, tuple[int, str]] = {}  # host block -> what the receiver has saved to it
        self.trace: list[str] = []
        self.network = NETWORKS[seed % len(NETWORKS)]
        self.quiet = False  # messages arrive, in order
        self.num_versions = self.num_loaded = self.num_failed = 0
        self.all = [self._start(number) for number in range(NUM_SENDERS)]

    # ---- the network ----
    def put(self, process: Process, deliver: Callable[[], object], data: bytes = b"") -> None:
        """``data``: what it says; none: it is something that it hears."""
        self.in_flight.append((deliver, data, process))
        self.simulation.host.post(self._perhaps_deliver)

    def _perhaps_deliver(self) -> None:
        self.deliver()
        if self.in_flight and self.random.random() < 0.8:
            self.simulation.host.post(self._perhaps_deliver)

    def deliver(self) -> None:
        """One message: any of those that are under way, perhaps again later, perhaps not at all."""
        if not self.in_flight or self.delivering:
            return
        disorder, lost, late, twice = (0.0,) * 4 if self.quiet else self.network
        at = self.random.randrange(len(self.in_flight)) if self.random.random() < disorder else 0
        one = deliver, _, _ = self.in_flight[at]
        if self.random.random() < late:
            return
        self.in_flight.remove(one)
        if self.random.random() < twice:
            self.in_flight.insert(self.random.randint(0, len(self.in_flight)), one)
        if self.random.random() < lost:
            self.note("a message is lost")
            return
        self.delivering = True  # a channel has one thread
        try:
            deliver()
        finally:
            self.delivering = False

    # ---- processes ----
    def _start(self, number: int) -> Process:
        cache = DeviceCache(SPEC, BLOCKS, "cpu")
        stream = self.simulation.stream(f"prefill-{len(self.simulation.device.streams)}")
        first = len(self.simulation.device.streams)
        scheduler = LayerwiseScheduler(
            cache, OtherView(self.pool), compute_stream=stream, backend=self.simulation.backend()
        )
        made = Process(number, self, cache, scheduler, stream, [stream, *self.simulation.device.streams[first:]])
        made.sender = SimulatedSender(scheduler, made.say, pool_id=self.pool.memory_id)
        return made

    def kill(self, process: Process) -> None:
        """Nothing of it runs any more; the receiver hears of it."""
        self.note(f"sender {process.number} dies")
        process.forget()
        process.dead = True
        log = self.simulation.log
        for stream in process.streams:
            del stream.items[stream.position :]
        for name, stream in list(log.stream_names.values()):
            if stream in process.streams:
                number = log.next_mark()
                log.record(name, number)
                log.observe(number)  # nothing of it comes any more
        process.sender._process_id = process.scheduler._process_id = -1

        def forget() -> None:
            for one in list(process.scheduler.group.transfers.values()):
                one.abandon()

        change(process.scheduler, forget)
        said = [one for one in self.in_flight if one[2] is process and one[1]]
        self.in_flight = [one for one in self.in_flight if one[2] is not process]
        self.receiver.lost(process)
        for deliver, _, _ in said:  # what it had said before is heard before, or is gone
            if self.random.random() < 0.5:
                deliver()
        self.receiver.gone(process)
        if not self.over:
            self.all[self.all.index(process)] = self._start(process.number)

    def cut(self, process: Process) -> None:
        """Its connection ends, and it goes on for a while."""
        self.note(f"the connection of sender {process.number} ends")
        process.cut = True
        self.in_flight = [one for one in self.in_flight if one[2] is not process]
        self.receiver.lost(process)

    # ---- what they do ----
    def run(self, num_steps: int) -> None:
        actions: list[tuple[Callable[[], object], float]] = [
            (self.grant, 6),
            (self.begin, 10),
            (self.mark, 24),
            (self.look, 24),
            (self.deliver, 12),
            (self.keep, 4),
            (self.fetch, 4),
            (self.revoke, 1),
            (self.cancel, 0.3),
            (self.alarm, 0.5),
            (self.forge, 4),
            (self.die, 1),
        ]
        calls, weights = [action for action, _ in actions], [weight for _, weight in actions]
        for _ in range(num_steps):
            self.random.choices(calls, weights)[0]()

    def grant(self) -> None:
        used = {block for load in self.loads for block in load.blocks}
        free = [block for block in range(BLOCKS) if block not in used]
        if not free:
            return
        blocks = self.random.sample(free, min(len(free), self.random.randint(1, 2)))
        with contextlib.suppress(MemoryError):
            transfer, grant = self.receiver.grant(blocks, timeout_s=3600.0)
            self.num_versions += 1
            self.loads.append(Load(transfer, grant, blocks, f"prompt {self.num_versions}"))
            self.note(f"grant {blocks} through {grant.host_block_ids} for {self.loads[-1].version}")

    def begin(self) -> None:
        """Somebody who has heard of the grant, also a second one."""
        loads = [load for load in self.loads if not load.offered or self.random.random() < 0.2]
        process = self.random.choice(self.all)
        free = [block for block in range(BLOCKS) if block not in process.busy]
        if not loads or len(free) < 2 or process.cut:
            return
        load = self.random.choice(loads)
        grant = load.grant
        if self.random.random() < 0.1:  # not as it was given
            ids = self.random.sample(range(HOST_BLOCKS), len(grant.host_block_ids))
            grant = replace(grant, host_block_ids=tuple(ids))
        version = f"{load.version} of another" if load.offered else load.version
        load.offered = True
        blocks = self.random.sample(free, len(load.blocks))
        try:
            transfer = process.sender.send(grant, blocks, timeout_s=TIMEOUT_S)
        except (PaddleKVError, ValueError, TimeoutError) as error:
            self.note(f"sender {process.number} does not begin {load.version}: {error}")
            return
        load.version = version  # it was let in: what it writes is right
        self.note(f"sender {process.number} begins {version} from {blocks}")
        process.saves.append(Save(transfer, blocks, version, list(range(LAYERS))))

    def mark(self) -> None:
        saves = [(process, save) for process in self.all for save in process.saves if save.unmarked]
        if saves:
            self._mark(*self.random.choice(saves))

    def _mark(self, process: Process, save: Save) -> None:
        layer = save.unmarked.pop(self.random.randrange(len(save.unmarked)))
        writes = [(process.cache, block, layer) for block in save.blocks]
        if not save.transfer.done():
            self.simulation.compute(writes=writes, stream=process.stream, version=save.version)
            with contextlib.suppress(PaddleKVError, ValueError):
                save.transfer.mark_layer_written(layer)

    def look(self) -> None:
        """The receiver's model at the next layer of a load, or its end."""
        if self.loads:
            self._look(self.random.choice(self.loads), 0.0)

    def _look(self, load: Load, timeout_s: float) -> None:
        try:
            if load.waited < LAYERS:
                load.transfer.wait_layer(load.waited, timeout_s=timeout_s)
                reads = [(self.cache, block, load.waited) for block in load.blocks]
                load.seen.append((load.waited, self.simulation.compute(reads=reads, label="attention")))
                load.waited += 1
                return
            load.transfer.wait(timeout_s)
        except TimeoutError:
            return
        except PaddleKVError:
            if load.transfer.done():
                self._end(load)
            return
        self._end(load)

    def _end(self, load: Load) -> None:
        self.loads.remove(load)
        arrived = load.transfer.state.value == "done"
        self.num_loaded += arrived
        self.num_failed += not arrived
        self.note(f"{load.version} is {load.transfer.state.value}")
        self.simulation.device.drain([self.simulation.compute_stream])
        for layer, computation in load.seen if load.transfer.state.value != "cancelled" else ():
            for block in load.blocks:
                found = computation.saw(self.simulation.location(self.cache, block, layer))
                assert found == load.version, f"layer {layer} of {load.version} held {found} when it was read"
        for block in load.blocks if arrived else ():
            for layer in range(LAYERS):
                found = self.simulation.contents(self.cache, block, layer)
                assert found == load.version, f"layer {layer} of {load.version} holds {found}"
        if not arrived:
            poisoned = self.cache.domain.poisoned(load.blocks)
            assert poisoned == load.blocks, f"of {load.blocks}, which did not come, {poisoned} are poisoned"
            self.cache.mark_rewritten(load.blocks)

    def keep(self) -> None:
        """The receiver saves a block of its own to host memory."""
        used = {block for load in self.loads for block in load.blocks}
        free = [block for block in range(BLOCKS) if block not in used]
        with contextlib.suppress(MemoryError):
            if free and len(self.kept) < 2:
                [host] = self.pool.allocate(1)
                self.num_versions += 1
                version, block = f"own {self.num_versions}", self.random.choice(free)
                writes = [(self.cache, block, layer) for layer in range(LAYERS)]
                self.simulation.compute(writes=writes, version=version)
                self.scheduler.offload([block], [host]).wait()
                self.kept[host] = (block, version)
                self.note(f"{version} is in host block {host}")

    def fetch(self) -> None:
        """It looks at what it has saved, and frees it."""
        if self.kept:
            host = self.random.choice(list(self.kept))
            _, version = self.kept.pop(host)
            for layer in range(LAYERS):
                found = self.simulation.contents(self.pool, host, layer)
                assert found == version, f"host block {host} holds {found}; {version} was saved to it"
            self.pool.free([host])

    def revoke(self) -> None:
        if self.loads:
            load = self.random.choice(self.loads)
            self.note(f"{load.version} is revoked")
            self.receiver.revoke(load.grant)

    def cancel(self) -> None:
        saves = [save for process in self.all for save in process.saves]
        if saves:
            self.random.choice(saves).transfer.cancel()

    def alarm(self) -> None:
        """The time has come for something."""
        if self.alarms.left:
            self.alarms.left.pop(self.random.randrange(len(self.alarms.left)))()

    def forge(self) -> None:
        """Messages of somebody who is not the one, and one that is damaged."""
        process = self.random.choice(self.all)
        others = [one for one in self.receiver._granted.values() if one.peer not in (None, process)]
        for one in others[:1]:
            names = one.grant.grant_id, one.begin_id
            self.receiver.received(process, encode("layers", *names, first=one.next_layer, end=LAYERS))
            self.receiver.received(process, encode("failed", *names, reason="forged"))
        said = [one for one in self.in_flight if b'"layers"' in one[1]]
        for _, data, sender in said[:1]:
            self.receiver.received(sender, re.sub(rb'"end":[0-9]', b'"end":%d' % LAYERS, data, count=1))

    def die(self) -> None:
        process = self.random.choice(self.all)
        if process.cut or (process.saves and self.random.random() < 0.3):
            self.kill(process)
        elif process.saves:
            self.cut(process)

    def note(self, line: str) -> None:
        self.trace.append(line)

    @property
    def harmless(self) -> bool:
        """Whether the network costs no load."""
        return self.network in NETWORKS[:2]

    def _is_begun(self, load: Load) -> bool:
        granted = self.receiver._granted.get(load.grant.grant_id)
        return granted is not None and granted.peer is not None

    # ---- the end ----
    def finish(self) -> None:
        """Messages are not lost any more, and senders do what they have begun: then everything ends."""
        self.note("finish")
        self.quiet = True
        for process in list(self.all):
            if process.cut:
                self.kill(process)
        for process in self.all:
            for save in process.saves:
                while save.unmarked and (self.harmless or self.random.random() < 0.7):
                    self._mark(process, save)
        for number in range(MOST_ROUNDS):
            while self.in_flight:
                self.deliver()
            self.simulation.run()
            for load in list(self.loads):
                self._look(load, 0.0)
            if not self.loads and not self.receiver._granted:
                break
            if number == MOST_ROUNDS // 2 and self.harmless:
                begun = [load.version for load in self.loads if self._is_begun(load)]
                assert not begun, f"{begun} are not over without their deadlines"
            if number > MOST_ROUNDS // 2:  # first all that can come, then the deadlines
                due, self.alarms.left = self.alarms.left, []
                for one in due:
                    one()
        assert not self.loads and not self.receiver._granted, (
            f"{len(self.loads)} loads and {len(self.receiver._granted)} grants never end"
        )
        while self.kept:
            self.fetch()
        for process in self.all:
            process.sender.close(TIMEOUT_S)
            process.forget()
            process.scheduler.close(TIMEOUT_S)
        self.receiver.close(TIMEOUT_S)
        self.scheduler.close(TIMEOUT_S)
        self.simulation.verify(closed=False)  # processes that died have given nothing back
        assert self.pool.num_free_blocks == HOST_BLOCKS, f"{self.pool.num_free_blocks} of {HOST_BLOCKS} are free"
        self.pool.close()

    def abandon(self) -> None:
        """After a failure: nothing of this run may disturb the next one."""
        self.over = True
        self.simulation.device.chooser = LateChooser()
        for process in self.all:
            with contextlib.suppress(Exception):
                self.kill(process)
        for load in self.loads:
            _ = load.transfer.error
        with contextlib.suppress(Exception):
            self.simulation.run()
        for scheduler in (self.scheduler, *(process.scheduler for process in self.all)):
            with contextlib.suppress(Exception):
                change(scheduler, lambda one=scheduler: [m.abandon() for m in list(one.group.transfers.values())])  # type: ignore[misc]


class SimulatedSender(Sender):
    """Which writes into a pool that has another name in its process."""

    def __init__(self, scheduler: LayerwiseScheduler, send: Callable[[bytes], object], *, pool_id: str) -> None:
        self._named = pool_id
        super().__init__(scheduler, send)

    def _find_pool_id(self) -> str:
        return self._named


def play(seed: int, num_steps: int = 120, **options: Any) -> HandOver:
    """A run. AssertionError: something was wrong; its text has the trace."""
    made = HandOver(seed, **options)
    try:
        made.run(num_steps)
        made.finish()
    except BaseException as error:
        made.abandon()
        if isinstance(error, Exception) or type(error).__name__ == "Deadlock":
            trace = "\n".join(made.trace[-30:])
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n{trace}") from error
        raise
    return made
