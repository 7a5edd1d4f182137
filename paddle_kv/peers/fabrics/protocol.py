"""What a fabric does: it writes into registered host memory of another process, and says when the bytes are there.

A fabric knows addresses and sizes; which blocks they are, and who may write them, its users know. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...tracking.keeper import Deadline

Addresses = np.ndarray  # int64


def _always() -> bool:
    return True


@dataclass(eq=False)
class Write:
    """``sizes[i]`` bytes from ``sources[i]`` here to ``targets[i]`` there.

    Attributes:
        deadline: what is not there by then has failed.
        ended: called once, by a thread of the sink, with why it failed, or with "" when every byte is in the other
            process's memory. From then on nothing of it is read here. It takes no long time.
        wanted: asked when it is the write's turn; False: nobody wants it any more.
    """

    sources: Addresses
    targets: Addresses
    sizes: Addresses
    deadline: Deadline
    ended: Callable[[str], object]
    wanted: Callable[[], bool] = field(default=_always)


class Sink(Protocol):
    """The way into the memory of one process."""

    def write(self, write: Write) -> None:
        """Enqueues; waits for nothing. Each write is ended, whatever happens. A write that has failed breaks the sink:
        what has not begun fails too, and so does every later write."""

    def close(self, timeout_s: float | None = None) -> None:
        """Drops what has not begun and waits for what has. Again: does nothing.

        Raises:
            TimeoutError: a write has not ended.
        """


class Fabric(Protocol):
    """Of one process: what it lets others write, and how it reaches them."""

    name: str

    def register(self, memory: np.ndarray) -> None:
        """Sinks of other processes may write to it, and own sinks read from it, until the fabric is closed. It lives
        until then."""

    def address(self) -> bytes:
        """What other processes need for :meth:`connect`, of all that was registered so far."""

    def connect(self, address: bytes) -> Sink:
        """PeerError: nobody is there, or it is the address of another kind of fabric."""

    def close(self, timeout_s: float | None = None) -> None:
        """Closes its sinks, and lets nobody write any more. Again: does nothing. TimeoutError as of a sink."""
