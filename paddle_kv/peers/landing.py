"""The side of a load that a sender has written by itself: transfers of it move nothing, and have all the rest.

A sender that writes straight into the device cache of a receiver leaves nothing to copy there. But the load is still
ordered behind what the cache was used for, tells of each layer, fails, poisons and ends as every load. So it is one,
out of blocks of no bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..memory import HostPool
from ..schedule.scheduler import LayerwiseScheduler
from ..tracking.memories import Extent


class Landing(HostPool):
    """Two blocks of no bytes for each block of a device cache: ``i`` stands for what a sender writes into block ``i``,
    ``i + num_device_blocks`` for the wait until it may."""

    in_host_memory = False

    def __init__(self, spec: Any, num_device_blocks: int) -> None:
        self._set_up(spec, 2 * num_device_blocks)
        self._names = np.zeros(self.num_blocks, np.uint8)  # an address for each: by it the tracking knows a block
        first = self._names.ctypes.data
        for name in spec.tensor_names:
            self._pointers[name] = [first] * spec.num_layers
            self._strides[name] = 0
        self._attach([Extent(first, first + self.num_blocks, 1)])
        self._free.allocate(self.num_blocks)
        self._attached = True

    def moved_block_bytes(self, name: str) -> int:
        """Nothing."""
        return 0


def landing_scheduler(scheduler: LayerwiseScheduler) -> LayerwiseScheduler:
    """One beside it, on the same cache and compute stream, for loads that move nothing. To be closed before it."""
    cache = scheduler.device_cache
    return LayerwiseScheduler(
        cache,
        Landing(cache.spec, cache.num_blocks),
        compute_stream=scheduler.default_stream,
        backend=scheduler.backend.name if scheduler.backend.name in ("cupy", "cpu") else "auto",
        engine="copy_engine",  # which has nothing to launch for no bytes
    )
