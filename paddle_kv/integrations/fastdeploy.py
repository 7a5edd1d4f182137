"""The transfer calls of FastDeploy's cache manager (``fastdeploy/cache_manager/v1``) under their names, on a scheduler.

What differs: the data moves on streams of its own, in order with the model and with every other transfer; a failure
raises (there: False, and the layer counts as done); an event stands for the layer that it was recorded for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CancelledError, TransferError
from ..ops import _arguments as arguments
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer


class LayerEvent:
    """Stands for one layer of a load, where FastDeploy keeps a CUDA event."""

    def __init__(self, load: Transfer, layer: int) -> None:
        self._load = load
        self._layer = layer

    def synchronize(self) -> None:
        """What the model does from now on sees the layer: :meth:`Transfer.wait_layer`, so on a GPU the host goes on.

        Raises:
            TransferError: the load failed.
        """
        self._load.wait_layer(self._layer)


class CacheTransferManager:
    """``evict_to_host_async``, ``load_layers_to_device_async`` and ``record_input_stream_event``.

    Args:
        scheduler: of the device cache and the host pool whose block ids are passed. Closing it stays with its owner.

    Any thread may call.

    Raises:
        TypeError: not a scheduler.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.integrations import CacheTransferManager
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
        ...     manager, events = CacheTransferManager(scheduler), []
        ...     save = manager.evict_to_host_async([3], [6])
        ...     load = manager.load_layers_to_device_async(
        ...         range(2), [6], [0], lambda layer: events.append(manager.record_input_stream_event()))
        ...     for event in events:
        ...         event.synchronize()  # then the layer
        ...     manager.sync_input_stream(), manager.sync_output_stream()
        (None, None)
    """

    def __init__(self, scheduler: LayerwiseScheduler) -> None:
        check_scheduler(scheduler)
        self._scheduler = scheduler
        self._loads, self._saves = _Unfinished(), _Unfinished()
        self._of_thread = threading.local()  # the event of the layer that is being submitted

    def evict_to_host_async(
        self, device_block_ids: Any, host_block_ids: Any, *, order_compute: bool = True
    ) -> Transfer:
        """Saves all layers. The transfer that it returns is true, as the bool there, and need not be kept: loads, and
        what the model does from now on, come behind it. On a GPU the host is held until the copies have come near.

        Args:
            order_compute: False: the call returns at once, and the device blocks may be written again only after
                ``wait_on()`` of the transfer.

        Raises:
            TransferError: it has failed already; nothing of it runs any more.
            As :meth:`LayerwiseScheduler.offload`.
        """
        save = self._scheduler.offload(device_block_ids, host_block_ids)
        if order_compute:
            try:
                save.wait_on()
            except (TransferError, CancelledError):
                save.wait_over()
                raise
        return self._saves.add(save)

    def load_layers_to_device_async(
        self,
        layer_indices: Sequence[int],
        host_block_ids: Any,
        device_block_ids: Any,
        on_layer_complete: Callable[[int], object] | None = None,
    ) -> Transfer:
        """Loads all layers in order; ``on_layer_complete(layer)`` is called for each when it has been submitted, and
        may call :meth:`record_input_stream_event` for the event of that layer. Returns the transfer (true).

        Raises:
            TypeError: ``on_layer_complete`` cannot be called.
            ValueError: ``layer_indices`` is not all layers in order. Nothing has moved.
            As :meth:`LayerwiseScheduler.onload`, and what ``on_layer_complete`` raises.
        """
        if on_layer_complete is not None and not callable(on_layer_complete):
            raise TypeError(
                f"on_layer_complete is {on_layer_complete!r}; a function of the layer, or None, is expected"
            )
        num_layers = self._scheduler.device_cache.spec.num_layers
        layers = arguments.block_ids(layer_indices, "layer_indices")
        if layers != list(range(num_layers)):
            raise ValueError(f"layer_indices = {layers} must be all layers in order, 0 to {num_layers - 1}")
        load = self._loads.add(self._scheduler.onload(host_block_ids, device_block_ids))
        if on_layer_complete is not None:
            try:
                for layer in layers:
                    self._of_thread.event = LayerEvent(load, layer)
                    on_layer_complete(layer)
            finally:
                self._of_thread.event = None
        return load

    def record_input_stream_event(self) -> Any:
        """In ``on_layer_complete``, in its thread: a :class:`LayerEvent` of that layer. Elsewhere an event behind all
        loads so far, as :meth:`LayerwiseScheduler.record_event`."""
        return getattr(self._of_thread, "event", None) or self._scheduler.record_event("onload")

    def sync_input_stream(self) -> None:
        """Blocks the host until all loads so far are over.

        Raises:
            TransferError: one of them failed.
        """
        self._loads.wait()

    def sync_output_stream(self) -> None:
        """Blocks the host until all saves so far are over.

        Raises:
            TransferError: one of them failed.
        """
        self._saves.wait()


class _Unfinished:
    """Transfers of one direction that nobody has waited for; of those that failed the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # nothing is waited for, and no section run, while it is held
        self._transfers: list[Transfer] = []
        self._failed: Transfer | None = None

    def add(self, transfer: Transfer) -> Transfer:
        with self._lock:
            self._failed = self._failed or next((one for one in self._transfers if _ended(one) and one.failed), None)
            self._transfers = [*(one for one in self._transfers if not _ended(one)), transfer]
        return transfer

    def wait(self) -> None:
        with self._lock:
            waited, failed = list(self._transfers), self._failed
        for transfer in waited:
            transfer.wait_over()
        with self._lock:
            self._transfers = [one for one in self._transfers if one not in waited]
            self._failed = None if self._failed is failed else self._failed
        for told in (failed, *waited):
            error = None if told is None else told.error
            if error is not None:
                raise error


def _ended(transfer: Transfer) -> bool:
    return transfer.state.is_end
