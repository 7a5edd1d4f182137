"""The fabric "nixl": NIXL's UCX backend, over whatever transport UCX finds between the hosts (RDMA, TCP; on one host
shared memory). ``UCX_TLS`` chooses, before the first fabric of the process is made."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from typing import Any

import numpy as np

from ...errors import PeerError
from .protocol import Write
from .queued import QueuedSink

POLL_S = 0.0001
_RDMA_DEVICES = "/sys/class/infiniband"


class NixlFabric:
    """See :class:`~paddle_kv.peers.fabrics.Fabric`.

    Raises:
        ImportError: NIXL is not installed (``pip install --no-deps nixl nixl-cu12``).
    """

    name = "nixl"

    def __init__(self) -> None:
        if not (os.path.isdir(_RDMA_DEVICES) and os.listdir(_RDMA_DEVICES)):
            # The module for them, of NIXL 1.5.1, ends each process by a segmentation fault behind everything else.
            os.environ.setdefault("UCX_MODULES", "^ib")
        from nixl._api import nixl_agent, nixl_agent_config

        name = f"paddle_kv-{os.getpid()}-{secrets.token_hex(8)}"
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.lock = threading.Lock()  # the agent takes one call at a time
        self._registered: list[Any] = []
        self._sinks: list[_Sink] = []

    def register(self, memory: np.ndarray) -> None:
        with self.lock:
            where = [(memory.ctypes.data, memory.nbytes, 0, "")]
            self._registered.append(self.agent.register_memory(where, "DRAM"))

    def address(self) -> bytes:
        with self.lock:
            return bytes(self.agent.get_agent_metadata())

    def connect(self, address: bytes) -> _Sink:
        try:
            with self.lock:
                found = self.agent.add_remote_agent(address)
        except Exception as error:  # noqa: BLE001  NIXL has many
            raise PeerError(f"the address is none of NIXL: {error}") from None
        sink = _Sink(self, found.decode() if isinstance(found, bytes) else found)
        self._sinks.append(sink)
        return sink

    def close(self, timeout_s: float | None = None) -> None:
        for sink in self._sinks:
            sink.close(timeout_s)
        self._sinks = []
        with self.lock:
            for known in self._registered:
                with contextlib.suppress(Exception):
                    self.agent.deregister_memory(known)
            self._registered = []
            self.agent = None


class _Sink(QueuedSink):
    def __init__(self, fabric: NixlFabric, remote: str) -> None:
        self._fabric = fabric
        self._remote = remote
        super().__init__("paddle_kv-nixl-sink")

    def move(self, write: Write, first: int, end: int) -> None:
        agent, lock = self._fabric.agent, self._fabric.lock
        device = np.zeros(end - first, np.int64)
        here, there = (
            np.stack([addresses[first:end], write.sizes[first:end], device], axis=1)
            for addresses in (write.sources, write.targets)
        )
        with lock:
            near, far = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")
            handle = agent.initialize_xfer("WRITE", near, far, self._remote)
        try:
            with lock:
                state = agent.transfer(handle)
            while state == "PROC":
                if write.deadline.over:
                    raise PeerError("it was not there in time")
                time.sleep(POLL_S)
                with lock:
                    state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise PeerError(f"a transfer of NIXL ended as {state}")
        finally:
            with lock:
                agent.release_xfer_handle(handle)  # one that is under way is aborted

    def disconnect(self) -> None:
        with self._fabric.lock:
            self._fabric.agent.remove_remote_agent(self._remote)
