"""What a scheduler counts. In sections only."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

from .movement import State


class Counted(Protocol):
    """A transfer."""

    bytes: int
    queued: bool
    elapsed_ms: float

    @property
    def direction(self) -> str: ...

    @property
    def failure(self) -> Any: ...

    @property
    def state(self) -> State: ...


class Statistics:
    """Of all transfers since the scheduler was made.

    Attributes:
        queued_bytes: of the loads in flight that are not urgent.
    """

    def __init__(self) -> None:
        self.queued_bytes = 0
        self._counts = dict.fromkeys(
            ["onload_transfers", "offload_transfers", "onload_bytes", "offload_bytes", "failed", "cancelled"], 0
        )
        self._copying_ms = {"onload": 0.0, "offload": 0.0}

    def started(self, movement: Counted, change: Literal[1, -1] = 1) -> None:
        """``change``: -1 takes it back."""
        direction = movement.direction
        self._counts[f"{direction}_transfers"] += change
        self._counts[f"{direction}_bytes"] += change * movement.bytes
        if movement.queued:
            self.queued_bytes += change * movement.bytes

    def ended(self, movement: Counted) -> None:
        if movement.queued:
            self.queued_bytes -= movement.bytes
        if movement.failure is not None:
            self._counts["cancelled" if movement.state is State.CANCELLED else "failed"] += 1
        elif not math.isnan(movement.elapsed_ms):
            self._copying_ms[movement.direction] += movement.elapsed_ms

    def as_dict(self) -> dict[str, int]:
        return {
            **self._counts,
            **{f"{direction}_us": round(total_ms * 1e3) for direction, total_ms in self._copying_ms.items()},
        }
