"""The client of a Mooncake Store as the engine uses it: set up with bounds on its waits, and codes that mean something.

What is said of its calls was seen with version 0.3.13.post1: ``setup`` and ``close`` hold the interpreter's lock, the
former until the master has answered (four seconds and more if it does not), the latter up to one second; all others
give it up.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import TierError
from ..mooncake_bounds import set_bounds
from .protocol import Outcome

# What Mooncake itself waits for. What is set already stays.
BOUNDS = {
    "MC_RPC_TIMEOUT_MS": "2000",  # a master that does not answer: 30 s else
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",  # a node that sends nothing; its connection is closed then: 30 s else
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}
# After 60 s the library gives a transfer up and leaves it under way: a node that goes on later writes into the memory.
GIVES_UP_S = 50.0
LOCAL_BUFFER_BYTES = 1 << 20  # for calls that copy, which nobody makes
CONNECT_S = 3.0

NO_ROOM = -200
SIZE_CODES = (-600, -800)  # what an object that is larger or smaller than it should be is refused with
_KNOWN = {
    NO_ROOM: ("no room", Outcome.DROPPED),
    -600: ("invalid parameters", Outcome.FAILED),
    -703: ("replica is not ready", Outcome.MISSING),
    -704: ("object not found", Outcome.MISSING),
    -705: ("object exists already", Outcome.DONE),
    -706: ("object has a lease", Outcome.FAILED),
    -707: ("lease ran out during the transfer", Outcome.FAILED),
    -712: ("replica is gone", Outcome.MISSING),
    -800: ("transfer failed", Outcome.FAILED),
    -900: ("no connection to the master", Outcome.FAILED),
    -901: ("the master did not answer in time", Outcome.FAILED),
}


class MooncakeError(TierError):
    """What a Mooncake Store reported.

    Attributes:
        code: its number.
    """

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what}: {_KNOWN.get(code, ('unknown code', None))[0]} ({code})")
        self.code = code


def outcome_of(code: int) -> Outcome:
    """Of an object for which a call returned a negative code. What nobody knows is a failure."""
    return _KNOWN.get(code, ("", Outcome.FAILED))[1]


def is_fault(code: int) -> bool:
    """Whether the store does not work, rather than not having the object or no room for it."""
    return code < 0 and outcome_of(code) is Outcome.FAILED


def connect(master: str, *, hostname: str, segment_bytes: int, protocol: str, devices: str, metadata: str) -> Any:
    """A client that is set up.

    Raises:
        ImportError: Mooncake is not installed.
        TierError: the master does not listen, or refuses.
    """
    set_bounds(BOUNDS)
    from mooncake.store import MooncakeDistributedStore

    host, colon, port = master.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:  # a list of servers that elect a master is left to Mooncake
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError as error:
            raise TierError(f"master = {master!r} does not listen: {error}") from None
    store = MooncakeDistributedStore()
    code = store.setup(hostname, metadata, segment_bytes, LOCAL_BUFFER_BYTES, protocol, devices, master)
    if code:
        raise MooncakeError(f"setup with master = {master!r}", code)
    return store


@dataclass
class Move:
    """What one call of the store does with one object."""

    item: Any
    key: str
    buffers: Sequence[memoryview]  # alive until the call returns
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, item: Any, key: str, offset: int, buffers: Sequence[memoryview]) -> Move:
        """Of bytes of the object that begin at ``offset``. Buffers that lie one behind the other become one."""
        move = cls(item, key, buffers)
        for buffer in buffers:
            start = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
            if move.starts and move.starts[-1] + move.sizes[-1] == start:
                move.sizes[-1] += len(buffer)
            else:
                move.starts.append(start)
                move.sizes.append(len(buffer))
                move.offsets.append(offset)
            offset += len(buffer)
        return move
