"""Tensor-parallel ranks agree on what is present: one process per rank, each with a pool and a manager of its own.

Each rank keeps its part of every block and evicts by itself, so one may have lost what another still has. A prefix can
be loaded only as far as all ranks have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..values import check_callable
from .lease import Lease
from .manager import KVOffloadManager


def lookup_common(
    manager: KVOffloadManager,
    hashes: Sequence[bytes],
    all_reduce_min: Callable[[int], int],
    *,
    num_tokens: int | None = None,
) -> Lease:
    """:meth:`KVOffloadManager.lookup`, cut to the shortest prefix that any rank has found.

    Call it on all ranks for the same prompts in the same order; each with the hashes of its own manager, whose salts
    differ. No rank evicts what all have agreed on before its lease is released.

    Args:
        all_reduce_min: gives every rank the smallest of the numbers that they pass: :func:`paddle_all_reduce_min`, or
            what the server has. What it raises is raised, with nothing held.
        num_tokens: as for :meth:`KVOffloadManager.lookup`.

    Raises:
        TypeError: not a manager; ``all_reduce_min`` cannot be called, or gave no integer.
        ValueError: it gave a number that is larger than the own one, or negative.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.offload import KVOffloadManager, lookup_common
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8))
        >>> manager = KVOffloadManager(scheduler)
        >>> hashes = manager.block_hashes(range(9))
        >>> manager.save(hashes, [0, 3, 1]).wait()
        >>> with lookup_common(manager, hashes, lambda mine: min(mine, 2)) as lease:  # another rank has two
        ...     lease.num_blocks
        2
        >>> manager.close(); scheduler.close()
    """
    if not isinstance(manager, KVOffloadManager):
        raise TypeError(f"manager is {type(manager).__name__}; a KVOffloadManager is expected")
    check_callable(all_reduce_min, "all_reduce_min", "a function of a number")
    lease = manager.lookup(hashes, num_tokens=num_tokens)
    try:
        lease.keep_first(all_reduce_min(lease.num_blocks))
    except BaseException:
        lease.release()
        raise
    return lease


def paddle_all_reduce_min(group: Any = None) -> Callable[[int], int]:
    """The smallest number over a group of ``paddle.distributed`` (None: all ranks), by its backend.

    ``paddle.distributed.init_parallel_env()`` comes first. The host waits for the result; with NCCL the number travels
    in a GPU tensor on Paddle's current stream, so prefer a gloo group beside a busy model.

    Raises:
        TypeError: not a group.
    """

    if group is not None and not hasattr(group, "ranks"):
        raise TypeError(f"group is {group!r}; a group of paddle.distributed, or None, is expected")

    def reduce(number: int) -> int:
        import paddle
        from paddle import distributed

        value = paddle.to_tensor([number], dtype="int64")
        distributed.all_reduce(value, op=distributed.ReduceOp.MIN, group=group)
        return int(value.numpy()[0])

    return reduce
