"""What a backend is asked to do. Pure: no device, no Paddle, no CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..checks import Ids

Stream = Any
Event = Any
Direction = Literal["onload", "offload"]
ENGINES = ("auto", "copy_engine", "kernel", "staging")  # in the order of the library's codes


@dataclass(eq=False)
class TransferPlan:
    """Blocks ``device_ids[i]`` and ``host_ids[i]`` of each layer, in groups of layers that share an event. Does not
    change once it is made."""

    direction: Direction
    device_ids: Ids
    host_ids: Ids
    num_layers: int
    layers_per_event: int
    left_out: frozenset[int] = frozenset()  # groups of which nothing is moved
    num_groups: int = field(init=False)
    groups: Sequence[int] = field(init=False)  # those that are moved
    num_moved_layers: int = field(init=False)

    def __post_init__(self) -> None:
        self.device_ids = np.ascontiguousarray(self.device_ids, np.int64)
        self.host_ids = np.ascontiguousarray(self.host_ids, np.int64)
        self.num_groups = -(-self.num_layers // self.layers_per_event) if len(self.device_ids) else 0
        self.groups = range(self.num_groups)
        self.num_moved_layers = self.num_layers
        if self.left_out:
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

    @property
    def source_ids(self) -> Ids:
        return self.device_ids if self.direction == "offload" else self.host_ids

    @property
    def target_ids(self) -> Ids:
        return self.host_ids if self.direction == "offload" else self.device_ids

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
