"""Whether a method really moves the bytes: run once on random data before it is timed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..devices import has_gpu
from .methods import Enqueue
from .setup import Case, Side, Way


def moves_the_bytes(case: Case, way: Way, enqueue: Enqueue, stream: Any) -> bool:
    """Fills source and target differently, runs once, compares every piece."""
    source, source_ids = (case.host, case.host_ids) if way == "h2d" else (case.device, case.device_ids)
    target, target_ids = (case.device, case.device_ids) if way == "h2d" else (case.host, case.host_ids)
    source_on_device, target_on_device = way != "h2d", way != "d2h"
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (case.num_blocks, max(source.sizes)), dtype="uint8")
    for i in range(len(source.bases)):
        expected = _piece_data(data, i, source.sizes[i])
        _rows(source, i, source_on_device, write=(source_ids, expected))
        _rows(target, i, target_on_device, write=(target_ids, ~expected))
    _synchronize(stream)
    enqueue()
    _synchronize(stream)
    return all(
        np.array_equal(_rows(target, i, target_on_device, read=target_ids), _piece_data(data, i, target.sizes[i]))
        for i in range(len(target.bases))
    )


def _piece_data(data: np.ndarray, i: int, size: int) -> np.ndarray:
    """Different bytes for every tensor without drawing them again."""
    return data[:, :size] ^ np.uint8(i % 251)


def _rows(
    side: Side,
    i: int,
    on_device: bool,
    *,
    read: list[int] | None = None,
    write: tuple[list[int], np.ndarray] | None = None,
) -> np.ndarray:
    ids = write[0] if write is not None else read or []
    shape, strides = (max(ids) + 1, side.sizes[i]), (side.strides[i], 1)
    span = (shape[0] - 1) * strides[0] + shape[1]
    if on_device and has_gpu():
        import cupy

        memory = cupy.cuda.UnownedMemory(side.bases[i], span, side.keep)
        flat = cupy.ndarray((span,), "uint8", cupy.cuda.MemoryPointer(memory, 0))
        rows = cupy.lib.stride_tricks.as_strided(flat, shape, strides)
        if write is None:
            return rows[cupy.asarray(ids)].get()  # type: ignore[no-any-return]
        rows[cupy.asarray(ids)] = cupy.asarray(write[1])
        return write[1]
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(side.bases[i]))
    rows = np.lib.stride_tricks.as_strided(flat, shape, strides)
    if write is None:
        return rows[ids]
    rows[ids] = write[1]
    return write[1]


def _synchronize(stream: Any) -> None:
    if has_gpu():
        import cupy

        cupy.cuda.get_current_stream().synchronize()
        stream.synchronize()
