"""What a transfer is asked to do, checked. Pure: no device, no Paddle, no CuPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Literal, TypeAlias

import numpy as np

Direction = Literal["onload", "offload"]
Ids: TypeAlias = np.ndarray  # 1-D, int64, contiguous


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Blocks ``device_ids[i]`` and ``host_ids[i]`` of each layer, in groups of layers that share an event."""

    direction: Direction
    device_ids: Ids
    host_ids: Ids
    num_layers: int
    layers_per_event: int

    def __post_init__(self) -> None:
        for name in ("device_ids", "host_ids"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))

    @property
    def source_ids(self) -> Ids:
        return self.device_ids if self.direction == "offload" else self.host_ids

    @property
    def target_ids(self) -> Ids:
        return self.host_ids if self.direction == "offload" else self.device_ids

    @property
    def num_groups(self) -> int:
        return -(-self.num_layers // self.layers_per_event) if len(self.device_ids) else 0

    def group_of(self, layer: int) -> int:
        return layer // self.layers_per_event

    def layers_of(self, group: int) -> range:
        first = group * self.layers_per_event
        return range(first, min(first + self.layers_per_event, self.num_layers))


def make_plan(
    direction: Direction,
    device_ids: Sequence[int] | Ids,
    host_ids: Sequence[int] | Ids,
    *,
    device_blocks: int,
    host_blocks: int,
    num_layers: int,
    layers_per_event: int,
) -> TransferPlan:
    """A checked plan. int64 arrays are kept, not copied: nobody may change them afterwards.

    Raises:
        IndexError: an id is outside its pool.
        ValueError: the lists differ in length, or a target occurs twice.
    """
    check_ids(device_ids, "device_block_ids", device_blocks)
    check_ids(host_ids, "host_block_ids", host_blocks)
    if len(device_ids) != len(host_ids):
        raise ValueError(
            f"device_block_ids has {len(device_ids)} ids, host_block_ids has {len(host_ids)}; both need the same number"
        )
    check_distinct(*(("host_block_ids", host_ids) if direction == "offload" else ("device_block_ids", device_ids)))
    return TransferPlan(direction, np.asarray(device_ids), np.asarray(host_ids), num_layers, layers_per_event)


def check_ids(ids: Sequence[int] | Ids, name: str, num_blocks: int) -> None:
    """IndexError unless each id lies in [0, num_blocks)."""
    found = np.asarray(ids)
    if found.size and (found.min() < 0 or found.max() >= num_blocks):
        position = next(i for i, block_id in enumerate(ids) if not 0 <= block_id < num_blocks)
        raise IndexError(f"{name}[{position}] = {ids[position]} must be in [0, {num_blocks})")


def check_distinct(name: str, ids: Sequence[int] | Ids) -> None:
    """ValueError if an id, none of them negative, occurs twice."""
    found = np.asarray(ids, np.int64)
    if not found.size:
        return
    seen = np.zeros(found.max() + 1, bool)
    seen[found] = True
    if np.count_nonzero(seen) != found.size:
        [(block_id, _)] = Counter(found.tolist()).most_common(1)
        raise ValueError(f"{name} names block {block_id} more than once; each may occur only once")


def check_timeout(timeout_s: float | None) -> None:
    """TypeError or ValueError unless it is a number of seconds or None; a negative one is over at once."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real):
        raise TypeError(f"timeout_s is {timeout_s!r}; a number of seconds or None is expected")
    if not timeout_s <= TIMEOUT_MAX:
        raise ValueError(f"timeout_s = {timeout_s} must be at most {TIMEOUT_MAX:.0f} seconds, or None")
