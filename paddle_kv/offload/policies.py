"""The policies by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..values import check_callable
from .arc import Arc
from .checks import checked_count
from .lru import Lru
from .policy import Policy
from .s3fifo import S3Fifo
from .survival import Survival

# name -> the policy for an index of that many blocks
POLICIES: dict[str, Callable[[int], Policy[Any]]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo, "survival": Survival}
DEFAULT_POLICY = "survival"


def make_policy(name: str, capacity_blocks: int, clock: Callable[[], float] = time.monotonic) -> Policy[Any]:
    """A fresh policy for an index of that many blocks.

    Args:
        name: ``"lru"``, ``"arc"``, ``"s3fifo"`` or ``"survival"``: the keys of ``POLICIES``.
        capacity_blocks: of the index; at least 1.
        clock: seconds, never going back, for a policy that needs the time.

    Raises:
        TypeError: not a name, not an integer, or a clock that cannot be called.
        ValueError: an unknown name, or a capacity below 1.

    Example:
        >>> from paddle_kv.offload import POLICIES, make_policy
        >>> sorted(POLICIES), type(make_policy("arc", 100)).__name__
        (['arc', 'lru', 's3fifo', 'survival'], 'Arc')
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; the name of a policy is expected")
    if name not in POLICIES:
        raise ValueError(
            f"policy = {name!r} must be one of {', '.join(POLICIES)}, or an object with the methods of Policy"
        )
    capacity_blocks = checked_count(capacity_blocks, "capacity_blocks", 1)
    check_callable(clock, "clock", "a function that gives seconds")
    if name == "survival":
        return Survival(capacity_blocks, clock)
    return POLICIES[name](capacity_blocks)
