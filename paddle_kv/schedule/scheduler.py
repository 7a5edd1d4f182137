"""Loads and saves of the KV cache, layer by layer, beside the computation. The contract is in docs/ordering.md."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from types import TracebackType
from typing import Any, Literal

from .. import backend as backends
from ..backend.protocol import ENGINES, Backend, Event, Stream
from ..layout import check_positive
from ..memory import DeviceCache, HostPool
from ..ops import _arguments as arguments
from ..ops import _check
from ..tracking import hazards
from . import checksum
from .plan import Direction, check_timeout, make_plan
from .resources import DeviceResources, abandoned, release_abandoned
from .transfer import Transfer, depend

EXIT_TIMEOUT_S = 30.0
URGENT_SHARE = 8
URGENT_BESIDE_BYTES = 64 << 20  # a millisecond of the link

_check.access_checks.append(hazards.check_access)
_schedulers: weakref.WeakSet[LayerwiseScheduler] = weakref.WeakSet()


class LayerwiseScheduler:
    """Moves blocks between a device cache and a host pool on streams of its own, one per direction and one for
    urgent loads.

    Args:
        device_cache: the cache of this rank.
        host_pool: blocks in host memory, same spec.
        compute_stream: stream on which the model runs (int handle, CuPy or Paddle stream). None: at each call Paddle's
            current stream, or the CuPy stream of the surrounding ``with`` block.
        backend: "cupy" on a GPU, "cpu" without, "auto" picks; or an object that implements the protocol.
        engine: how bytes are moved on a GPU: "copy_engine", "kernel", "staging", or "auto", which chooses for each
            transfer (docs/design.md).
        layers_per_event: layers that share an event. More make a submission of a deep model cheaper and waits coarser.
        record_layer_times: keep the times of each layer's copy (:attr:`Transfer.layer_times_ms`).

    Raises:
        TypeError: not a cache and a pool.
        ValueError: their specs differ, one lies in the memory of the other, a backend or an engine that is not there,
            host memory that the GPU cannot reach.
        RuntimeError: the pool is closed.

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
            raise RuntimeError("the host pool is closed")
        if engine not in ENGINES:
            raise ValueError(f"engine = {engine!r} must be one of {', '.join(map(repr, ENGINES))}")
        layers_per_event = check_positive(layers_per_event, "layers_per_event")
        if device_cache.domain is host_pool.domain:
            raise ValueError("host_pool lies in the memory of device_cache; it needs memory of its own")
        self.device_cache = device_cache
        self.host_pool = host_pool
        self._bytes_per_block = device_cache.spec.block_bytes * device_cache.spec.num_layers
        self._default_stream = compute_stream
        self._engine = engine
        self._layers_per_event = min(layers_per_event, device_cache.spec.num_layers)  # it has to fit in 64 bits
        self._record_layer_times = record_layer_times
        self._backend = backends.create(backend, device_cache.device_id)
        self._process_id = os.getpid()
        self._counters = dict.fromkeys(
            ["onload_transfers", "offload_transfers", "onload_bytes", "offload_bytes", "failed", "cancelled"], 0
        )
        self._copying_ms = {"onload": 0.0, "offload": 0.0}
        self._closed = False
        self._closers = 0  # threads in close(), and those that have closed it
        self._observer = checksum.ChecksumObserver(host_pool) if checksum.enabled() else None
        release_abandoned()
        self._resources = DeviceResources(self._backend, device_cache, host_pool)
        self.origin_event = self._resources.origin_event
        self._origin_s = time.perf_counter()  # before: no copy may seem to end in the future
        try:
            self._backend.record(self.origin_event, self._resources.streams["onload"])
            self._backend.wait(self.origin_event, None)
        except BaseException:
            self._resources.release()
            raise
        self._abandon = weakref.finalize(self, abandoned.append, self._resources)
        self._abandon.atexit = False
        _schedulers.add(self)

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
            the transfer. It need not be kept: without a reference it ends all the same, but nobody hears of a failure.

        Raises:
            TypeError: ids that are not integers.
            IndexError: an id is outside its pool.
            ValueError: lists of different length, a host block named twice.
            RuntimeError: closed, a leased block, or the compute stream is being captured into a graph.
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
        return self._start("offload", device_block_ids, host_block_ids, layerwise=layerwise)

    def onload(self, host_block_ids: Any, device_block_ids: Any, *, urgent: bool | None = None) -> Transfer:
        """Loads blocks: ``host_block_ids[i]`` to ``device_block_ids[i]`` of every layer and tensor, layers in order.

        Does not overwrite a block before the work submitted to the compute stream before the call is done. Compute may
        touch the blocks only after ``wait_layer``, ``wait_on`` or ``wait``.

        Loads run one behind the other. An urgent one does not queue behind those before it, unless they share a block;
        None: it is urgent if it finds eight times its own bytes, and at least 64 MiB, in flight.

        Args:
            host_block_ids: sources, see :meth:`offload`. Blocks that were never saved are loaded as they are.
            device_block_ids: as many targets, each once.
            urgent: True, False, or None for the rule above.

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
        return self._start("onload", device_block_ids, host_block_ids, layerwise=False, urgent=urgent)

    def _start(
        self, direction: Direction, device_ids: Any, host_ids: Any, *, layerwise: bool, urgent: bool | None = False
    ) -> Transfer:
        self._check_open()
        plan = make_plan(
            direction,
            arguments.block_id_array(device_ids, "device_block_ids"),
            arguments.block_id_array(host_ids, "host_block_ids"),
            device_blocks=self.device_cache.num_blocks,
            host_blocks=self.host_pool.num_blocks,
            num_layers=self.device_cache.spec.num_layers,
            layers_per_event=self._layers_per_event,
        )
        compute = self._compute_stream(None)
        to_host = direction == "offload"
        source, target = (self.device_cache, self.host_pool) if to_host else (self.host_pool, self.device_cache)
        names = ("device cache", "host pool") if to_host else ("host pool", "device cache")
        with hazards.changed:
            self._check_open()
            hazards.collect()
            source.domain.check(plan.source_ids, names[0], writing=False)
            target.domain.check(plan.target_ids, names[1], writing=True)
            if self._observer is not None and not to_host:
                self._observer.check(plan.host_ids)
            if urgent is None:
                urgent = self._is_small_beside_others(len(plan.device_ids) * self._bytes_per_block)
            stream = self._resources.urgent_stream() if urgent else self._resources.streams[direction]
            transfer = Transfer(self, plan, stream, layerwise=layerwise)
            if not layerwise and plan.num_groups:
                try:
                    event = transfer._take_event()
                    self._backend.record(event, compute)
                except BaseException:
                    transfer._give_back_events()
                    raise
                transfer._after.append(event)
            depend(
                transfer,
                source.domain.read(plan.source_ids, transfer),
                target.domain.write(plan.target_ids, transfer),
            )
            hazards.add_in_flight(transfer)
            self._counters[f"{direction}_transfers"] += 1
            self._counters[f"{direction}_bytes"] += transfer.bytes
            if self._observer is not None:
                self._observer.started(transfer)
            transfer._advance()
            if not plan.num_groups or transfer.failed:
                transfer.poll()
        if transfer.failed:
            # The caller gets no handle to wait with, so the compute stream waits for what of it may run.
            transfer._hold(compute)
            transfer._raise_if_failed()
        return transfer

    def record_event(self, direction: Literal["onload", "offload"]) -> Any:
        """An event behind everything submitted so far in that direction, on its streams.

        A ``cupy.cuda.Event``, which any stream may wait for; on the CPU backend an object with ``done()``,
        ``wait(timeout_s)`` and ``synchronize()``. It says nothing of failures: ask the transfers. On a GPU the caller
        is held until the copies have come near.

        Raises:
            ValueError: another direction than ``"onload"`` and ``"offload"``.
            RuntimeError: closed.

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
        with hazards.lock:
            self._check_open()
            streams = dict(self._resources.streams)
            urgent: list[Event] = []
            if direction == "onload" and "urgent" in streams:
                self._resources.take_events(1, urgent)
        # Outside of the lock: the caller may be held until all that is enqueued is submitted.
        try:
            for event in urgent:  # one event for both streams of the direction
                self._backend.record(event, streams["urgent"])
                self._backend.wait_on_stream(streams["onload"], event, None)
            return self._backend.user_event(streams[direction])
        finally:
            with hazards.lock:
                self._resources.give_back(urgent)

    def drain(self, timeout_s: float | None = None) -> None:
        """Blocks until all transfers of this scheduler are over, failed ones too (their errors stay with them).

        Raises:
            TimeoutError: not after ``timeout_s``, for example because a layer was never marked as written.
        """
        check_timeout(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with hazards.changed:
                hazards.collect()
                left = self._in_flight()
                if not left:
                    return
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{len(left)} transfers were not over after timeout_s = {timeout_s}; the first: {left[0]!r}"
                    )
                hazards.changed.wait(0.001)

    def close(self, timeout_s: float | None = None) -> None:
        """Drops what is not submitted, waits for the rest, and gives streams and events back. Again: does nothing.

        The pools stay: they are the user's to close.

        Raises:
            TimeoutError: a transfer was not over after ``timeout_s``; the scheduler stays open then.
        """
        if self._process_id != os.getpid():
            return
        check_timeout(timeout_s)
        with hazards.lock:
            if self._closed:
                return
            self._closers += 1  # or threads that go on submitting would keep it open
            for transfer in self._in_flight():
                transfer.cancel()
        try:
            self.drain(timeout_s)
        except BaseException:
            with hazards.lock:
                self._closers -= 1
            raise
        with hazards.lock:
            if self._closed:  # another thread was quicker
                return
            self._closed = True
        self._abandon.detach()
        self._resources.release()
        release_abandoned()

    def stats(self) -> dict[str, int]:
        """Counts since the scheduler was made, and what it holds now. Asks events of the device; works after
        :meth:`close`.

        - ``onload_transfers``, ``offload_transfers``: transfers that were started
        - ``onload_bytes``, ``offload_bytes``: bytes of them
        - ``onload_us``, ``offload_us``: sum of :attr:`Transfer.elapsed_ms` of those that have arrived
        - ``failed``, ``cancelled``: transfers that did not move everything
        - ``in_flight``: transfers that are not over
        - ``events``, ``streams``: that it holds
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
        with hazards.lock:
            hazards.collect()
            return {
                **self._counters,
                **{f"{direction}_us": round(total_ms * 1e3) for direction, total_ms in self._copying_ms.items()},
                "in_flight": len(self._in_flight()),
                "events": self._resources.num_events,
                "streams": len(self._resources.streams),
                "pinned_bytes": self.host_pool.pinned_bytes,
            }

    def now_ms(self) -> float:
        """Host time since the scheduler was made: the axis of ``layer_times_ms`` on the CPU backend."""
        return (time.perf_counter() - self._origin_s) * 1e3

    def __enter__(self) -> LayerwiseScheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for the transfers ----
    def _compute_stream(self, stream: Any) -> Stream:
        return self._backend.compute_stream(self._default_stream if stream is None else stream)

    def _is_small_beside_others(self, own_bytes: int) -> bool:
        stream = self._resources.streams["onload"]
        before = sum(transfer.bytes for transfer in self._in_flight() if transfer.is_on(stream))
        return before >= max(URGENT_SHARE * own_bytes, URGENT_BESIDE_BYTES)

    def _in_flight(self) -> list[Transfer]:
        mine = [t for t in hazards.in_flight() if isinstance(t, Transfer) and t._scheduler is self]
        return [transfer for transfer in mine if not transfer.is_settled]

    def _check_open(self) -> None:
        if self._closers:
            raise RuntimeError("the scheduler is closed")
        if self._process_id != os.getpid():
            raise RuntimeError("the scheduler was made before a fork; make one in this process")
        if self.host_pool.closed:
            raise RuntimeError("the host pool is closed")


def check_scheduler(scheduler: Any) -> None:
    """TypeError unless it is a scheduler."""
    if not isinstance(scheduler, LayerwiseScheduler):
        raise TypeError(f"scheduler is {type(scheduler).__name__}; a LayerwiseScheduler is expected")


@atexit.register
def _close_all() -> None:
    """No memory may go away while a copy runs, not even at exit."""
    for scheduler in list(_schedulers):
        try:
            scheduler.close(EXIT_TIMEOUT_S)
        except Exception:  # noqa: BLE001  nobody is left to be told
            continue
    release_abandoned()
