"""The debug mode, ``PADDLE_KV_CHECK=1``: operators report what they cannot afford to look for otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from .. import devices
from ._arguments import Tensor
from ._library import facts

# (address of the tensor, block ids, whether they are written, stream handle or None on the CPU). The scheduler adds
# one.
AccessCheck = Callable[[int, Sequence[int], bool, "int | None"], None]
access_checks: list[AccessCheck] = []


def _in_environment() -> bool:
    return os.environ.get("PADDLE_KV_CHECK") == "1"


enabled = facts.get("checks", _in_environment)


def block_access(cache: Tensor, block_ids: Sequence[int], *, writing: bool, stream: int) -> None:
    """Raises RuntimeError if a transfer that the stream has not waited for is using one of the blocks."""
    if not enabled():
        return
    queue = stream if devices.on_gpu(cache) else None
    for check in access_checks:
        check(cache.data_ptr(), block_ids, writing, queue)
