"""The debug mode, ``PADDLE_KV_CHECK=1``: operators report what they cannot afford to look for otherwise."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .. import devices, streams
from ._arguments import Tensor
from ._library import facts

# (address of the tensor, block ids, whether they are written, stream handle or None on the CPU). The scheduler adds
# one.
AccessCheck = Callable[[int, Sequence[int], bool, "int | None"], None]
access_checks: list[AccessCheck] = []


def _in_environment() -> bool:
    return os.environ.get("PADDLE_KV_CHECK") == "1"


enabled = facts.get("checks", _in_environment)


def _outside_of_the_package() -> int:
    """The ``stacklevel`` with which the caller of this warns about who called the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("paddle_kv."):
        frame, level = frame.f_back, level + 1
    return level


def reads_back(ids: Any, stream: int, op: str) -> bool:
    """Whether ids are to be read for :func:`block_access`. From a GPU they cannot be while the stream is captured into
    a CUDA graph, which is said."""
    if not (enabled() and access_checks):
        return False
    if isinstance(ids, Tensor) and devices.on_gpu(ids) and streams.is_capturing(stream):
        warnings.warn(
            f"{op}: PADDLE_KV_CHECK=1 does not look at the blocks of a call that is captured into a CUDA graph",
            RuntimeWarning,
            stacklevel=_outside_of_the_package(),
        )
        return False
    return True


def block_access(cache: Tensor, block_ids: Sequence[int], *, writing: bool, stream: int) -> None:
    """Raises RuntimeError if a transfer that the stream has not waited for is using one of the blocks."""
    if not enabled():
        return
    queue = stream if devices.on_gpu(cache) else None
    for check in access_checks:
        check(cache.data_ptr(), block_ids, writing, queue)
