"""A host pool that a fabric has registered, as plain data for senders on other hosts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import AttachError
from ...layout import KVCacheSpec, check_spec, differences
from ...memory import HostPool
from ...values import check_methods
from .protocol import Fabric

VERSION = 1


@dataclass(frozen=True)
class RemotePool:
    """Where the blocks of a receiver's pool lie. It can be pickled.

    Whoever has it and can reach the fabric may write all that is registered there: it is for trusted processes in a
    private network.

    Attributes:
        version: of this description.
        fabric: the name of the fabric that has registered the memory.
        address: of that fabric.
        pool_id: names the memory, in grants.
        spec: of the pool.
        num_blocks: of the pool.
        pointers: name -> address of block 0 of each layer.
        strides_bytes: name -> bytes from a block to the next one.
    """

    version: int
    fabric: str
    address: bytes
    pool_id: str
    spec: KVCacheSpec
    num_blocks: int
    pointers: Mapping[str, tuple[int, ...]]
    strides_bytes: Mapping[str, int]


def describe(fabric: Fabric, pool: HostPool) -> RemotePool:
    """Registers the memory of a pool, and describes it for senders.

    Args:
        fabric: of this process. It is closed before the pool is.
        pool: of this process.

    Raises:
        TypeError: not a fabric, or not a pool.
        ValueError: a part, or blocks of another process.
    """
    _check_both(fabric, pool)
    if pool.is_part or pool._attached:
        raise ValueError("the pool is of another process, or a part")
    register(fabric, pool)
    names, layers = pool.spec.tensor_names, range(pool.spec.num_layers)
    pointers = {name: tuple(pool.pointer(name, layer) for layer in layers) for name in names}
    strides = {name: pool.stride_bytes(name) for name in names}
    token = secrets.token_hex(16)
    return RemotePool(VERSION, fabric.name, fabric.address(), token, pool.spec, pool.num_blocks, pointers, strides)


def register(fabric: Fabric, pool: HostPool) -> None:
    """All of the pool's memory, neighbours together. TypeError: not a fabric, or not a pool."""
    _check_both(fabric, pool)
    extents = sorted((extent.start, extent.end) for extent in pool._tensor_extents())
    merged: list[list[int]] = []
    for start, end in extents:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    for start, end in merged:
        fabric.register(pool.bytes_at(start, end - start))


def check_fabric(fabric: Any) -> None:
    """TypeError unless it is one."""
    check_methods(fabric, "fabric", ("register", "address", "connect", "close"), "a fabric")


def _check_both(fabric: Any, pool: Any) -> None:
    check_fabric(fabric)
    if not isinstance(pool, HostPool):
        raise TypeError(f"pool is {type(pool).__name__}; a HostPool is expected")


def check_described(remote: Any, pool: HostPool) -> None:
    """TypeError or ValueError unless it describes this pool."""
    if not isinstance(remote, RemotePool):
        raise TypeError(f"remote is {type(remote).__name__}; what describe() returned is expected")
    names, layers = pool.spec.tensor_names, range(pool.spec.num_layers)
    own = {name: tuple(pool.pointer(name, layer) for layer in layers) for name in names}
    if remote.spec != pool.spec or dict(remote.pointers) != own:
        raise ValueError("remote describes another pool than that of the scheduler")


def check_remote(remote: Any, spec: KVCacheSpec, fabric: str) -> None:
    """TypeError or AttachError unless senders with that spec and fabric can write to it; ``num_kv_heads`` may
    differ."""
    check_spec(spec)
    if not isinstance(remote, RemotePool):
        raise TypeError(f"remote is {type(remote).__name__}; what describe() returned is expected")
    if remote.version != VERSION:
        raise AttachError(f"the description has version {remote.version}; this process knows version {VERSION}")
    if remote.fabric != fabric:
        raise AttachError(f"the description is of fabric {remote.fabric!r}; {fabric!r} is expected")
    theirs = remote.spec
    if theirs != spec and theirs.num_kv_heads != spec.num_kv_heads:
        theirs = theirs.with_heads(spec.num_kv_heads)
    if theirs != spec:
        of_them, ours = differences(theirs, spec)
        raise AttachError(f"the description has the spec {of_them}; {ours} is expected")


def pieces(
    pool: HostPool, own_ids: np.ndarray, remote: RemotePool, remote_ids: np.ndarray, layers: Sequence[int], first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources, targets and sizes of these blocks and layers of the own pool, which has the remote one's heads from
    ``first`` on. What is contiguous on both sides is one piece."""
    own, theirs = pool.spec, remote.spec
    found: list[tuple[np.ndarray, np.ndarray, int]] = []
    for name in own.tensor_names:
        count, offset = 1, 0
        size, remote_size = own.tensor_block_bytes(name), theirs.tensor_block_bytes(name)
        if own != theirs:
            count = own.head_pieces(name)
            offset = first * remote_size // count // theirs.num_kv_heads
        for layer in layers:
            source = pool.pointer(name, layer) + own_ids * pool.stride_bytes(name)
            target = remote.pointers[name][layer] + offset + remote_ids * remote.strides_bytes[name]
            found += [
                (source + piece * size // count, target + piece * remote_size // count, size // count)
                for piece in range(count)
            ]
    sources = np.concatenate([source for source, _, _ in found])
    targets = np.concatenate([target for _, target, _ in found])
    sizes = np.repeat(np.array([size for _, _, size in found], np.int64), [len(source) for source, _, _ in found])
    return merged(sources, targets, sizes)


def merged(sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pieces in the order of their sources, neighbours on both sides as one."""
    order = np.argsort(sources, kind="stable")
    sources, targets, sizes = sources[order], targets[order], sizes[order]
    joined = (sources[:-1] + sizes[:-1] == sources[1:]) & (targets[:-1] + sizes[:-1] == targets[1:])
    starts = np.flatnonzero(np.concatenate([[True], ~joined]))
    return sources[starts], targets[starts], np.add.reduceat(sizes, starts)
