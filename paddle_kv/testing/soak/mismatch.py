"""What a soak run ends with when something is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mismatch:
    """The first piece (one block of one tensor of one layer) that is not what it must be."""

    side: str  # "device" or "host"
    block: int
    layer: int
    tensor: str
    offset_bytes: int
    expected: str  # hexadecimal, from the offset on
    found: str
    step: int
    last_written_by: str

    def __str__(self) -> str:
        return (
            f"{self.side} block {self.block}, layer {self.layer}, {self.tensor}: at byte {self.offset_bytes} "
            f"{self.expected} is expected, {self.found} was found (step {self.step}; last written by "
            f"{self.last_written_by})"
        )


class SoakFailure(Exception):
    """A block that is not what it must be, a transfer that ends otherwise than it must, or a leak."""

    def __init__(self, message: str, mismatch: Mismatch | None = None) -> None:
        super().__init__(message)
        self.mismatch = mismatch
