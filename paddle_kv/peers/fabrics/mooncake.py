"""The fabric "mooncake": Mooncake's Transfer Engine, over TCP or RDMA.

It listens on all interfaces, whatever its host name, and lets everybody write who reaches it: it is for a private
network.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from ...errors import PeerError
from ...mooncake_bounds import set_bounds
from .protocol import Write
from .queued import QueuedSink

# What a call waits for without an answer. What is set already stays.
BOUNDS = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "5", "MC_TCP_STATUS_TIMEOUT_SEC": "5"}


class MooncakeFabric:
    """See :class:`~paddle_kv.peers.fabrics.Fabric`.

    Args:
        hostname: under which others reach this host.
        protocol: ``"tcp"`` or ``"rdma"``.
        devices: of RDMA, as Mooncake names them.

    Raises:
        ImportError: Mooncake is not installed.
        PeerError: the engine does not start.
    """

    name = "mooncake"

    def __init__(self, hostname: str, *, protocol: str = "tcp", devices: str = "") -> None:
        set_bounds(BOUNDS)
        from mooncake.engine import TransferEngine

        self.engine: Any = TransferEngine()
        code = self.engine.initialize(hostname, "P2PHANDSHAKE", protocol, devices)
        if code:
            raise PeerError(f"Mooncake's engine does not start: {code}")
        self._hostname = hostname
        self._registered: list[int] = []
        self._sinks: list[_Sink] = []

    def register(self, memory: np.ndarray) -> None:
        code = self.engine.register_memory(memory.ctypes.data, memory.nbytes)
        if code:
            raise PeerError(f"Mooncake does not register {memory.nbytes} bytes: {code}")
        self._registered.append(memory.ctypes.data)

    def address(self) -> bytes:
        return f"{self._hostname}:{self.engine.get_rpc_port()}".encode()

    def connect(self, address: bytes) -> _Sink:
        try:
            name = address.decode()
        except UnicodeDecodeError:
            raise PeerError("the address is none of Mooncake") from None
        if not name.rpartition(":")[2].isdecimal():
            raise PeerError("the address is none of Mooncake")
        sink = _Sink(self.engine, name)
        self._sinks.append(sink)
        return sink

    def close(self, timeout_s: float | None = None) -> None:
        for sink in self._sinks:
            sink.close(timeout_s)
        self._sinks = []
        for address in self._registered:
            with contextlib.suppress(Exception):
                self.engine.unregister_memory(address)
        self._registered = []
        self.engine = None


class _Sink(QueuedSink):
    def __init__(self, engine: Any, remote: str) -> None:
        self._engine = engine
        self._remote = remote
        super().__init__("paddle_kv-mooncake-sink")

    def move(self, write: Write, first: int, end: int) -> None:
        lists = [one[first:end].tolist() for one in (write.sources, write.targets, write.sizes)]
        code = self._engine.batch_transfer_sync_write(self._remote, *lists)
        if code:
            raise PeerError(f"a transfer of Mooncake ended with {code}")

    def disconnect(self) -> None:
        self._engine = None
