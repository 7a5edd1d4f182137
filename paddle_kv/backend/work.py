"""What a backend is asked to do. Pure: no device, no Paddle, no CuPy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..checks import Ids

Stream = Any
Event = Any
Direction = Literal["onload", "offload"]
ENGINES = ("auto", "copy_engine", "kernel", "staging")  # in the order of the library's codes


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Blocks ``device_ids[i]`` and ``host_ids[i]`` of each layer, in groups of layers that share an event."""

    direction: Direction
    device_ids: Ids
    host_ids: Ids
    num_layers: int
    layers_per_event: int
    left_out: frozenset[int] = frozenset()  # groups of which nothing is moved

    def __post_init__(self) -> None:
        for name in ("device_ids", "host_ids"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))

    @functools.cached_property
    def id_lists(self) -> tuple[list[int], list[int]]:
        """Those of the device and of the host, as operators take them."""
        return self.device_ids.tolist(), self.host_ids.tolist()

    @property
    def source_ids(self) -> Ids:
        return self.device_ids if self.direction == "offload" else self.host_ids

    @property
    def target_ids(self) -> Ids:
        return self.host_ids if self.direction == "offload" else self.device_ids

    @property
    def num_groups(self) -> int:
        return -(-self.num_layers // self.layers_per_event) if len(self.device_ids) else 0

    @property
    def groups(self) -> list[int]:
        """Those that are moved."""
        return [group for group in range(self.num_groups) if group not in self.left_out]

    @property
    def num_moved_layers(self) -> int:
        return self.num_layers - sum(len(self.layers_of(group)) for group in self.left_out)

    def group_of(self, layer: int) -> int:
        return layer // self.layers_per_event

    def layers_of(self, group: int) -> range:
        first = group * self.layers_per_event
        return range(first, min(first + self.layers_per_event, self.num_layers))


@dataclass(frozen=True)
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
