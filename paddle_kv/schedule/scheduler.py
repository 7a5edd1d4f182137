"""Loads and saves of the KV cache, layer by layer, beside the computation. The contract is in docs/ordering.md."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Collection, Sequence
from typing import Any, Literal

from .. import backend as backends
from ..backend.protocol import Backend
from ..backend.work import ENGINES, Direction, Event, Stream, TransferPlan
from ..checks import Ids
from ..errors import ClosedError
from ..layout import check_positive
from ..memory import DeviceCache, HostPool
from ..ops import _arguments as arguments
from ..ops import _check
from ..tracking.group import OnItsWay, change, unite
from ..tracking.memories import check_access
from ..values import check_bool, check_choice
from . import alone, checksum, settling
from .alone import Alone
from .gates import Gates
from .lifetime import Lifetime
from .movement import Movement, Reading
from .plan import check_blocks, make_plan
from .resources import Events
from .starting import hold, start
from .statistics import Statistics
from .transfer import Transfer
from .uses import Use, holding

_check.access_checks.append(check_access)


class LayerwiseScheduler(Lifetime):
    """Moves blocks between a device cache and a host pool on streams of its own, one per direction and one for
    urgent loads.

    Args:
        device_cache: the cache of this rank.
        host_pool: blocks in host memory, same spec.
        compute_stream: stream of the cache's GPU on which the model runs (int handle, CuPy or Paddle stream). None: at
            each call Paddle's current stream, or the CuPy stream of the surrounding ``with`` block.
        backend: "cupy" on a GPU, "cpu" without, "auto" picks; or an object that implements the protocol.
        engine: how bytes are moved on a GPU: "copy_engine", "kernel", "staging", or "auto", which chooses for each
            transfer (docs/design.md).
        layers_per_event: layers that share an event. More make a submission of a deep model cheaper and waits coarser.
        record_layer_times: keep the times of each layer's copy (:attr:`Transfer.layer_times_ms`).

    Attributes:
        default_stream: ``compute_stream`` as it was given.

    Raises:
        TypeError: not a cache and a pool.
        ValueError: their specs differ, one lies in the memory of the other, a backend or an engine that is not there,
            host memory that the GPU cannot reach.
        ClosedError: the pool is closed.

    Any thread may call; calls are serialised. After ``fork`` the child has to make a scheduler of its own. Close it, or
    use a ``with`` block: streams and events of one that is only dropped stay until the next one is made or closed.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> cache, pool = DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)
        >>> cache.tensor("key", 1)[2] = 1.5
        >>> with LayerwiseScheduler(cache, pool) as scheduler:
        ...     [host] = pool.allocate(1)
        ...     scheduler.offload([2], [host]).wait()
        ...     load = scheduler.onload([host], [4])
        ...     for layer in range(2):
        ...         load.wait_layer(layer)  # then compute with the layer
        ...     load.wait()
        >>> cache.tensor("key", 1)[4].numpy().max()
        np.float32(1.5)
    """

    def __init__(
        self,
        device_cache: DeviceCache,
        host_pool: HostPool,
        *,
        compute_stream: Any = None,
        backend: str | Backend = "auto",
        engine: str = "auto",
        layers_per_event: int = 1,
        record_layer_times: bool = False,
    ) -> None:
        if not isinstance(device_cache, DeviceCache):
            raise TypeError(f"device_cache is {type(device_cache).__name__}; a DeviceCache is expected")
        if not isinstance(host_pool, HostPool):
            raise TypeError(f"host_pool is {type(host_pool).__name__}; a HostPool is expected")
        if host_pool.closed:
            raise ClosedError("the host pool is closed")
        if engine not in ENGINES:
            raise ValueError(f"engine = {engine!r} must be one of {', '.join(map(repr, ENGINES))}")
        layers_per_event = check_positive(layers_per_event, "layers_per_event")
        if device_cache.is_ring and layers_per_event > 1:
            raise ValueError(
                f"layers_per_event = {layers_per_event} must be 1: layers of the device cache share buffers"
            )
        if device_cache.domain is host_pool.domain:
            raise ValueError("host_pool lies in the memory of device_cache; it needs memory of its own")
        created = backends.create(backend, device_cache.device_id)
        super().__init__(device_cache, host_pool, created)
        self.bytes_per_block = device_cache.spec.block_bytes * device_cache.spec.num_layers
        self.engine = engine
        self.record_layer_times = record_layer_times
        self.default_stream = compute_stream
        self.layers_per_event = min(layers_per_event, device_cache.spec.num_layers)  # it has to fit in 64 bits
        self._statistics = Statistics()
        host = getattr(self.backend, "host", None)
        if host is not None:
            device_cache.domain.group.host = host
        unite(device_cache.domain, host_pool.domain)
        self.observer = (
            checksum.ChecksumObserver(host_pool) if checksum.enabled() and host_pool.in_host_memory else None
        )
        # Of each layer's copy, of a ring's marks, and of checksums there is more to note.
        needs_books = record_layer_times or device_cache.is_ring or self.observer is not None
        self._may_be_alone = getattr(self.backend, "start_alone", None) is not None and not needs_books
        self._num_groups = -(-device_cache.spec.num_layers // self.layers_per_event)
        self.group.host.call(self._open)

    # ---- transfers ----
    def offload(self, device_block_ids: Any, host_block_ids: Any, *, layerwise: bool = False) -> Transfer:
        """Saves blocks: ``device_block_ids[i]`` of every layer and tensor to ``host_block_ids[i]``.

        Ordered after everything submitted to the compute stream before the call; with ``layerwise`` layer i is ordered
        after :meth:`Transfer.mark_layer_written` of i instead, so that saving overlaps with the computation of later
        layers. Compute may write the blocks again only after ``wait_layer``, ``wait_on`` or ``wait``. The transfer
        keeps the memory of both sides alive; the ids are copied.

        Args:
            device_block_ids: sources: a list, tuple, range, or a 1-D NumPy array or Paddle tensor of integers (one on a
                GPU is read by the host). One may occur several times; none at all is a transfer that is over at once.
            host_block_ids: as many targets, each once.
            layerwise: the layers will be marked one by one.

        Returns:
            the transfer. It need not be kept: without a reference it ends all the same (a layerwise one is cancelled),
            and a failure is logged.

        Raises:
            TypeError: ids that are not integers.
            IndexError: an id is outside its pool.
            ValueError: lists of different length, a host block named twice.
            ClosedError, ForkedError, LeasedError, CaptureError: closed, made before a fork, a leased block, the compute
                stream is being captured into a graph.
            TransferError: a device block holds no usable data after a failed onload, or the submission failed. The
                compute stream is ordered behind what was submitted of it.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> cache, pool = DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)
            >>> with LayerwiseScheduler(cache, pool) as scheduler:
            ...     save = scheduler.offload([2], [0], layerwise=True)
            ...     for layer in range(spec.num_layers):
            ...         cache.tensor("key", layer)[2] = layer + 1.0  # the model writes the layer
            ...         save.mark_layer_written(layer)
            ...     save.wait(timeout_s=10)
            >>> [pool.view("key", layer, 0).max().item() for layer in range(2)]
            [1.0, 2.0]
        """
        check_bool(layerwise, "layerwise")
        if not layerwise and (started := alone.start(self, "offload", device_block_ids, host_block_ids)):
            return started
        return self._start(self.plan("offload", device_block_ids, host_block_ids), layerwise=layerwise)

    def onload(
        self, host_block_ids: Any, device_block_ids: Any, *, urgent: bool | None = None, layers: Any = None
    ) -> Transfer:
        """Loads blocks: ``host_block_ids[i]`` to ``device_block_ids[i]`` of every layer and tensor, layers in order.

        Does not overwrite a block before the work submitted to the compute stream before the call is done. Compute may
        touch the blocks only after ``wait_layer``, ``wait_on`` or ``wait``.

        Loads run one behind the other. An urgent one does not queue behind those before it, unless they share a block;
        None: it is urgent if it finds eight times its own bytes, and at least 64 MiB, in flight.

        Args:
            host_block_ids: sources, see :meth:`offload`. Blocks that were never saved are loaded as they are.
            device_block_ids: as many targets, each once.
            urgent: True, False, or None for the rule above.
            layers: only these; the other layers of the device blocks stay, so the blocks must be usable before.

        Raises:
            As :meth:`offload`, with the roles of device and host exchanged.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
            ...     save = scheduler.offload([2, 0], [6, 7])
            ...     load = scheduler.onload([7, 7], [3, 4])  # behind the save; one host block into two device blocks
            ...     load.wait(timeout_s=10)
            ...     load.bytes == 2 * spec.num_layers * spec.block_bytes
            True
        """
        if urgent is not None:
            check_choice(urgent, "urgent")
        if not urgent and layers is None and (started := alone.start(self, "onload", device_block_ids, host_block_ids)):
            return started
        return self._start(self.plan("onload", device_block_ids, host_block_ids, layers), urgent=urgent)

    def _start(self, plan: TransferPlan, *, layerwise: bool = False, urgent: bool | None = False) -> Transfer:
        section = functools.partial(self.start_here, plan, self.compute_stream(None), layerwise, urgent)
        started: Transfer = change(self.host_pool.domain, section)
        return self.check_started(started) if started._movement.submission_failed else started

    def check_started(self, started: Transfer) -> Transfer:
        """Outside of sections: raises if already the submission has failed."""
        movement = started._movement
        if movement.submission_failed:
            # The caller gets no handle to wait with, so the compute stream waits for what of it may run.
            hold(movement, self.compute_stream(None))
            movement.raise_if_failed()
        return started

    def plan(self, direction: Direction, device_ids: Any, host_ids: Any, layers: Any = None) -> TransferPlan:
        """Checked."""
        self.check_open()
        device, host = self._checked(direction, device_ids, host_ids)
        return make_plan(
            direction,
            device,
            host,
            num_layers=self.device_cache.spec.num_layers,
            layers_per_event=self.layers_per_event,
            layers=None if layers is None else arguments.block_ids(layers, "layers", self.device_cache.spec.num_layers),
        )

    def _checked(self, direction: Direction, device_ids: Any, host_ids: Any) -> tuple[Ids, Ids]:
        device_blocks, host_blocks = self.device_cache.num_blocks, self.host_pool.num_blocks
        to_host = direction == "offload"
        device = arguments.plain_id_array(device_ids, device_blocks, distinct=not to_host)
        host = arguments.plain_id_array(host_ids, host_blocks, distinct=to_host)
        if device is None or host is None or len(device) != len(host):  # the checks find the words
            device = arguments.block_id_array(device_ids, "device_block_ids", device_blocks)
            host = arguments.block_id_array(host_ids, "host_block_ids", host_blocks)
            check_blocks(direction, device, host, device_blocks=device_blocks, host_blocks=host_blocks)
        return device, host

    def start_here(
        self,
        plan: TransferPlan,
        compute: Stream,
        layerwise: bool,
        urgent: bool | None,
        behind: Collection[Movement] = (),
        reading: Reading | None = None,
        leased: Sequence[int] = (),
    ) -> Transfer:
        """In a section: starts it behind what its blocks, and ``behind``, ask for."""
        self.check_open()
        if self.device_cache.is_ring and plan.direction == "offload" and not layerwise:
            raise ValueError("layerwise = False must be True: the layers of the device cache share buffers")
        if self.device_cache.is_ring and plan.left_out:
            raise ValueError("layers must be None: the layers of the device cache share buffers")
        return start(
            self,
            plan,
            compute,
            self._statistics,
            layerwise=layerwise,
            urgent=urgent,
            behind=behind,
            reading=reading,
            leased=leased,
        )

    def gates(self, *, timeout_s: float) -> Gates:
        """Waits and marks for layers inside captured CUDA graphs.

        Args:
            timeout_s: how long one gate holds a replay, and how long after :meth:`Gates.arm` a save may be unmarked.
                Choose it far above the time of a load: it ends what would never end.

        Raises:
            TypeError, ValueError: ``timeout_s`` is not a positive number of seconds; ValueError: layers of the device
                cache share buffers.
            ClosedError: closed.
        """
        if self.device_cache.is_ring:
            raise ValueError("gates need a device cache in which each layer has its own memory")
        return Gates(self, timeout_s)

    @holding(lambda names: names["self"])
    def record_event(self, direction: Literal["onload", "offload"]) -> Any:
        """An event behind everything submitted so far in that direction, on its streams.

        A ``cupy.cuda.Event``, which any stream may wait for; on the CPU backend an object with ``done()``,
        ``wait(timeout_s)`` and ``synchronize()``. It says nothing of failures: ask the transfers. On a GPU the caller
        is held until the copies have come near.

        Raises:
            ValueError: another direction than ``"onload"`` and ``"offload"``.
            ClosedError: closed.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
            ...     save = scheduler.offload([2], [0])
            ...     scheduler.record_event("offload").synchronize()
            ...     save.done()
            True
        """
        if direction not in ("onload", "offload"):
            raise ValueError(f"direction = {direction!r} must be 'onload' or 'offload'")
        held = Use(self.group)
        streams, events = change(self, functools.partial(self._use_streams, direction, held))
        try:
            # Outside of the lock: the caller may be held until all that is enqueued is submitted.
            for event in events:  # one event for both streams of the direction
                self.backend.record(event, streams["urgent"])
                self.backend.wait_on_stream(streams["onload"], event, None)
            return self.backend.user_event(streams[direction])
        finally:
            self._users.discard(held)
            self.group.notify()

    def _use_streams(self, direction: str, use: Use) -> tuple[dict[str, Stream], Events | list[Event]]:
        self.check_open()
        self._users.add(use)  # close waits for it
        streams = dict(self.resources.streams)
        return streams, self.resources.take_events(1) if direction == "onload" and "urgent" in streams else []

    def fileno(self) -> int:
        """A descriptor (eventfd) that can be read from when a transfer has ended since :meth:`finished` was last
        called: for ``select``, ``epoll`` or an event loop. It is the scheduler's, and is closed with it.

        Raises:
            ClosedError: closed.
        """
        return int(change(self, self._open_descriptor))

    def _open_descriptor(self) -> int:
        self.check_open()
        self.resources.reserve.clear()  # it has to hear of all from now on
        return self._finished.open_descriptor()

    def finished(self) -> list[Transfer]:
        """The transfers that have ended since the last call, in that order, whatever their end; for a server that looks
        once in each of its steps. The first call, or that of :meth:`fileno`, begins the collecting; from then on call
        it regularly, since the list keeps the transfers.

        Example:
            >>> import select
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
            ...     descriptor = scheduler.fileno()
            ...     save = scheduler.offload([2], [0])
            ...     _ = select.select([descriptor], [], [], 10.0)
            ...     scheduler.finished() == [save], scheduler.finished()
            (True, [])
        """
        return list(change(self, self._take_finished).take())

    def _take_finished(self) -> OnItsWay:
        self.resources.reserve.clear()  # as above
        return self._finished.take(self)

    def in_flight(self) -> list[Transfer]:
        """The transfers that are not over, in order of submission, also those whose handle was lost."""
        found = change(self, lambda: list(self._in_flight))
        return [movement.handle() or Transfer(movement) for movement in found]

    def stats(self) -> dict[str, int]:
        """Counts since the scheduler was made, and what it holds now. Asks events of the device; works after
        :meth:`close`.

        - ``onload_transfers``, ``offload_transfers``: transfers that were started
        - ``onload_bytes``, ``offload_bytes``: bytes of them
        - ``onload_us``, ``offload_us``: sum of :attr:`Transfer.elapsed_ms` of those that have arrived
        - ``failed``, ``cancelled``: transfers that did not move everything
        - ``in_flight``: transfers that are not over
        - ``events``, ``streams``: that it holds, but for events that are kept ready for the next transfer
        - ``pinned_bytes``: that its host pool holds

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
            ...     save = scheduler.offload([2, 3], [0, 1])
            ...     scheduler.drain(timeout_s=10)
            ...     [scheduler.stats()[name] for name in ("offload_transfers", "offload_bytes", "in_flight")]
            [1, 384, 0]
        """
        found: dict[str, int] = change(self, self._stats_here)
        return found

    def _stats_here(self) -> dict[str, int]:
        self._look_at_all()
        return {
            **self._statistics.as_dict(),
            "in_flight": len(self._in_flight),
            "events": self.resources.num_events,
            "streams": len(self.resources.streams),
            "pinned_bytes": self.host_pool.pinned_bytes,
        }

    def now_ms(self) -> float:
        """Host time since the scheduler was made: the axis of ``layer_times_ms`` on the CPU backend."""
        return (time.perf_counter() - self._origin_s) * 1e3

    # ---- for the transfers ----
    def compute_stream(self, stream: Any) -> Stream:
        """The stream that the caller means; None stands for that of the scheduler."""
        return self.backend.compute_stream(self.default_stream if stream is None else stream)

    def note_start(self, movement: Movement) -> None:
        """In a section: the transfer is about to be submitted. Again: does nothing."""
        if movement in self._in_flight:
            return
        self._statistics.started(movement)
        self._in_flight[movement] = None
        if self.observer is not None:
            self.observer.started(movement)

    def forget_start(self, movement: Movement) -> None:
        """In a section: takes that back, if it was done."""
        if movement in self._in_flight:
            del self._in_flight[movement]
            self._statistics.started(movement, -1)

    def note_end(self, movement: Movement) -> None:
        """In a section: the transfer is over."""
        del self._in_flight[movement]
        if self._process_id != os.getpid():
            return
        self._statistics.ended(movement)
        self._finished.add(movement)
        self._prepare_next()

    def note_alone(self, one: Alone) -> None:
        """In a section: it is over, and has not been noted."""
        self._statistics.started(one)
        self._statistics.ended(one)
        self._prepare_next()

    def _prepare_next(self) -> None:
        """Now, so that the next start need not do it."""
        with contextlib.suppress(Exception):  # of a lost device, or of memory
            self.resources.collect_events()
            if self._may_be_alone and not self._finished.collects:
                self.resources.keep_reserve(alone.FIRST_GROUP + self._num_groups)

    def look_at(self, movement: Movement) -> None:
        """In a section: asks the device how far it is."""
        settling.look(movement)

    def abandon(self, movement: Movement) -> None:
        """In a forked child: nothing moves here any more."""
        settling.abandon(movement)


def check_scheduler(scheduler: Any) -> None:
    """TypeError unless it is a scheduler."""
    if not isinstance(scheduler, LayerwiseScheduler):
        raise TypeError(f"scheduler is {type(scheduler).__name__}; a LayerwiseScheduler is expected")
