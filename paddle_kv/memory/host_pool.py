"""The blocks in host memory, and who may use them when."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from ..checks import check_ids
from ..errors import ClosedError, LeasedError
from ..layout import KVCacheSpec, check_positive, check_spec
from ..ops import _arguments as arguments
from ..timeouts import check_timeout
from ..tracking import stamps
from ..tracking.group import OnItsWay, change, wait_until
from ..tracking.memories import Extent, attach, interleaved
from .exported import Exported, describe, refuse_overlap, resolve
from .free_extents import FreeExtents
from .host_layout import HostLayout, adopted, check_layout, check_room, layout_for, placement
from .host_lease import Lease
from .host_memory import HostMemory, allocate, bytes_at, can_page_lock
from .shared_memory import SharedMemory


class HostPool:
    """Blocks of all layers in host memory: page-locked where there is a GPU, plain RAM where there is none.

    Exactly ``num_blocks * (spec.num_layers * spec.block_bytes + room_bytes)`` bytes, one piece per layer
    ("layer_first"), one piece in which all layers of a block are adjacent ("block_first"), or one piece per name in
    which all layers of it are ("page_first_direct", as SGLang calls it: keys and values apart). They are given back by
    :meth:`close`.

    Args:
        spec: shapes and dtypes.
        num_blocks: blocks of the pool.
        layout: order of the memory. Where the layers of a block are adjacent the GPU's copy engine moves small blocks
            in large pieces (docs/performance.md), and tiers store a block as one object. None: "block_first" where
            a block of a tensor in a layer has less than 48 KiB (of several sizes the mean, each weighted by its bytes),
            else "layer_first".
        shared: in memory that other processes can :meth:`attach`.
        room_bytes: before each block of a "block_first" pool that is not shared: a tier writes the header of an object
            there, which so becomes one buffer. A multiple of 4,096; 4,096 is enough for 163 layers.

    Attributes:
        pinned_bytes: bytes that the pool holds; 0 for adopted and attached memory and after :meth:`close`.
        closed: whether :meth:`close` was called.

    Raises:
        MemoryError: names the bytes asked for and available.

    Example:
        >>> from paddle_kv import HostPool, KVCacheSpec
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> pool = HostPool(spec, 5)
        >>> pool.pinned_bytes, pool.allocate(2), pool.view("key", 1, 0).shape
        (960, [0, 1], (1, 3, 4))
        >>> pool.close(); pool.pinned_bytes
        0
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        layout: HostLayout | None = None,
        shared: bool = False,
        room_bytes: int = 0,
    ) -> None:
        check_layout(layout)
        room_bytes = arguments.integer(room_bytes, "room_bytes")
        self._set_up(spec, num_blocks)
        layout = layout or layout_for(spec)
        check_room(room_bytes, layout, shared=shared)
        self.room_bytes = room_bytes
        where = placement(spec, self.num_blocks, layout, room_bytes)
        make = SharedMemory if shared else HostMemory
        self._memory += allocate(where.sizes_bytes, pinned=can_page_lock(), make=make)
        self._strides.update(where.strides_bytes)
        for name, places in where.first_blocks.items():
            self._pointers[name] = [self._memory[piece].address + first for piece, first in places]
        self._attach(interleaved(self._tensor_extents()))

    @classmethod
    def adopt(
        cls,
        spec: KVCacheSpec,
        pointers: Mapping[str, Sequence[int]],
        num_blocks: int,
        *,
        strides_bytes: Mapping[str, int] | None = None,
    ) -> HostPool:
        """A pool over memory that the user has: name -> one address per layer, each of ``num_blocks`` blocks.

        The memory has to be page-locked where a GPU takes part (checked when a scheduler is made) and to stay alive
        until :meth:`close` and until all transfers are over.

        Args:
            spec: as that of the device cache.
            pointers: ``{"key": [one per layer], "value": [...]}``, or ``"latent"``, and what ``extra`` names.
            num_blocks: blocks behind each address.
            strides_bytes: name -> bytes from a block to the next one; of names that are not in it the blocks are dense.
                So blocks whose layers lie together, ``[block, layer, ...]``, have a stride of all layers, and each
                layer its own address. SGLang's ``page_first``, ``[token, layer, ...]``, are blocks of one token: with
                a spec of ``block_size=1``, for which NHD tensors of the device are seen as ``[tokens, 1, ...]``.

        Raises:
            TypeError: addresses or strides that are not integers.
            ValueError: names or number of addresses do not fit the spec, an address is 0, a stride is shorter than the
                block, or blocks overlap.

        Example:
            >>> import numpy as np
            >>> from paddle_kv import HostPool, KVCacheSpec
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> memory = np.zeros((2, 2, 8, *spec.block_shape("key")), "float32")  # yours: keys and values of 2 layers
            >>> names = ("key", "value")
            >>> pointers = {name: [memory[i, layer].ctypes.data for layer in range(2)] for i, name in enumerate(names)}
            >>> pool = HostPool.adopt(spec, pointers, 8)
            >>> pool.view("value", 1, 7)[...] = 2.5
            >>> memory[1, 1, 7].max(), pool.pinned_bytes
            (np.float32(2.5), 0)
            >>> pool.close()
        """
        made = cls.__new__(cls)
        made._set_up(spec, num_blocks)
        made._pointers, made._strides = adopted(spec, pointers, strides_bytes)
        made._attach(interleaved(made._tensor_extents()))
        return made

    @classmethod
    def attach(cls, spec: KVCacheSpec, exported: Exported) -> HostPool:
        """A pool over the memory of a pool of another process, which has called :meth:`export`.

        The process that made the pool gives its blocks out: :meth:`allocate` finds none here. Uses of a block are
        tracked in each process for itself, so the processes have to agree who touches which block when
        (docs/peers.md). The memory lives until the last of them has given it back. In the process that made the pool,
        and attached twice, the memory is the same and so is its tracking.

        Args:
            spec: which is expected.
            exported: what :meth:`export` returned in the other process.

        Raises:
            AttachError: the pool is on another host or in another container, has another spec, was closed, its process
                is gone, or this process may not open its memory.
            MemoryError: the memory cannot be page-locked here.
            TypeError: not a spec, or not a description.

        Example:
            >>> from paddle_kv import HostPool, KVCacheSpec
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> with HostPool(spec, 5, shared=True) as pool, HostPool.attach(spec, pool.export()) as same:
            ...     pool.view("key", 1, 4)[...] = 2.5
            ...     same.view("key", 1, 4).max(), same.num_free_blocks
            (np.float32(2.5), 0)
        """
        memory, pointers = resolve(exported, "host_pool", spec, pinned=can_page_lock())
        made = cls.__new__(cls)
        made._set_up(spec, exported.num_blocks)
        made._memory += memory
        made._pointers.update(pointers)
        made._strides.update(exported.strides_bytes)
        with refuse_overlap():
            made._attach(interleaved(made._tensor_extents()))
        made._free.allocate(made.num_blocks)
        made._attached = True
        return made

    def export(self) -> Exported:
        """What another process of the same user on this host needs to :meth:`attach` the pool. It can be pickled.

        It holds nothing: the pool, or somebody who has attached it, has to be there when it is used, and this process
        must live then.

        Raises:
            ValueError: the pool was made without ``shared=True``.
            ClosedError: closed.
        """
        self._check_open()
        shared = [memory for memory in self._memory if isinstance(memory, SharedMemory)]
        if not shared:
            raise ValueError("the host pool is not in shared memory; make it with shared=True")
        return describe("host_pool", self.spec, self.num_blocks, shared, self._pointers, self._strides)

    def _set_up(self, spec: KVCacheSpec, num_blocks: int) -> None:
        check_spec(spec)
        self.num_blocks = check_positive(num_blocks, "num_blocks")
        self.spec = spec
        self._memory: list[HostMemory] = []
        self._pointers: dict[str, list[int]] = {}
        self._strides: dict[str, int] = {}
        self.room_bytes = 0
        self.room_lent = False  # to a tier: it is one's alone
        self._allocated: set[int] = set()
        self._releasing: set[int] = set()  # freed by the user, still held by a transfer or a lease
        self._attached = False
        self.closed = False

    def _tensor_extents(self) -> list[Extent]:
        return [
            Extent(start, start + (self.num_blocks - 1) * stride + self.spec.tensor_block_bytes(name), stride, layer)
            for name, stride in self._strides.items()
            for layer, start in enumerate(self._pointers[name])
        ]

    def _attach(self, extents: list[Extent]) -> None:
        self.domain, self._detach = attach(self, extents)
        self._free = FreeExtents(self.num_blocks)

    # ---- memory ----
    @property
    def memory_id(self) -> str:
        """Names the memory, the same in each process that has it. Raises as :meth:`export`."""
        return self.export().memory_id

    in_host_memory, on_other_gpu = True, False  # see :class:`~paddle_kv.memory.peer_blocks.PeerBlocks`
    is_part = False  # see :func:`~paddle_kv.memory.heads.heads_of`

    @property
    def heads(self) -> range:
        """Which heads of the blocks in memory it has: all, if it is no part."""
        return range(self.spec.num_kv_heads)

    def moved_block_bytes(self, name: str) -> int:
        """What a transfer moves of a block of a tensor."""
        return self.spec.tensor_block_bytes(name)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the pool holds; 0 for adopted and attached memory and after :meth:`close`."""
        return 0 if self._attached else sum(memory.size_bytes for memory in self._memory)

    def pointer(self, name: str, layer: int) -> int:
        """Address of block 0 of a tensor of a layer; block i is ``i * stride_bytes(name)`` behind it.

        Raises:
            ValueError: ``name`` is not of ``spec.tensor_names``.
            IndexError: no such layer.
            ClosedError: closed.
        """
        self._check_open()
        if name not in self._pointers:
            raise ValueError(f"name = {name!r} must be one of {self.spec.tensor_names}")
        layer = arguments.integer(layer, "layer")
        if not 0 <= layer < self.spec.num_layers:
            raise IndexError(f"layer = {layer} must be in [0, {self.spec.num_layers})")
        return self._pointers[name][layer]

    def stride_bytes(self, name: str) -> int:
        """Bytes from a block of a tensor to the next one.

        Raises:
            ValueError: ``name`` is not of ``spec.tensor_names``.
        """
        if name not in self._strides:
            raise ValueError(f"name = {name!r} must be one of {self.spec.tensor_names}")
        return self._strides[name]

    def piece_stride_bytes(self, name: str) -> int:
        """In a block, bytes from a piece of ``spec.head_pieces`` to the next one."""
        return self.spec.tensor_block_bytes(name) // self.spec.head_pieces(name)

    def view(self, name: str, layer: int, block_id: int) -> np.ndarray:
        """One block of one tensor as a writable array over the pool's memory, typed as ``paddle.Tensor.numpy()`` would
        be.

        Ordered with nothing: take a :meth:`lease` while you use it. A view of the pool's own memory keeps that memory
        alive beyond :meth:`close`; adopted memory has to be kept alive by its owner.

        Args:
            name: of ``spec.tensor_names``.
            layer: of which layer.
            block_id: which block.

        Returns:
            an array of shape ``spec.block_shape(name)`` and dtype ``spec.numpy_dtype(name)``.

        Raises:
            ValueError: no such name.
            IndexError: no such layer or block.
            ClosedError: closed.
        """
        address = self.pointer(name, layer)
        block_id = arguments.integer(block_id, "block_id")
        check_ids([block_id], "block_id", self.num_blocks)
        flat = self.bytes_at(address + block_id * self._strides[name], self.spec.tensor_block_bytes(name))
        return flat.view(self.spec.numpy_dtype(name)).reshape(self.spec.block_shape(name))

    def bytes_at(self, address: int, size_bytes: int) -> np.ndarray:
        """Memory of the pool as a writable array, which keeps it alive if it is the pool's own."""
        return bytes_at(address, size_bytes, self._memory)

    def close(self) -> None:
        """Gives the memory back. Again: does nothing.

        Raises:
            LeasedError: a transfer or a lease still holds blocks; wait for it (``LayerwiseScheduler.close``).
        """
        change(self.domain, self._close_here)

    def _close_here(self) -> None:
        if self.closed:
            return
        busy = self._still_busy(range(self.num_blocks))
        if busy:
            raise LeasedError(
                f"{len(busy)} blocks (first: {busy[0]}) are held by transfers or leases; wait for them", busy
            )
        self.closed = True
        self._detach()
        self._memory = []

    def __enter__(self) -> HostPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- blocks ----
    def allocate(self, count: int) -> list[int]:
        """``count`` block ids that nobody uses, ascending.

        Neighbours where possible: from the smallest run of free blocks that holds them all, else from the largest runs.
        A transfer between neighbours on both sides moves them as one large piece, which the copy engine takes without
        the model noticing; so allocate what is used together, such as the blocks of one sequence, by one call.

        Raises:
            MemoryError: names the blocks asked for and free. Nothing is allocated then.
            ValueError: ``count`` is negative.
            ClosedError: closed.

        Example:
            >>> from paddle_kv import HostPool, KVCacheSpec
            >>> pool = HostPool(KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, block_size=3, dtype="int8"), 4)
            >>> pool.allocate(3)
            [0, 1, 2]
            >>> pool.free([1]); pool.num_free_blocks
            2
            >>> pool.allocate(3)
            Traceback (most recent call last):
            MemoryError: 3 blocks were asked for, 2 of 4 are free
            >>> pool.close()
        """
        count = arguments.integer(count, "count")
        if count < 0:
            raise ValueError(f"count = {count} must not be negative")
        allocated: OnItsWay = change(self.domain, functools.partial(self.allocate_here, count))
        return allocated.take()  # type: ignore[no-any-return]

    def allocate_here(self, count: int) -> OnItsWay:
        """:meth:`allocate` in a section."""
        self._check_open()
        if count > len(self._free):
            self._reclaim()
        if count > len(self._free):
            raise MemoryError(f"{count} blocks were asked for, {len(self._free)} of {self.num_blocks} are free")
        taken = self._free.allocate(count)
        self._allocated.update(taken)
        stamps.forget(self.domain, taken)
        return OnItsWay(taken, self.domain, self._take_back)

    def _take_back(self, ids: list[int]) -> None:
        if not self.closed:
            self.free_here(ids)

    def free(self, block_ids: Any) -> None:
        """Gives blocks back. They can be allocated again once no transfer and no lease holds them.

        So it may be called while a transfer is in flight, also after its ``cancel``.

        Args:
            block_ids: of :meth:`allocate`.

        Raises:
            IndexError: an id is outside the pool.
            ValueError: a block is not allocated, or named twice. Nothing is freed then.
            ClosedError: closed.
        """
        ids = arguments.checked_block_ids(block_ids, "block_ids", self.num_blocks, distinct=True)
        change(self.domain, functools.partial(self.free_here, ids))

    def free_here(self, ids: list[int]) -> None:
        """:meth:`free` in a section."""
        self._check_open()
        if not self._allocated.issuperset(ids):
            position = next(i for i, block_id in enumerate(ids) if block_id not in self._allocated)
            raise ValueError(f"block_ids[{position}] = {ids[position]} is not allocated")
        self._allocated.difference_update(ids)
        self._releasing.update(ids)
        self._reclaim()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that :meth:`allocate` could give now."""
        return int(change(self.domain, self.count_free_here))

    def count_free_here(self) -> int:
        """:attr:`num_free_blocks` in a section."""
        self._reclaim()
        return len(self._free)

    def _reclaim(self) -> None:
        if not self._releasing:
            return
        idle = self._releasing.difference(self._still_busy(self._releasing))
        self._releasing -= idle
        self._free.free(idle)

    def _still_busy(self, block_ids: Iterable[int]) -> list[int]:
        ids = list(block_ids)
        for transfer in self.domain.lone_holders(ids):
            transfer.look()
        return self.domain.busy(ids)

    @contextmanager
    def lease(self, block_ids: Any, *, write: bool = False, timeout_s: float | None = None) -> Iterator[None]:
        """Keeps blocks as they are (or, with ``write``, for this thread alone) while the ``with`` block runs.

        Entering waits for the transfers in flight that conflict: those that write the blocks, with ``write`` also those
        that read them. While the lease is held, a call that would start such a transfer raises LeasedError, and freed
        blocks are not given out again.

        Args:
            block_ids: which blocks.
            write: whether they will be written.
            timeout_s: how long to wait; None: for ever, also for a layerwise save whose layers are not marked.

        Raises:
            IndexError: an id is outside the pool.
            ValueError: an id occurs twice.
            TimeoutError: conflicting transfers or leases were not over after ``timeout_s``.
            ClosedError: closed.

        Example:
            >>> from paddle_kv import HostPool, KVCacheSpec
            >>> pool = HostPool(KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, block_size=3, dtype="int8"), 4)
            >>> with pool.lease([2], write=True, timeout_s=1.0):
            ...     pool.view("key", 0, 2)[...] = 7
            >>> pool.close()
        """
        ids = arguments.checked_block_ids(block_ids, "block_ids", self.num_blocks, distinct=True)
        check_timeout(timeout_s)
        lease = wait_until(
            self.domain, functools.partial(self._try_lease, ids, write, threading.get_ident()), timeout_s
        )
        if lease is None:
            raise TimeoutError(f"blocks {ids[:8]} were still in use after timeout_s = {timeout_s}")
        try:
            yield
        finally:
            change(self.domain, lease.end)

    def _try_lease(self, ids: list[int], write: bool, thread: int) -> Lease | None:
        self._check_open()
        for transfer in self.domain.lone_holders(ids):
            transfer.look()
        return Lease(self.domain, ids, write, thread) if self.domain.try_lease(ids, write=write) else None

    def mark_rewritten(self, block_ids: Any) -> None:
        """The host has rewritten these blocks: they may be read again although an offload into them failed.

        Args:
            block_ids: host blocks, also such as were never unusable.

        Raises:
            IndexError: an id is outside the pool.
        """
        ids = arguments.checked_block_ids(block_ids, "block_ids", self.num_blocks, distinct=False)
        change(self.domain, functools.partial(self._mark_rewritten_here, ids))

    def _mark_rewritten_here(self, ids: list[int]) -> None:
        self.domain.mark_rewritten(ids)
        stamps.forget(self.domain, ids)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the host pool is closed")
