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

    Raises:
        ValueError: an unknown name.
    """
    if name not in POLICIES:
        raise ValueError(
            f"policy = {name!r} must be one of {', '.join(POLICIES)}, or an object with the methods of Policy"
        )
    return POLICIES[name](capacity_blocks)
