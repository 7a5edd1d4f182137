"""Writes and compares blocks in RAM: the host's side of a soak run, and "compute" on the CPU backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ...layout import KVCacheSpec
from ...memory import DeviceCache, HostPool
from ...memory.host_rows import Rows, host_rows
from .mismatch import Mismatch, SoakFailure
from .pattern import expected_bytes

SHOWN_BYTES = 8

# From the position in ``blocks`` to the number of the transfer that wrote the block last, 0 for none.
Writers = Sequence[int]


class Compute(Protocol):
    """Work on device blocks, in order on one stream. ``contents`` is ``[blocks, layers of the call]``."""

    stream: Any

    def fill(self, blocks: np.ndarray, layers: range, contents: np.ndarray) -> None: ...

    def check(self, blocks: np.ndarray, layers: range, contents: np.ndarray, writers: Writers, step: int) -> None:
        """Compares; what differs is raised here or by :meth:`flush`."""

    def check_host(self, blocks: np.ndarray, layers: range, contents: np.ndarray, writers: Writers, step: int) -> None:
        """Compares many blocks of the host pool; :meth:`flush` has to be called before they may change."""

    def delay(self, microseconds: float) -> None:
        """Makes what is submitted from now on late, where there is a stream to be late on."""

    def flush(self) -> None:
        """Raises SoakFailure if any check so far has found a difference."""

    def handles(self) -> dict[str, int]:
        """What the device has given out, by name."""


class RamBlocks:
    """The blocks of a pool in RAM. ``rows[layer][tensor]`` is ``[blocks, bytes]``."""

    def __init__(self, side: str, spec: KVCacheSpec, rows: list[list[np.ndarray]], describe: Callable[[int], str]):
        self.side = side
        self.spec = spec
        self.rows = rows
        self.describe = describe

    def fill(self, blocks: np.ndarray, layers: range, contents: np.ndarray) -> None:
        tensors = len(self.spec.tensor_names)
        for position, layer in enumerate(layers):
            for tensor, memory in enumerate(self.rows[layer]):
                memory[blocks] = expected_bytes(contents[:, position], layer * tensors + tensor, memory.shape[1])

    def check(self, blocks: np.ndarray, layers: range, contents: np.ndarray, writers: Writers, step: int) -> None:
        """Raises SoakFailure at the first byte that differs."""
        tensors = len(self.spec.tensor_names)
        for position, layer in enumerate(layers):
            for tensor, memory in enumerate(self.rows[layer]):
                expected = expected_bytes(contents[:, position], layer * tensors + tensor, memory.shape[1])
                found = memory[blocks]
                if not np.array_equal(found, expected):
                    at, offset = np.argwhere(found != expected)[0]
                    name = self.spec.tensor_names[tensor]
                    self._fail(int(blocks[at]), layer, name, int(offset), expected[at], found[at], writers[at], step)

    def _fail(
        self, block: int, layer: int, name: str, offset: int, expected: Any, found: Any, writer: int, step: int
    ) -> None:
        shown = slice(offset, offset + SHOWN_BYTES)
        mismatch = Mismatch(
            self.side,
            block,
            layer,
            name,
            offset,
            expected[shown].tobytes().hex(),
            found[shown].tobytes().hex(),
            step,
            self.describe(writer),
        )
        raise SoakFailure(str(mismatch), mismatch)


def host_blocks(pool: HostPool, describe: Callable[[int], str]) -> RamBlocks:
    return RamBlocks("host", pool.spec, host_rows(pool), describe)


class CpuCompute(RamBlocks):
    """See :class:`Compute`. All is done when a call returns."""

    stream = None

    def __init__(self, cache: DeviceCache, pool: HostPool, describe: Callable[[int], str]) -> None:
        spec = cache.spec
        self.check_host = host_blocks(pool, describe).check
        rows = []
        for layer in range(spec.num_layers):
            addresses = [cache.tensor(name, layer).data_ptr() for name in spec.tensor_names]
            sizes = [spec.tensor_block_bytes(name) for name in spec.tensor_names]
            rows.append(
                [np.asarray(Rows(a, cache.num_blocks, size, size)) for a, size in zip(addresses, sizes, strict=True)]
            )
        super().__init__("device", spec, rows, describe)

    def delay(self, microseconds: float) -> None:
        pass

    def flush(self) -> None:
        pass

    def handles(self) -> dict[str, int]:
        return {}
