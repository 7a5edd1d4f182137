"""A server that moves blocks at random, beside a model of what each block must hold.

The model follows the contract: transfers act in the order of their calls, whatever the device does. Each write makes a
:class:`Content`; a transfer's targets refer to the content of their sources, so what a block must hold is known at the
end even where a layer is marked late or a transfer fails. Whatever computation or the host has read is compared then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import CancelledError, TransferError
from ...layout import KVCacheSpec
from ...memory import DeviceCache, HostPool
from ...schedule.scheduler import LayerwiseScheduler
from ...schedule.transfer import Transfer
from .chooser import LateChooser, RandomChooser
from .device import SimulatedStream
from .log import Location
from .simulation import Computation, Simulation

LAYERS = 3
SPEC = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=5, block_size=1, dtype="float16", v_head_dim=3)
DEVICE_BLOCKS, HOST_BLOCKS = 5, 6
CLOSE_TIMEOUT_S = 10.0


@dataclass(eq=False)
class Flight:
    """A transfer that may not be over."""

    number: int
    transfer: Transfer
    reads_device: bool
    device_ids: Sequence[int]
    host_ids: Sequence[int]
    sources: dict[tuple[int, int], Content]  # (position, layer)
    unmarked: set[int]
    ordered: set[int] = field(default_factory=set)  # layers that the compute stream waits for
    over: bool = False

    @property
    def failed(self) -> bool:
        return self.transfer.error is not None


@dataclass(eq=False)
class Content:
    """What was written to one layer of a block: a version, or what a transfer brought there, or nothing of use."""

    version: str | None = None
    flight: Flight | None = None
    source: Content | None = None
    lost: bool = False

    @property
    def failed(self) -> bool:
        return self.lost or (self.flight is not None and self.flight.failed)

    def known(self) -> str | None:
        """The version; None where a transfer failed, so that nobody may rely on the block."""
        content: Content | None = self
        while content is not None and not content.failed and content.flight is not None:
            content = content.source
        return content.version if content is not None and not content.failed else None


class Server:
    """Schedulers, blocks, and what they must hold.

    Args:
        seed: of the device's choices.
        drop: what the backend leaves out, see :class:`Simulation`.
    """

    def __init__(self, seed: int, *, drop: Collection[str] = ()) -> None:
        self.simulation = Simulation(RandomChooser(seed), drop=drop)
        self.simulation.device.takes_marks = seed % 2 == 0
        self.cache = DeviceCache(SPEC, DEVICE_BLOCKS, "cpu")
        self.pool = HostPool(SPEC, HOST_BLOCKS)
        self.schedulers = [self._scheduler(layers_per_event) for layers_per_event in (1, 2)]
        self.flights: list[Flight] = []
        self.owned: list[int] = []  # host blocks
        self.trace: list[str] = []
        self.moves = 0
        self._side = self.simulation.stream("side")
        self._versions = 0
        self._num_flights = 0
        self._device: dict[tuple[int, int], Content] = {}
        self._host: dict[tuple[int, int], Content] = {}
        self._reads: list[tuple[Computation, Location, Content]] = []
        self._written_device: dict[int, list[Content]] = {}  # by transfers, since computation wrote the block
        self._written_host: dict[int, list[Content]] = {}
        self._all_flights: list[Flight] = []
        self._late_targets: dict[Flight, dict[tuple[int, int], Content]] = {}  # of layerwise offloads
        for block in range(DEVICE_BLOCKS):
            self.compute(block, write=True)

    def _scheduler(self, layers_per_event: int) -> LayerwiseScheduler:
        backend = self.simulation.backend()
        return LayerwiseScheduler(self.cache, self.pool, backend=backend, layers_per_event=layers_per_event)

    # ---- blocks ----
    def allocate(self, count: int, *, fill: bool) -> None:
        try:
            blocks = self.pool.allocate(count)
        except MemoryError:
            self._note(f"allocate {count}: too few free")
            return
        self._note(f"allocate {blocks}{' and fill' if fill else ''}")
        assert not set(blocks) & set(self.owned), f"blocks {blocks} were given out twice"
        self.owned.extend(blocks)
        for block in blocks:
            for layer in range(LAYERS):
                self._host.pop((block, layer), None)
            if fill:
                self._fill_host(block)

    def free(self, block: int) -> None:
        self._note(f"free host {block}")
        self.owned.remove(block)
        self.pool.free([block])

    def _fill_host(self, block: int) -> None:
        for layer in range(LAYERS):
            version = self._version(layer)
            self.simulation.touch_on_host(writes=[(self.pool, block, layer)], version=version, label="host fill")
            self._host[block, layer] = Content(version)
        self.pool.mark_rewritten([block])
        self._rewritten(self._written_host, block)

    def read_host(self, block: int) -> None:
        """The host looks at a block under a lease."""
        try:
            with self.pool.lease([block], timeout_s=0.0):
                self._note(f"host reads {block}")
                for layer in range(LAYERS):
                    seen = self.simulation.touch_on_host(reads=[(self.pool, block, layer)], label="host read")
                    self._expect(seen, self.pool, block, layer, self._host.get((block, layer)))
        except TimeoutError:
            self._note(f"host block {block} is in use")

    # ---- computation ----
    def compute(self, block: int, *, write: bool, side: bool = False) -> None:
        """Layer by layer, each behind what it has to wait for; given up where a layer was not submitted yet."""
        self._note(f"compute {'writes' if write else 'reads'} device {block}{' on the side stream' if side else ''}")
        main = self.simulation.compute_stream
        stream = self._side if side else main
        if side:
            self.simulation.order(main, stream)
        for layer in range(LAYERS):
            if not self._wait_for_block(block, layer, write, stream):
                self._note(f"  layer {layer} has to wait: given up")
                break
            if write:
                version = self._version(layer)
                self.simulation.compute(writes=[(self.cache, block, layer)], stream=stream, version=version)
                self._rewrite_device(block, layer, Content(version))
            else:
                seen = self.simulation.compute(reads=[(self.cache, block, layer)], stream=stream)
                self._expect(seen, self.cache, block, layer, self._device.get((block, layer)))
        else:
            if write:
                self.cache.mark_rewritten([block])
                self._rewritten(self._written_device, block)
        if side:
            self.simulation.order(stream, main)

    def _wait_for_block(self, block: int, layer: int, write: bool, stream: SimulatedStream) -> bool:
        for flight in list(self.flights):
            concerned = block in flight.device_ids and (write or not flight.reads_device)
            if not concerned or flight.over or layer in flight.ordered or layer in flight.unmarked:
                continue
            try:
                flight.transfer.wait_layer(layer, stream=stream, timeout_s=0.0)
                flight.ordered.add(layer)
            except TimeoutError:
                return False
            except (CancelledError, TransferError):
                self.wait(flight)
        return True

    def _rewrite_device(self, block: int, layer: int, content: Content) -> None:
        self._device[block, layer] = content
        # A layer that is not marked yet is saved as it will be then. Onloads in between have failed, or computation
        # would wait for them, and they for the mark.
        for flight in self.flights:
            for position, source in enumerate(flight.device_ids):
                if source == block and layer in flight.unmarked:
                    flight.sources[position, layer] = content

    # ---- transfers ----
    def offload(self, scheduler: int, device_ids: Sequence[int], host_ids: Sequence[int], *, layerwise: bool) -> None:
        self._start(scheduler, True, device_ids, host_ids, layerwise)

    def onload(self, scheduler: int, host_ids: Sequence[int], device_ids: Sequence[int]) -> None:
        self._start(scheduler, False, device_ids, host_ids, False)

    def _start(
        self, scheduler: int, saves: bool, device_ids: Sequence[int], host_ids: Sequence[int], layerwise: bool
    ) -> None:
        self._num_flights += 1
        what = f"t{self._num_flights} = {'offload' if saves else 'onload'} device {device_ids}, host {host_ids}"
        self._note(f"{what}{', layerwise' if layerwise else ''}, scheduler {scheduler}")
        own = self.schedulers[scheduler]
        sources, targets = (self._device, self._host) if saves else (self._host, self._device)
        source_ids, target_ids = (device_ids, host_ids) if saves else (host_ids, device_ids)
        of_sources, of_targets = (
            (self._written_device, self._written_host) if saves else (self._written_host, self._written_device)
        )
        broken = self.simulation.device.num_broken
        begun = _begun(own)
        try:
            if saves:
                transfer = own.offload(device_ids, host_ids, layerwise=layerwise)
            else:
                transfer = own.onload(host_ids, device_ids, urgent=self._num_flights % 3 == 0)
        except (CancelledError, TransferError) as error:
            self._note(f"  refused: {error}")
            writers = [content for block in source_ids for content in of_sources.get(block, [])]
            own_failure = self.simulation.device.num_broken > broken
            assert own_failure or any(content.failed for content in writers), (
                f"{what} was refused although nothing that wrote its sources failed: {error}"
            )
            if _begun(own) > begun:
                for block in target_ids:
                    lost = Content(lost=True)
                    targets.update({(block, layer): lost for layer in range(LAYERS)})
                    of_targets.setdefault(block, []).append(lost)
            return
        self.moves += len(device_ids)
        positions = [(position, layer) for position in range(len(device_ids)) for layer in range(LAYERS)]
        flight = Flight(
            self._num_flights,
            transfer,
            saves,
            device_ids,
            host_ids,
            {(p, layer): sources.setdefault((source_ids[p], layer), Content()) for p, layer in positions},
            set(range(LAYERS)) if layerwise else set(),
        )
        for position, layer in positions:
            source = None if layerwise else flight.sources[position, layer]
            targets[target_ids[position], layer] = Content(flight=flight, source=source)
        if layerwise:
            flight_targets = {(p, layer): targets[target_ids[p], layer] for p, layer in positions}
            self._late_targets[flight] = flight_targets
        for block in target_ids:
            of_targets.setdefault(block, []).append(targets[block, 0])
        self.flights.append(flight)
        self._all_flights.append(flight)

    def mark(self, flight: Flight, layer: int) -> None:
        self._note(f"mark layer {layer} of t{flight.number}")
        flight.unmarked.discard(layer)  # part of it may run even if the call fails
        try:
            flight.transfer.mark_layer_written(layer)
        except (CancelledError, TransferError) as error:
            self._note(f"  {error}")
            return
        for position in range(len(flight.device_ids)):
            self._late_targets[flight][position, layer].source = flight.sources[position, layer]

    def wait(self, flight: Flight) -> None:
        """Until it is over, or not at all if a layer is still to be marked somewhere."""
        patient = not flight.transfer._movement.num_unsubmitted or flight.transfer.failed
        try:
            flight.transfer.wait(None if patient else 0.0)
            self._note(f"waited for t{flight.number}")
            flight.over = True
        except TimeoutError:
            assert not patient, f"t{flight.number} does not end"
        except (CancelledError, TransferError) as error:
            self._note(f"t{flight.number} failed: {error}")
            flight.over = True
        self._forget_what_is_over()

    def poll(self, flight: Flight) -> None:
        flight.over = flight.over or flight.transfer.done()
        self._note(f"t{flight.number} is {'' if flight.over else 'not '}done")
        self._forget_what_is_over()

    def wait_on(self, flight: Flight) -> None:
        self._note(f"compute waits on t{flight.number}")
        with contextlib.suppress(CancelledError, TransferError, TimeoutError):
            flight.transfer.wait_on(timeout_s=0.0)
            flight.ordered.update(range(LAYERS))

    def cancel(self, flight: Flight) -> None:
        self._note(f"cancel t{flight.number}")
        flight.transfer.cancel()

    def restart(self, scheduler: int) -> None:
        """Closes a scheduler and makes another one."""
        self._note(f"close scheduler {scheduler}")
        self.schedulers[scheduler].close(CLOSE_TIMEOUT_S)
        for flight in self.flights:
            flight.over = flight.over or flight.transfer._scheduler is self.schedulers[scheduler]
        self._forget_what_is_over()
        self.schedulers[scheduler] = self._scheduler(1 + scheduler)

    def break_copy(self, ahead: int) -> None:
        self._note(f"the copy step {ahead} steps ahead breaks")
        self.simulation.device.break_copy(ahead)

    def break_submission(self, ahead: int) -> None:
        self._note(f"the submission {ahead} submissions ahead breaks")
        self.simulation.device.break_submission(ahead)

    # ---- the end ----
    def finish(self) -> None:
        """Ends all, and compares all that was read and all that is left with the model."""
        self._note("finish")
        for flight in list(self.flights):
            self.cancel(flight)
        for flight in list(self.flights):
            self.wait(flight)
        for block in range(DEVICE_BLOCKS):
            self.compute(block, write=False)
        for block in self.owned:
            self.read_host(block)
        for scheduler in self.schedulers:
            scheduler.close(CLOSE_TIMEOUT_S)
        self.simulation.verify()
        for flight in self._all_flights:
            assert flight.failed or not any(content.failed for content in flight.sources.values()), (
                f"t{flight.number} succeeded although a transfer that wrote its sources failed"
            )
        for seen, location, content in self._reads:
            known = content.known()
            assert known is None or seen.saw(location) == known, (
                f"{location} must hold {known}; {seen.seen[location]} was read"
            )
        self.pool.close()

    def abandon(self) -> None:
        """After a failure: nothing of this run may disturb the next one."""
        self.simulation.device.chooser = LateChooser()
        self.simulation.restore()
        self.simulation.run()
        for scheduler in self.schedulers:
            with contextlib.suppress(Exception):
                scheduler.close(1.0)

    # ---- helpers ----
    def _expect(self, seen: Computation, pool: Any, block: int, layer: int, content: Content | None) -> None:
        if content is not None:
            self._reads.append((seen, self.simulation.location(pool, block, layer), content))

    def _rewritten(self, written: dict[int, list[Content]], block: int) -> None:
        # A failure that comes out later still makes the block unusable: the scheduler cannot know who wrote last.
        written[block] = [c for c in written.get(block, []) if c.flight is not None and not c.flight.over]

    def _forget_what_is_over(self) -> None:
        self.flights = [flight for flight in self.flights if not flight.over]

    def _version(self, layer: int) -> str:
        self._versions += 1
        return f"v{self._versions}.{layer}"

    def _note(self, line: str) -> None:
        self.trace.append(line)


def _begun(scheduler: LayerwiseScheduler) -> int:
    stats = scheduler.stats()
    return stats["onload_transfers"] + stats["offload_transfers"]
