"""What a server could have told of the requests of a trace: which sessions end, and who waits in the queue."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .trace import Request


@dataclass(frozen=True)
class Hints:
    """What the policies are told.

    Attributes:
        ends: after each request whether its session is over.
        wrong_share: of these, so many are told the wrong way round; which ones is always the same.
        queued_requests: so many requests are expected ahead of the one that is served.
    """

    ends: bool = False
    wrong_share: float = 0.0
    queued_requests: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.wrong_share <= 1:
            raise ValueError(f"wrong_share = {self.wrong_share} must be from 0 to 1")
        if self.queued_requests < 0:
            raise ValueError(f"queued_requests = {self.queued_requests} must not be negative")


def told_ends(requests: Sequence[Request], wrong_share: float = 0.0) -> list[bool]:
    """Of each request, whether it is told to be the last one of its session. A request goes on from the last one of
    which it has the sign: the last block but one, since the last may be partly filled; of two blocks, the last."""
    goes_on = [False] * len(requests)
    signs: dict[int, int] = {}
    for number, request in enumerate(requests):
        ids = request.block_ids
        before = next((signs[block] for block in reversed(ids) if block in signs), None)
        if before is not None:
            goes_on[before] = True
        if ids:
            signs[ids[-2] if len(ids) > 2 else ids[-1]] = number
    rng = random.Random(0)
    return [(not more) != (rng.random() < wrong_share) for more in goes_on]
