"""Host memory near a GPU, on machines with several NUMA nodes. Best effort: where anything is unknown, nothing changes.

A copy between a GPU and the memory of another socket crosses the link between the sockets, which other ranks share.
"""

from __future__ import annotations

import ctypes
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES_MAX = 1024
_PREFERRED = 1  # MPOL_PREFERRED: this node, another one when it is full
_PAGE_BYTES = 4096
# get_mempolicy, set_mempolicy, move_pages
_SYSCALLS = {"x86_64": (239, 238, 279), "aarch64": (236, 237, 239)}


def node_of_gpu(device_id: int) -> int | None:
    """The NUMA node that a GPU is attached to; None if unknown (no GPU, no CuPy, one node, a virtual machine)."""
    try:
        import cupy

        address = cupy.cuda.runtime.deviceGetPCIBusId(device_id)
    except Exception:  # noqa: BLE001  no GPU, no CuPy, no driver: all the same here
        return None
    return node_of_pci_device(address if isinstance(address, str) else address.decode())


def node_of_pci_device(address: str) -> int | None:
    """The NUMA node of a device by its PCI address, as the kernel says; None if it does not."""
    try:
        node = int((_PCI_DEVICES / address.strip("\0").lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


@contextmanager
def prefer_node(node: int | None) -> Iterator[bool]:
    """Memory that this thread allocates inside comes from ``node`` as long as it has some.

    Yields whether that is so: not for None, nor where the system does not let us. Memory that is allocated inside and
    touched later lies where it is touched; page-locked memory is touched at once.
    """
    before = None if node is None else _policy()
    applied = node is not None and before is not None and _set_policy(_PREFERRED, _mask_of(node))
    try:
        yield applied
    finally:
        if applied and before is not None:
            _set_policy(*before)


@contextmanager
def near_gpu(device_id: int) -> Iterator[bool]:
    """:func:`prefer_node` with the node of a GPU: make the :class:`HostPool` of a rank inside.

    Example:
        >>> from paddle_kv import HostPool, KVCacheSpec
        >>> from paddle_kv.memory.numa import near_gpu
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> with near_gpu(0):
        ...     pool = HostPool(spec, 8)
    """
    with prefer_node(node_of_gpu(device_id)) as applied:
        yield applied


def pages_by_node(address: int, size_bytes: int) -> dict[int, int]:
    """How many pages of 4 KiB of a range lie on which node; pages that were never touched, and all where the system
    does not say, are left out."""
    first = address - address % _PAGE_BYTES
    starts = range(first, address + size_bytes, _PAGE_BYTES)
    pages = (ctypes.c_void_p * len(starts))(*starts)
    nodes = (ctypes.c_int * len(starts))(*[-1] * len(starts))
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None or _call(numbers[2], 0, len(starts), pages, None, nodes, 0) != 0:
        return {}
    return dict(Counter(node for node in nodes if node >= 0))


def _mask_of(node: int) -> ctypes.Array[ctypes.c_ulong]:
    mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
    mask[node // 64] = 1 << node % 64
    return mask


def _policy() -> tuple[int, ctypes.Array[ctypes.c_ulong]] | None:
    numbers = _SYSCALLS.get(platform.machine())
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_NODES_MAX // 64))()
    if numbers is None or _call(numbers[0], ctypes.byref(mode), mask, _NODES_MAX, None, 0) != 0:
        return None
    return mode.value, mask


def _set_policy(mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> bool:
    numbers = _SYSCALLS.get(platform.machine())
    return numbers is not None and _call(numbers[1], mode, mask, _NODES_MAX) == 0


def _call(number: int, *arguments: object) -> int:
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    return int(syscall(ctypes.c_long(number), *values))
