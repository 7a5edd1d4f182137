"""A Mooncake Store of real processes, in a network that has loopback only: its clients listen on all interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddle_kv.mooncake_bounds import set_bounds
from paddle_kv.tiers.mooncake_store import BOUNDS

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
START_S = 60.0
SEGMENT_STEP_BYTES = 16 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_network: list[int] = []
_ports = itertools.count(20000, 2)

NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"refused: {code}", flush=True)
sys.stdin.read()
"""


def why_not() -> str:
    """Why there can be no store here; empty if there can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    set_bounds(BOUNDS)
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake cannot be imported: {error}"
    allowed = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
    return f"no network namespace: {allowed.stderr.strip()}" if allowed.returncode else ""


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """This thread, and the threads and processes that it starts, see a network that has loopback and nothing else: the
    same one each time, since Mooncake keeps threads for the life of a process."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if _network:
            _checked(_libc.setns(_network[0], CLONE_NEWNET))
        else:
            _checked(_libc.unshare(CLONE_NEWNET))
            _network.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                name = b"lo".ljust(16, b"\0")
                flags = struct.unpack_from("h", fcntl.ioctl(any_socket, SIOCGIFFLAGS, name + bytes(24)), 16)[0]
                fcntl.ioctl(any_socket, SIOCSIFFLAGS, name + struct.pack("h", flags | IFF_UP) + bytes(22))
        yield
    finally:
        _checked(_libc.setns(before, CLONE_NEWNET))
        os.close(before)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Cluster:
    """One master, and nodes that lend memory; they end with :meth:`close`, or with the thread that made them. A node
    takes two of ``node_ports`` by chance; one of them is its name."""

    def __init__(
        self, *node_bytes: int, options: tuple[str, ...] = (), node_ports: tuple[int, int] = (15000, 17000)
    ) -> None:
        self.port = next(_ports)
        self.master, self.metrics = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.port + 1}"
        self._options = options
        self._node_ports = {"MC_MIN_RPC_PORT": str(node_ports[0]), "MC_MAX_RPC_PORT": str(node_ports[1])}
        self.nodes: list[subprocess.Popen[str]] = []
        self.start_master()
        for size in node_bytes:
            self.start_node(size)

    def start_master(self) -> None:
        program = Path(importlib.util.find_spec("mooncake").origin).with_name("mooncake_master")
        self.master_process = _start(
            str(program), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1",
            f"--metrics_port={self.port + 1}", "--minloglevel=2", *self._options,
        )  # fmt: skip
        end_s = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > end_s or self.master_process.poll() is not None:
                    raise
                time.sleep(0.005)

    def start_node(self, size: int = 64 << 20) -> subprocess.Popen[str]:
        node = _start(sys.executable, "-c", NODE, self.master, str(size), **self._node_ports)
        self.nodes.append(node)
        told = node.stdout.readline().strip()
        if told != "ready":
            raise RuntimeError(f"the node did not start: {told}")
        return node

    def kill(self, process: subprocess.Popen[str]) -> None:
        """As the kernel does when the memory is gone: no farewell."""
        process.send_signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()

    def close(self) -> None:
        for process in (*self.nodes, self.master_process):
            if process.returncode is None:
                self.kill(process)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def stop(process: subprocess.Popen[str]) -> None:
    """Until SIGCONT. Its threads stop one by one, and one that runs may answer meanwhile: it is waited for."""
    process.send_signal(signal.SIGSTOP)
    end_s = time.monotonic() + START_S
    while any(path.read_text().rpartition(")")[2].split()[0] != "T" for path in _thread_stats(process)):
        if time.monotonic() > end_s:
            raise TimeoutError(f"process {process.pid} does not stop")
        time.sleep(0.001)


def _thread_stats(process: subprocess.Popen[str]) -> Iterator[Path]:
    return Path(f"/proc/{process.pid}/task").glob("*/stat")


def _start(*command: str, **settings: str) -> subprocess.Popen[str]:
    environment = os.environ | {"GLOG_minloglevel": "2", "MC_STORE_CLIENT_SETUP_RETRIES": "1"} | settings
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )  # fmt: skip


class Kept:
    """A client that several engines use one after the other: leaving the store takes a second."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> int:
        return 0
