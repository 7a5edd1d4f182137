"""What a backend is asked to do. Pure: no device, no Paddle, no CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..checks import Ids

Stream = Any
Event = Any
Direction = Literal["onload", "offload"]
ENGINES = ("auto", "copy_engine", "kernel", "staging")  # in the order of the library's codes


class TransferPlan:
    """Blocks ``device_ids[i]`` and ``host_ids[i]`` of each layer, in groups of layers that share an event. Does not
    change once it is made. Of ``left_out`` groups nothing is moved."""

    def __init__(
        self,
        direction: Direction,
        device_ids: Sequence[int] | Ids,
        host_ids: Sequence[int] | Ids,
        num_layers: int,
        layers_per_event: int,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        device: Ids = np.ascontiguousarray(device_ids, np.int64)
        host: Ids = np.ascontiguousarray(host_ids, np.int64)
        self.direction = direction
        self.device_ids, self.host_ids = device, host
        self.source_ids, self.target_ids = (device, host) if direction == "offload" else (host, device)
        self.num_layers, self.layers_per_event = num_layers, layers_per_event
        self.left_out = left_out
        self.num_groups = -(-num_layers // layers_per_event) if len(device) else 0
        self.groups: Sequence[int] = range(self.num_groups)  # those that are moved
        self.num_moved_layers = num_layers
        if left_out:
            self.groups = [group for group in self.groups if group not in self.left_out]
            self.num_moved_layers -= sum(len(self.layers_of(group)) for group in self.left_out)

    @property
    def id_lists(self) -> tuple[list[int], list[int]]:
        """Those of the device and of the host, as operators take them."""
        # Not by ``functools.cached_property``: before Python 3.12 that has a lock, which a fork may leave locked.
        found: tuple[list[int], list[int]] | None = self.__dict__.get("_id_lists")
        if found is None:
            found = self.__dict__["_id_lists"] = self.device_ids.tolist(), self.host_ids.tolist()
        return found

    def group_of(self, layer: int) -> int:
        return layer // self.layers_per_event

    def layers_of(self, group: int) -> range:
        first = group * self.layers_per_event
        return range(first, min(first + self.layers_per_event, self.num_layers))


@dataclass(eq=False)
class LayerWork:
    """Consecutive groups of layers of one transfer, to be enqueued by one call."""

    plan: TransferPlan
    first_group: int
    end_group: int
    waits: Sequence[Sequence[Event]]  # for each group: events that come before it
    start: Event  # recorded behind the first group's waits
    records: Sequence[Event]  # for each group: recorded when its layers are copied
    engine: str = "auto"
    number: int = 0  # of the transfer, in this process: what ``cancel`` names
    watch: int = -1  # where a backend has its end watched along with it

    @property
    def layers(self) -> range:
        per_event = self.plan.layers_per_event
        return range(self.first_group * per_event, min(self.end_group * per_event, self.plan.num_layers))
