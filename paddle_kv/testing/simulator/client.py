"""One thread of a server that calls a manager and an adapter at random, and knows what its blocks must hold."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import CancelledError, ClosedError, TransferError
from ...integrations import ForwardPass, LayerHooks
from ...memory import DeviceCache, HostPool
from ...schedule.transfer import Transfer
from .log import Location
from .simulation import Computation, Simulation

LAYERS = 2
OWN_BLOCKS = 4  # device blocks of each thread
KEYS = [bytes([number]) for number in range(7)]  # of one prompt
LONGEST = 4  # blocks of a call


class Shared(Protocol):
    """What the threads have in common: see :class:`~paddle_kv.testing.simulator.clients.Clients`."""

    simulation: Simulation
    cache: DeviceCache
    pool: HostPool
    site: Any
    layers: Any
    hooks: LayerHooks
    clients: list[Client]
    seed: int
    calm: bool
    prefer: frozenset[str]

    def note(self, line: str) -> None: ...

    def renew(self) -> None: ...


class LeftEarly(Exception):
    """The server gives up a pass through the model."""


@dataclass(frozen=True)
class Content:
    """What was written: a version, if the transfers that brought it succeed; None: nothing that anybody relies on."""

    version: str | None = None
    needs: tuple[Any, ...] = ()

    def known(self) -> str | None:
        return None if any(one.failed for one in self.needs) else self.version

    def moved_by(self, transfer: Transfer) -> Content:
        return Content(self.version, (*self.needs, transfer._movement))


NOTHING = [Content()] * LAYERS
FAVOUR = 100  # so much likelier is a call that is preferred


def content_of(key: bytes) -> list[Content]:
    """Of a block of the prompt: the hash says what it holds."""
    return [Content(f"key {key[0]}.{layer}") for layer in range(LAYERS)]


def _name(call: Callable[[], object]) -> str:
    return call.__name__.strip("_")


class Client:
    """Owns device blocks, and the host blocks that it allocates; what the manager keeps is everybody's."""

    def __init__(self, clients: Shared, number: int, seed: int) -> None:
        self.stream = clients.simulation.stream(f"compute of thread {number}")
        self.errors = self.moves = 0
        self._all, self._number = clients, number
        self._chance = random.Random(1000 * seed + number)
        self._versions = 0
        blocks = range(number * OWN_BLOCKS, (number + 1) * OWN_BLOCKS)
        self._device: dict[int, list[Content]] = dict.fromkeys(blocks, NOTHING)
        self._keys: dict[int, bytes] = {}  # what a device block holds of the prompt
        self._users: dict[int, list[Transfer]] = {block: [] for block in blocks}  # that the stream is not behind
        self._host: dict[int, list[Content]] = {}
        self._adapted: dict[int, bool] = {}  # whether the FastDeploy adapter alone has written a host block
        self._open: list[Transfer] = []
        self._reads: list[tuple[Computation, Location, Content]] = []

    def run(self, num_steps: int) -> None:
        for block in self._device:
            self._write(block)
        with contextlib.suppress(MemoryError):
            self._allocate()
        calls, weights = zip(*self._choices().items(), strict=True)
        for _ in range(num_steps):
            call = self._chance.choices(calls, weights)[0]
            self._all.simulation.device.switch_point()
            self._all.note(f"thread {self._number}: {_name(call)}")
            try:
                call()
            except (TransferError, CancelledError, ClosedError) as error:
                self._refused(error)
            except MemoryError:
                self._all.note("  too few free")

    def _choices(self) -> dict[Callable[[], object], float]:
        calls: dict[Callable[[], object], float] = {
            self._compute: 3,
            self._save: 6,
            self._evicted: 6,
            self._load: 6,
            self._pass: 4,
            self._to_host: 4,
            self._to_device: 4,
            self._sync: 2,
            self._move: 4,
            self._event: 1,
            self._evict: 1,
            self._allocate: 2,
            self._free: 1,
            self._host_read: 1,
            self._wait: 2,
        }
        if not self._all.calm:
            calls.update({self._cancel: 2, self._drop: 1, self._all.renew: 0.5, self._break: 0.7})
        # Some calls often and others hardly, in each run other ones, find more than all of them in each run.
        liking = random.Random(self._all.seed)
        for call in calls:
            liked = liking.choice([0.1, 1, 6])
            calls[call] *= FAVOUR if _name(call) in self._all.prefer else liked
        return calls

    def _refused(self, error: Exception) -> None:
        self._all.note(f"  {type(error).__name__}: {error}")
        self.errors += 1
        assert not self._all.calm, f"nothing was cancelled, closed or made to fail: {error!r}"

    # ---- computation ----
    def _compute(self) -> None:
        block = self._chance.choice(list(self._device))
        self._await(block)
        if self._chance.random() < 0.5:
            self._write(block)
        else:
            self._read(block)

    def _read(self, block: int, layers: Sequence[int] = range(LAYERS)) -> None:
        for layer in layers:
            place = (self._all.cache, block, layer)
            seen = self._all.simulation.compute(reads=[place], stream=self.stream)
            self._reads.append((seen, self._all.simulation.location(*place), self._device[block][layer]))

    def _write(self, block: int, contents: list[Content] | None = None) -> None:
        """The stream is behind all that uses the block."""
        self._versions += 1
        self._keys.pop(block, None)
        mine = [Content(f"{self._number}/{self._versions}.{layer}") for layer in range(LAYERS)]
        for layer in range(LAYERS):
            self._write_layer(block, layer, (contents or mine)[layer])
        self._all.cache.mark_rewritten([block])

    def _write_layer(self, block: int, layer: int, content: Content) -> None:
        written = [(self._all.cache, block, layer)]
        self._all.simulation.compute(writes=written, stream=self.stream, version=content.version)
        self._device[block] = [content if one == layer else old for one, old in enumerate(self._device[block])]

    def _write_prompt(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self._await(block)
            self._write(block, content_of(key))
            self._keys[block] = key

    def _await(self, *blocks: int) -> None:
        """The stream comes behind all transfers that use the blocks."""
        for block in blocks:
            for transfer in self._users[block]:
                self._wait_for(transfer)
            self._users[block] = []

    def _wait_for(self, transfer: Transfer) -> None:
        try:
            self._chance.choice([self._host_wait, self._wait_on, self._wait_layers])(transfer)
        except (TransferError, CancelledError) as error:
            self._refused(error)
            transfer.wait_over()

    def _host_wait(self, transfer: Transfer) -> None:
        transfer.wait()

    def _wait_on(self, transfer: Transfer) -> None:
        transfer.wait_on()

    def _wait_layers(self, transfer: Transfer) -> None:
        for layer in range(LAYERS):
            transfer.wait_layer(layer)

    # ---- the manager ----
    def _save(self) -> None:
        keys, blocks = self._prompt()
        self._write_prompt(keys, blocks)
        self._started(self._checked(self._all.site.manager, keys, blocks), blocks)

    def _checked(self, manager: Any, keys: Sequence[bytes], blocks: Sequence[int], **options: Any) -> Transfer:
        """A save. What is left out has to be the end of what it was given."""
        save: Transfer = manager.save(keys, blocks, **options)
        left, moved = manager.left_out(save), [blocks.index(block) for block in save.plan.device_ids.tolist()]
        assert not left or max(moved, default=-1) < left[0], f"{keys} left out {left}, moved {moved}"
        return save

    def _evicted(self) -> None:
        """Gives blocks of the prompt to somebody else."""
        blocks = [block for block in self._keys if self._chance.random() < 0.7]
        if not blocks:
            return self._save()
        gone = self._all.site.manager.blocks_evicted([self._keys[block] for block in blocks], blocks)
        self._wait_for(gone)  # and for nothing else
        for block in blocks:
            if gone.failed:
                self._await(block)
            self._users[block] = []
            self._write(block)

    def _load(self) -> None:
        keys, blocks = self._prompt()
        manager = self._all.site.manager
        lease = manager.lookup(keys)
        found = blocks[: lease.num_blocks]
        self._lose(found)
        self._started(self._onload(manager, lease, found), found)
        if self._chance.random() < 0.7:
            for block in found:
                self._await(block)
                self._read(block)

    def _onload(self, manager: Any, lease: Any, blocks: list[int]) -> Transfer:
        load: Transfer = manager.onload(lease.hashes, blocks)
        if self._chance.random() < 0.5:
            lease.release()  # else it goes with the last reference
        for key, block in zip(lease.hashes, blocks, strict=True):
            self._device[block] = [content.moved_by(load) for content in content_of(key)]
        return load

    def _pass(self) -> None:
        """The model computes the rest of a prompt from the prefix that was found, and each layer is saved."""
        keys, blocks = self._prompt(first=0)
        manager = self._all.site.manager
        lease = manager.lookup(keys)
        found, rest = blocks[: lease.num_blocks], blocks[lease.num_blocks :]
        self._lose(found)
        self._await(*rest)
        load = self._started(self._onload(manager, lease, found), found)
        options: dict[str, Any] = {"layerwise": True, "computed_from": [load]}
        save = self._started(self._checked(manager, keys[len(found) :], rest, **options), rest)
        through = self._by_hooks if self._chance.random() < 0.5 else self._by_hand
        last = LAYERS if self._all.calm or self._chance.random() < 0.8 else self._chance.randrange(LAYERS)
        body = functools.partial(self._layer, found, dict(zip(rest, keys[len(found) :], strict=True)), last)
        try:
            through([load], [save], body)
        except LeftEarly:
            self._all.note("  left early")
        self._all.cache.mark_rewritten(rest)

    def _layer(self, found: Sequence[int], rest: dict[int, bytes], last: int, layer: int) -> None:
        if layer == last:
            raise LeftEarly
        for block in found:
            self._read(block, [layer])
        for block, key in rest.items():
            self._keys.pop(block, None)
            self._write_layer(block, layer, content_of(key)[layer])

    def _by_hand(self, loads: list[Transfer], saves: list[Transfer], body: Callable[[int], None]) -> None:
        with ForwardPass(loads, saves) as layers:
            for layer in range(LAYERS):
                with layers.layer(layer):
                    body(layer)

    def _by_hooks(self, loads: list[Transfer], saves: list[Transfer], body: Callable[[int], None]) -> None:
        with self._all.hooks.forward_pass(loads, saves):
            for layer in range(LAYERS):
                self._all.layers[layer](functools.partial(body, layer))

    def _evict(self) -> None:
        self._all.site.manager.evict(self._chance.randint(1, 3))

    def _drop(self) -> None:
        manager = self._all.site.manager
        way = self._chance.randrange(3)
        if way == 0:
            manager.drop(self._prompt()[0])
        else:
            (manager.clear if way == 1 else manager.cancel_all)()

    # ---- the adapter ----
    def _to_host(self) -> None:
        blocks, hosts = self._pairs()
        contents = [self._device[block] for block in blocks]
        ordered = self._chance.random() < 0.7
        before = {host: self._adapted[host] for host in hosts}
        self._forget(hosts)
        save = self._all.site.mover.evict_to_host_async(blocks, hosts, order_compute=ordered)
        for host, content in zip(hosts, contents, strict=True):
            self._host[host] = [one.moved_by(save) for one in content]
            self._adapted[host] = before[host]
        if not ordered:
            self._started(save, blocks)
        del save
        for block in blocks if ordered and self._chance.random() < 0.7 else ():
            self._await(block)
            self._write(block)

    def _to_device(self) -> None:
        blocks, hosts = self._pairs()
        before = [self._device[block] for block in blocks]
        self._lose(blocks)
        events: dict[int, Any] = {}
        mover = self._all.site.mover

        def submitted(layer: int) -> None:
            self._all.simulation.device.switch_point()  # the server's code
            events[layer] = mover.record_input_stream_event()

        layers = list(range(LAYERS)) if self._chance.random() < 0.8 else [self._chance.randrange(LAYERS)]
        by_events = self._chance.random() < 0.7
        load = mover.load_layers_to_device_async(layers, hosts, blocks, submitted if by_events else None)
        self._started(load, blocks)
        for block, host, old in zip(blocks, hosts, before, strict=True):
            found = [self._host[host][layer] if layer in layers else old[layer] for layer in range(LAYERS)]
            self._device[block] = [content.moved_by(load) for content in found]
        for layer, event in events.items():
            event.synchronize()
            for block in blocks:
                self._read(block, [layer])
        if not by_events:
            mover.sync_input_stream()
            for block in blocks:
                self._read(block)

    def _sync(self) -> None:
        """Behind it the host may read what the adapter has saved."""
        hosts = [host for host in self._host if self._adapted[host]]
        self._all.site.mover.sync_output_stream()
        for host in hosts:
            self._look(host)

    def _move(self) -> None:
        """Past the adapter, by the scheduler."""
        blocks, hosts = self._pairs()
        if self._chance.random() < 0.5:
            contents = [self._device[block] for block in blocks]
            self._forget(hosts)
            save = self._started(self._all.site.scheduler.offload(blocks, hosts), blocks)
            for host, content in zip(hosts, contents, strict=True):
                self._host[host] = [one.moved_by(save) for one in content]
        else:
            self._lose(blocks)
            load = self._started(self._all.site.scheduler.onload(hosts, blocks, urgent=True), blocks)
            for block, host in zip(blocks, hosts, strict=True):
                self._device[block] = [content.moved_by(load) for content in self._host[host]]

    def _event(self) -> None:
        event = self._all.site.mover.record_input_stream_event()
        if self._chance.random() < 0.5:
            self._compute()
        event.synchronize()

    # ---- host blocks ----
    def _allocate(self) -> None:
        for host in self._all.pool.allocate(self._chance.randint(1, 2)):
            assert not any(host in client._host for client in self._all.clients), f"block {host} was given out twice"
            self._host[host], self._adapted[host] = NOTHING, True
            if self._chance.random() < 0.7:
                self._versions += 1
                contents = [Content(f"host {self._number}/{self._versions}.{layer}") for layer in range(LAYERS)]
                for layer, content in enumerate(contents):
                    place = [(self._all.pool, host, layer)]
                    self._all.simulation.touch_on_host(writes=place, version=content.version)
                self._host[host] = contents

    def _free(self) -> None:
        if self._host:
            host = self._chance.choice(list(self._host))
            del self._host[host], self._adapted[host]
            self._all.pool.free([host])

    def _host_read(self) -> None:
        if self._host:
            host = self._chance.choice(list(self._host))
            with self._all.pool.lease([host]):
                self._look(host)

    def _look(self, host: int) -> None:
        for layer in range(LAYERS):
            place = (self._all.pool, host, layer)
            seen = self._all.simulation.touch_on_host(reads=[place])
            self._reads.append((seen, self._all.simulation.location(*place), self._host[host][layer]))

    # ---- transfers ----
    def _wait(self) -> None:
        if self._open:
            self._wait_for(self._chance.choice(self._open))

    def _cancel(self) -> None:
        if self._open:
            self._chance.choice(self._open).cancel()

    def _break(self) -> None:
        device = self._all.simulation.device
        if self._chance.random() < 0.5:
            device.break_copy(self._chance.randint(1, 12))
        else:
            device.break_submission(self._chance.randint(1, 3))

    def _started(self, transfer: Transfer, blocks: Sequence[int]) -> Transfer:
        self.moves += len(transfer.plan.device_ids)
        self._open = [*self._open[-4:], transfer]
        for block in blocks:
            self._users[block].append(transfer)
        return transfer

    def _lose(self, blocks: Sequence[int]) -> None:
        """What the device blocks hold is not known before a call has succeeded that writes them."""
        for block in blocks:
            self._keys.pop(block, None)
            self._device[block] = NOTHING

    def _forget(self, hosts: Sequence[int]) -> None:
        for host in hosts:
            self._host[host], self._adapted[host] = NOTHING, False

    def _prompt(self, first: int | None = None) -> tuple[list[bytes], list[int]]:
        """A part of the prompt, and blocks for it."""
        first = self._chance.randrange(len(KEYS) - 1) if first is None else first
        keys = KEYS[first : first + self._chance.randint(1, LONGEST)]
        return keys, self._chance.sample(list(self._device), len(keys))

    def _pairs(self) -> tuple[list[int], list[int]]:
        count = min(len(self._host), self._chance.randint(1, 2))
        return self._chance.sample(list(self._device), count), self._chance.sample(list(self._host), count)

    # ---- the end ----
    def finish(self) -> None:
        """Behind the threads: reads all that is left, and frees it."""
        for block in self._device:
            self._await(block)
            self._read(block)
        self._open = []
        for host in list(self._host):
            with self._all.pool.lease([host]):
                self._look(host)
        self._all.pool.free(list(self._host))

    def check(self) -> None:
        """Compares what was read with what had to be there."""
        for seen, location, content in self._reads:
            known = content.known()
            assert known is None or seen.saw(location) == known, (
                f"{location} must hold {known}; {seen.seen[location]} was read"
            )
