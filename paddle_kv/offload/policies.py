"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .arc import Arc
from .lru import Lru
from .policy import Policy
from .s3fifo import S3Fifo

# name -> the policy for an index of that many blocks
POLICIES: dict[str, Callable[[int], Policy[Any]]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo}


def make_policy(name: str, capacity_blocks: int) -> Policy[Any]:
    """A fresh policy for an index of that many blocks.

    Args:
        name: ``"lru"``, ``"arc"`` or ``"s3fifo"``: the keys of ``POLICIES``.
        capacity_blocks: of the index.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> from paddle_kv.offload import POLICIES, make_policy
        >>> sorted(POLICIES), type(make_policy("arc", 100)).__name__
        (['arc', 'lru', 's3fifo'], 'Arc')
    """
    if name not in POLICIES:
        raise ValueError(
            f"policy = {name!r} must be one of {', '.join(POLICIES)}, or an object with the methods of Policy"
        )
    return POLICIES[name](capacity_blocks)
