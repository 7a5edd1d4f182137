"""The server: random calls, each with what it must lead to. The same seed makes the same calls.

No choice depends on how fast the device is: what a step does follows from the seed and from the calls before it alone.
Only which block the pool gives out may differ, because that follows from when transfers end. So host blocks have
numbers here that do not: ``Server.host_ids`` says which block of the pool each of them is. And a cancelled transfer of
which nothing waits for a mark may be dropped or not: then its blocks hold something else, and later steps find others.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...errors import CancelledError, TransferError
from ...memory import DeviceCache, HostPool
from ...schedule.scheduler import LayerwiseScheduler
from .compute import Compute, host_blocks
from .contents import PENDING, UNKNOWN, Blocks, Flight
from .mismatch import SoakFailure

END_S = 60.0  # what takes longer does not end
KEPT_DESCRIPTIONS = 4096
SHOWN_IDS = 32
HOST_BYTES = 1 << 20  # that NumPy writes or compares in one step


@dataclass(frozen=True)
class Traffic:
    """How much of it.

    Attributes:
        max_blocks: of one transfer.
        max_in_flight: transfers that are not waited for.
        max_delay_us: by which compute is late now and then, on a GPU.
    """

    max_blocks: int = 48
    max_in_flight: int = 8
    max_delay_us: float = 500.0
    seed: int = 0


class Server:
    """Device blocks with compute, host blocks, and transfers in flight between them."""

    def __init__(
        self,
        traffic: Traffic,
        cache: DeviceCache,
        pool: HostPool,
        make_compute: Callable[[Callable[[int], str]], Compute],
        make_scheduler: Callable[[Compute], LayerwiseScheduler],
    ) -> None:
        self.traffic = traffic
        self.cache, self.pool = cache, pool
        self.layers = range(cache.spec.num_layers)
        self.compute = make_compute(self.describe)
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler(self.compute)
        self.host_memory = host_blocks(pool, self.describe)
        self.device = Blocks(cache.num_blocks, len(self.layers))
        self.host = Blocks(pool.num_blocks, len(self.layers))
        self.host_ids = np.zeros(pool.num_blocks, np.int64)
        # What was freed under transfers in flight comes back late; this much is never asked for.
        self.max_owned = pool.num_blocks - traffic.max_blocks * (traffic.max_in_flight + 1)
        if self.max_owned < traffic.max_blocks:
            raise ValueError(
                f"{pool.num_blocks} host blocks are too few for {traffic.max_in_flight} transfers of "
                f"{traffic.max_blocks} blocks in flight"
            )
        self.flights: list[Flight] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self._random = random.Random(traffic.seed)
        self._shuffle = np.random.default_rng(traffic.seed)
        self._contents = 0
        self._numbers = 0
        self._descriptions: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._pieces = len(self.layers) * len(cache.spec.tensor_names)
        self._few = max(1, min(8, HOST_BYTES // (len(self.layers) * cache.spec.block_bytes)))
        self._steps = {
            self._prefill: 4,
            self._save: 4,
            self._load: 7,
            self._read: 7,
            self._write: 2,
            self._mark: 4,
            self._wait: 2,
            self._release_device: 3,
            self._free_host: 3,
            self._read_host: 2,
            self._write_host: 1,
            self._cancel: 1,
            self._read_poisoned: 1,
            self._delay: 1,
        }

    def step(self) -> None:
        """One call of the server, or what belongs together."""
        self.counts["steps"] += 1
        [step] = self._random.choices(list(self._steps), list(self._steps.values()))
        step()

    # ---- the steps ----
    def _prefill(self) -> None:
        """Compute writes new blocks, layer by layer behind which they are saved; the marks come in later steps."""
        device = self._pick(~self.device.used & ~self._in_open())
        if len(device) and self._room() >= len(device):
            self.device.used[device] = True
            self._write_blocks(device)
            self._start(True, device, self._allocate(len(device)), layerwise=True)

    def _save(self) -> None:
        device = self._pick(self.device.whole & ~self._in_open())
        if not len(device):
            return
        if self._random.random() < 0.3:  # over blocks that are in use, perhaps just being loaded
            host = self._pick(self.host.used, len(device))
        else:
            host = self._allocate(min(len(device), self._room()))
        if len(host):
            self._start(True, device[: len(host)], host)

    def _load(self) -> None:
        host = self._pick(self.host.whole)
        device = self._pick(~self._in_layerwise() if self._random.random() < 0.3 else ~self.device.used)
        device = device[~self._in_layerwise()[device]]
        count = min(len(host), len(device))
        if not count:
            return
        if self._random.random() < 0.2:  # one source for several targets
            host = self._shuffle.choice(host[:count], len(device))
            count = len(device)
        self.device.used[device[:count]] = True
        self._start(False, device[:count], host[:count])

    def _read(self) -> None:
        """Compute reads blocks: those of the oldest load, or any."""
        candidates = self.device.whole & ~self._in_open()
        loads = [flight for flight in self.flights if not flight.saves and not flight.open and not flight.failed]
        if loads and self._random.random() < 0.7:
            chosen = np.zeros_like(candidates)
            chosen[loads[0].device_ids] = True
            device = np.flatnonzero(candidates & chosen)
        else:
            device = self._pick(candidates)
        self._check_device(device, by_layer=self._random.random() < 0.7)

    def _write(self) -> None:
        device = self._pick(self.device.used & ~self._in_open())
        if len(device):
            self._write_blocks(device)

    def _mark(self) -> None:
        saves = [flight for flight in self.flights if flight.unmarked]
        if saves:
            flight = self._random.choice(saves)
            self._mark_layers(flight, self._random.randint(1, len(flight.unmarked)))

    def _wait(self) -> None:
        closed = [flight for flight in self.flights if not flight.held]
        if closed:
            self._end(self._random.choice(closed))

    def _release_device(self) -> None:
        device = self._pick(self.device.used & ~self._in_layerwise())
        self.device.used[device] = False

    def _free_host(self) -> None:
        """Perhaps while a transfer is reading or writing them."""
        if self._room() > self.max_owned // 2:
            return
        host = self._pick(self.host.used)
        self.pool.free(self.host_ids[host])
        self.host.used[host] = False

    def _read_host(self) -> None:
        host = self._pick(self.host.whole & ~self._in_held_host())[: self._few]
        self._check_host(host)

    def _write_host(self) -> None:
        host = self._pick(self.host.used & ~self._in_held_host())[: self._few]
        if not len(host):
            return
        ids = self.host_ids[host]
        with self.pool.lease(ids, write=True, timeout_s=END_S):
            contents = self._fresh(len(host))
            self.host_memory.fill(ids, self.layers, contents)
        self.pool.mark_rewritten(ids)
        self.host.written_by_others(host, contents)

    def _cancel(self) -> None:
        """What waits for a mark is dropped for certain; of what is submitted, what has not begun."""
        if not self.flights:
            return
        flight = self._random.choice(self.flights)
        was_open = flight.open
        flight.transfer.cancel()
        if was_open or (flight.transfer.failed and not flight.failed):
            self.counts["cancelled"] += 1
            for fallen in flight.fail():
                if fallen.transfer.error is None:
                    raise SoakFailure(f"{fallen} reads the result of {flight}, which was cancelled; it did not fail")

    def _read_poisoned(self) -> None:
        """A block that a cancelled save left half written cannot be loaded."""
        host = np.flatnonzero(self.host.used & self.host.poisoned)
        device = np.flatnonzero(~self.device.used & ~self._in_layerwise())
        if not len(host) or not len(device):
            return
        try:
            self.scheduler.onload(self.host_ids[host[:1]], device[:1])
        except (CancelledError, TransferError):
            self.counts["refused"] += 1
            return
        raise SoakFailure(
            f"host block {self.host_ids[host[0]]} holds no usable data after a cancelled transfer, but could be loaded"
        )

    def _delay(self) -> None:
        self.compute.delay(self._random.uniform(0, self.traffic.max_delay_us))

    # ---- transfers ----
    def _start(self, saves: bool, device: np.ndarray, host: np.ndarray, *, layerwise: bool = False) -> None:
        while len(self.flights) >= self.traffic.max_in_flight:
            self._end_oldest()
        targets = self.host if saves else self.device
        source, source_ids, target_ids = (self.device, device, host) if saves else (self.host, host, device)
        contents = source.contents[source_ids].copy()
        if layerwise:
            contents[:] = PENDING
        before = [flight for flight in self.flights if flight.conflicts(saves, device, host)]
        behind = [flight for flight in before if flight.held]
        if saves:
            transfer = self.scheduler.offload(device, self.host_ids[host], layerwise=layerwise)
        else:
            transfer = self.scheduler.onload(self.host_ids[host], device)
        self._numbers += 1
        unmarked = list(self.layers) if layerwise else []
        if self._random.random() < 0.3:
            self._random.shuffle(unmarked)
        flight = Flight(
            self._numbers,
            saves,
            device,
            host,
            contents,
            targets,
            unmarked,
            behind,
            transfer,
            self._mask(self.device, [device]),
            self._mask(self.host, [host]),
        )
        for writer in before:
            there, here = np.nonzero(
                (source_ids[:, None] == writer.target_ids) & (source.writers[source_ids] == writer.number)[:, None]
            )
            if len(there):
                writer.readers.append((flight, there, here))
        targets.poisoned[target_ids] = False  # until it fails
        flight.write()
        self.flights.append(flight)
        self.counts["transfers"] += 1
        self._describe_flight(flight, layerwise)

    def _mark_layers(self, flight: Flight, count: int) -> None:
        """Compute writes layers of the blocks (or leaves them as they are), and says so."""
        for layer in flight.unmarked[:count]:
            if self._random.random() < 0.7:
                self._order(flight.device_ids, layer, writing=True, but=flight)
                contents = self._fresh(len(flight.device_ids), 1)
                self.compute.fill(flight.device_ids, range(layer, layer + 1), contents)
                self.device.contents[flight.device_ids, layer] = contents[:, 0]
            flight.transfer.mark_layer_written(layer)
            flight.unmarked.remove(layer)
            everywhere = np.arange(len(flight.device_ids))
            flight.resolve(everywhere, layer, self.device.contents[flight.device_ids, layer])

    def _end_oldest(self) -> None:
        closed = [flight for flight in self.flights if not flight.held]
        if not closed:
            first = next(flight for flight in self.flights if flight.unmarked)
            self._mark_layers(first, len(first.unmarked))
            closed = [flight for flight in self.flights if not flight.held]
        self._end(closed[0])

    def _end(self, flight: Flight) -> None:
        """The host waits for it, and it ends as it must."""
        try:
            flight.transfer.wait(END_S)
            if flight.failed:
                raise SoakFailure(f"{flight} was dropped, but says that it is done")
            self.counts["moves"] += len(flight.device_ids) * self._pieces
            self.counts["bytes"] += flight.transfer.bytes
        except TimeoutError as error:
            raise SoakFailure(f"{self.describe(flight.number)} does not end: {error}") from error
        except (CancelledError, TransferError) as error:
            if not flight.failed:
                raise SoakFailure(f"{self.describe(flight.number)} failed: {error}") from error
        if not flight.held:
            self.flights.remove(flight)

    def restart(self) -> None:
        """Another scheduler on the same pools; the transfers of this one have been waited for."""
        self.scheduler.close(END_S)
        self.scheduler = self._make_scheduler(self.compute)
        self.counts["restarts"] += 1

    def finish(self) -> None:
        """Ends all transfers and compares every block that holds something, on both sides."""
        while self.flights:
            self._end_oldest()
        self._check_device(np.flatnonzero(self.device.whole), by_layer=False)
        self.compute.flush()
        self._check_host(np.flatnonzero(self.host.whole), by_device=True)

    # ---- blocks ----
    def _write_blocks(self, device: np.ndarray) -> None:
        for flight in self._touching(device, writing=True):
            self._order_flight(flight, None)
        contents = self._fresh(len(device))
        self.compute.fill(device, self.layers, contents)
        self.cache.mark_rewritten(device)
        self.device.written_by_others(device, contents)

    def _check_device(self, device: np.ndarray, *, by_layer: bool) -> None:
        writers = self.device.writers[device].tolist()
        contents = self.device.contents[device]
        step = self.counts["steps"]
        if by_layer:
            for layer in self.layers:
                self._order(device, layer, writing=False)
                self.compute.check(device, range(layer, layer + 1), contents[:, layer : layer + 1], writers, step)
        else:
            for flight in self._touching(device, writing=False):
                self._order_flight(flight, None)
            self.compute.check(device, self.layers, contents, writers, step)
        self.counts["device_checks"] += len(device) * self._pieces

    def _check_host(self, host: np.ndarray, *, by_device: bool = False) -> None:
        """By NumPy, or by the device, which is quicker where blocks are many."""
        check = self.compute.check_host if by_device else self.host_memory.check
        ids = self.host_ids[host]
        with self.pool.lease(ids, timeout_s=END_S):
            writers = self.host.writers[host].tolist()
            check(ids, self.layers, self.host.contents[host], writers, self.counts["steps"])
            if by_device:
                self.compute.flush()
        self.counts["host_checks"] += len(host) * self._pieces

    def _touching(self, device: np.ndarray, *, writing: bool, but: Flight | None = None) -> list[Flight]:
        """Those that computation has to wait for before it touches the blocks."""
        return [
            flight
            for flight in self.flights
            if flight is not but and (writing or not flight.saves) and flight.touches_device[device].any()
        ]

    def _order(self, device: np.ndarray, layer: int, *, writing: bool, but: Flight | None = None) -> None:
        for flight in self._touching(device, writing=writing, but=but):
            self._order_flight(flight, layer)

    def _order_flight(self, flight: Flight, layer: int | None) -> None:
        """Computation from now on comes behind the layer of the transfer, or all of it."""
        wanted = set(self.layers) if layer is None else {layer}
        if wanted <= flight.ordered:
            return
        if flight.failed:  # part of it may still run
            self._end(flight)
            return
        if layer is None:
            flight.transfer.wait_on(timeout_s=END_S)
        else:
            flight.transfer.wait_layer(layer, timeout_s=END_S)
        flight.ordered |= wanted

    def _allocate(self, count: int) -> np.ndarray:
        in_flight = self._mask(self.host, [flight.host_ids for flight in self.flights])
        host = np.flatnonzero(~self.host.used & ~in_flight)[:count]
        ids = np.array(self.pool.allocate(count), np.int64)
        owned = self.host_ids[self.host.used]
        if np.isin(ids, owned).any():
            raise SoakFailure(f"host blocks {ids[np.isin(ids, owned)].tolist()} were given out twice")
        self.host_ids[host] = ids
        self.host.used[host] = True
        self.host.contents[host] = UNKNOWN
        self.host.poisoned[host] = False  # not known: it may hold what a transfer left of it
        self.host.writers[host] = 0
        return host

    def _room(self) -> int:
        return self.max_owned - int(self.host.used.sum())

    def _pick(self, candidates: np.ndarray, count: int | None = None) -> np.ndarray:
        """At most ``max_blocks`` of them: scattered, or neighbours in order."""
        ids = np.flatnonzero(candidates)
        count = min(count or self._random.randint(1, self.traffic.max_blocks), len(ids))
        if self._random.random() < 0.3:
            first = self._random.randint(0, len(ids) - count)
            return ids[first : first + count]
        return self._shuffle.choice(ids, count, replace=False) if count else ids

    def _in_open(self) -> np.ndarray:
        """Device blocks that cannot be waited for before a layer is marked."""
        return self._mask(self.device, [flight.device_ids for flight in self.flights if flight.open])

    def _in_layerwise(self) -> np.ndarray:
        """Device blocks that compute is still writing for a save."""
        return self._mask(self.device, [flight.device_ids for flight in self.flights if flight.unmarked])

    def _in_held_host(self) -> np.ndarray:
        """Host blocks of which a lease would wait for a mark."""
        return self._mask(self.host, [flight.host_ids for flight in self.flights if flight.held])

    @staticmethod
    def _mask(blocks: Blocks, ids: list[np.ndarray]) -> np.ndarray:
        mask = np.zeros_like(blocks.used)
        for some in ids:
            mask[some] = True
        return mask

    def _fresh(self, blocks: int, layers: int | None = None) -> np.ndarray:
        """Contents that were never used, one a block."""
        first = self._contents + 1
        self._contents += blocks
        return np.repeat(np.arange(first, first + blocks)[:, None], layers or len(self.layers), axis=1)

    # ---- what is told ----
    def _describe_flight(self, flight: Flight, layerwise: bool) -> None:
        kind = f"{'layerwise ' if layerwise else ''}{'offload' if flight.saves else 'onload'}"
        device, host = (ids[:SHOWN_IDS].tolist() for ids in (flight.device_ids, self.host_ids[flight.host_ids]))
        self._descriptions[flight.number] = (
            f"t{flight.number}, {kind} of {len(flight.device_ids)} blocks, step {self.counts['steps']}, "
            f"device {device}, host {host}{' and so on' if len(flight.device_ids) > SHOWN_IDS else ''}"
        )
        if len(self._descriptions) > KEPT_DESCRIPTIONS:
            self._descriptions.popitem(last=False)

    def describe(self, number: int) -> str:
        """A transfer by its number."""
        if number == 0:
            return "computation or the host"
        return self._descriptions.get(number, f"t{number}")
