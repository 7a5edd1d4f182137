"""What each block must hold, by the contract: transfers act in the order of their calls, whatever the device does."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...schedule.transfer import Transfer

UNKNOWN = 0  # nobody may rely on it
PENDING = -1  # known when the layer of a save is marked


class Blocks:
    """The blocks of one side: which are in use, what each layer of them holds, and which transfer wrote them last."""

    def __init__(self, num_blocks: int, num_layers: int) -> None:
        self.used = np.zeros(num_blocks, bool)
        self.contents = np.full((num_blocks, num_layers), UNKNOWN, np.int64)
        self.writers = np.zeros(num_blocks, np.int64)
        self.poisoned = np.zeros(num_blocks, bool)

    @property
    def whole(self) -> np.ndarray:
        """Blocks in use of which every layer holds something, or will."""
        return self.used & (self.contents != UNKNOWN).all(axis=1)  # type: ignore[no-any-return]

    def written_by_others(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        """Computation or the host has written all layers."""
        self.contents[blocks] = contents
        self.writers[blocks] = 0
        self.poisoned[blocks] = False


@dataclass(eq=False)
class Flight:
    """A transfer that has not been waited for to its end."""

    number: int
    saves: bool
    device_ids: np.ndarray
    host_ids: np.ndarray
    contents: np.ndarray  # what it moves, [blocks, layers]
    targets: Blocks
    unmarked: list[int]  # layers of a layerwise save, in the order in which they will be marked
    behind: list[Flight]  # held when it was started, and in conflict with it
    transfer: Transfer
    touches_device: np.ndarray  # a flag for each block of the pool
    touches_host: np.ndarray
    ordered: set[int] = field(default_factory=set)  # layers that the compute stream waits for
    failed: bool = False
    readers: list[tuple[Flight, np.ndarray, np.ndarray]] = field(default_factory=list)  # positions there, and here

    @property
    def held(self) -> bool:
        """Whether its blocks stay in use until a layer is marked, of it or of a transfer that it follows. A transfer
        that was dropped too: whoever comes later inherits its order."""
        return bool(self.unmarked) or any(flight.held for flight in self.behind)

    @property
    def open(self) -> bool:
        """Whether it can be waited for only behind such a mark."""
        return not self.failed and self.held

    @property
    def source_ids(self) -> np.ndarray:
        return self.device_ids if self.saves else self.host_ids

    @property
    def target_ids(self) -> np.ndarray:
        return self.host_ids if self.saves else self.device_ids

    def conflicts(self, saves: bool, device_ids: np.ndarray, host_ids: np.ndarray) -> bool:
        """Whether a later transfer has to follow this one."""
        device = bool(self.touches_device[device_ids].any())
        host = bool(self.touches_host[host_ids].any())
        if self.saves != saves:
            return device or host
        return host if saves else device

    def write(self) -> None:
        """Its targets hold what it moves."""
        self.targets.contents[self.target_ids] = self.contents
        self.targets.writers[self.target_ids] = self.number

    def resolve(self, positions: np.ndarray, layer: int, contents: np.ndarray) -> None:
        """What was pending is known: the layer is marked."""
        self.contents[positions, layer] = contents
        ids = self.target_ids[positions]
        mine = self.targets.writers[ids] == self.number
        self.targets.contents[ids[mine], layer] = contents[mine]
        for reader, there, here in self.readers:
            wanted = np.isin(here, positions)
            if wanted.any() and not reader.failed:
                reader.resolve(there[wanted], layer, self.contents[here[wanted], layer])

    def fail(self) -> list[Flight]:
        """It was dropped, and with it what reads its result. All that fail by it."""
        if self.failed:
            return []
        self.failed = True
        self.unmarked.clear()
        mine = self.target_ids[self.targets.writers[self.target_ids] == self.number]
        self.targets.contents[mine] = UNKNOWN
        self.targets.poisoned[mine] = True
        fallen = [self]
        for reader, _, _ in self.readers:
            fallen.extend(reader.fail())
        return fallen

    def __str__(self) -> str:
        kind = "offload" if self.saves else "onload"
        return f"t{self.number} ({kind} of {len(self.device_ids)} blocks)"
