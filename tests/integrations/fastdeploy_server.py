"""A stand-in for FastDeploy's cache controller (``cache_manager/v1``): its pool of four threads, its layer counters and
its calls, written from how they behave. ``patched`` names the parts of the patch in ``docs/guides/fastdeploy.md`` that
are applied; without a part it does what the original does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paddle_kv.integrations import CacheTransferManager

PATCH = frozenset(
    ["in order", "events live", "errors raise", "told once", "saves are waited for", "nothing to do", "all layers"]
)


class LayerSwapTimeoutError(Exception):
    """A layer was not there in time."""


@dataclass
class Swap:
    """What the scheduler process asks for. ``success`` is sent back to it."""

    source_ids: list[int]
    target_ids: list[int]
    success: Any = None


class LayerCounter:
    """Which layers of one transfer are there: by an event each, or else by a mark."""

    def __init__(self, num_layers: int, patched: Collection[str]) -> None:
        self._num_layers, self._patched = num_layers, patched
        self._lock = threading.RLock()
        self._events: list[Any] = [None] * num_layers
        self._done: set[int] = set()
        self.transfer: Any = None  # patch: the save that it stands for
        self.error: BaseException | None = None  # patch: why there is no transfer

    def set_layer_event(self, layer: int, event: Any) -> None:
        with self._lock:
            if layer < len(self._events):
                self._events[layer] = event

    def mark_layer_done(self, layer: int) -> None:
        with self._lock:
            self._done.add(layer)

    def mark_all_done(self) -> None:
        with self._lock:
            self._done.update(range(self._num_layers))

    def cleanup(self) -> None:
        with self._lock:
            self._events.clear()

    def wait_for_layer(self, layer: int, timeout_s: float = 1.0) -> bool:
        return self._wait(layer, lambda: layer in self._done, timeout_s)

    def wait_all(self, timeout_s: float = 300.0) -> bool:
        if self.transfer is not None and "saves are waited for" in self._patched:
            self.transfer.wait(timeout_s)
        return self._wait(self._num_layers - 1, lambda: len(self._done) >= self._num_layers, timeout_s)

    def _wait(self, layer: int, is_done: Callable[[], bool], timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while True:
            if self.error is not None:
                raise self.error
            with self._lock:
                event = self._events[layer] if layer < len(self._events) else None
            if event is not None:
                try:
                    event.synchronize()
                    return True
                except Exception:
                    if "errors raise" in self._patched:
                        raise
            if is_done():
                return True
            if time.monotonic() >= end_s:
                raise LayerSwapTimeoutError
            time.sleep(0.001)


class Controller:
    """Takes the swaps of each step. ``num_hidden_layers``: of the model without its draft."""

    def __init__(
        self,
        manager: CacheTransferManager,
        num_hidden_layers: int,
        patched: Collection[str] = PATCH,
        write_policy: str = "write_through",
    ) -> None:
        self.manager, self.write_policy, self._patched = manager, write_policy, patched
        self.num_layers = manager.num_layers if "all layers" in patched else num_hidden_layers
        self.executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="cache_transfer")
        self.pending_evictions: list[LayerCounter] = []

    def submit_swap_tasks(self, evict: Swap | None, swap_in: Swap | None) -> LayerCounter | None:
        self._wait_for_evictions()
        if evict is not None:
            self.pending_evictions.append(self._submit(evict, self._evict))
            if self.write_policy == "write_back":
                self._wait_for_evictions()
        return None if swap_in is None else self._submit(swap_in, self._load)

    def close(self) -> None:
        self.executor.shutdown()
        self.manager.close()

    def _wait_for_evictions(self) -> None:
        pending = list(self.pending_evictions)
        if "told once" in self._patched:
            self.pending_evictions.clear()
        for counter in pending:
            counter.wait_all()
        self.pending_evictions.clear()

    def _submit(self, swap: Swap, move: Callable[[Swap, LayerCounter], Any]) -> LayerCounter:
        counter = LayerCounter(self.num_layers, self._patched)
        if not swap.source_ids or not swap.target_ids:
            swap.success = False
            if "nothing to do" in self._patched:
                counter.mark_all_done()
            return counter

        def transfer() -> None:
            try:
                swap.success = move(swap, counter)
            except Exception as error:  # noqa: BLE001  as the original; it is logged there
                swap.success = False
                if "errors raise" in self._patched:
                    counter.error = error
            finally:
                if "events live" not in self._patched:
                    counter.cleanup()

        if "in order" in self._patched:
            transfer()
        else:
            self.executor.submit(transfer)
        return counter

    def _evict(self, swap: Swap, counter: LayerCounter) -> Any:
        success = self.manager.evict_to_host_async(swap.source_ids, swap.target_ids)
        if success:
            counter.transfer = success
            counter.mark_all_done()
        return bool(success)

    def _load(self, swap: Swap, counter: LayerCounter) -> Any:
        def on_layer_complete(layer: int) -> None:
            counter.set_layer_event(layer, self.manager.record_input_stream_event())
            counter.mark_layer_done(layer)

        return bool(
            self.manager.load_layers_to_device_async(
                range(self.num_layers), swap.source_ids, swap.target_ids, on_layer_complete
            )
        )
