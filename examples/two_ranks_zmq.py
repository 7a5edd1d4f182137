"""The engine of two_ranks.py with its messages over ZeroMQ: as between machines, here on one.

    pip install pyzmq
    python examples/two_ranks_zmq.py

A socket does not say that the other end has died: a message that nobody takes, or a deadline, finds it out. Messages
are pickled, so only processes that trust each other may talk like this; the sockets listen on the loopback interface.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import pickle
from collections.abc import Sequence
from typing import Any

import zmq
from two_ranks import Engine, Sizes, prompts, run_rank

TIMEOUT_S = 1.0
LINGER_MS = 1000
END = b""


class Channel:
    """A ZeroMQ socket with the calls of a ``multiprocessing`` connection."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        socket.linger = LINGER_MS

    def send(self, message: object) -> None:
        self._send(pickle.dumps(message))

    def _send(self, content: bytes) -> None:
        try:
            self.socket.send(content, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # nobody has taken the last thousand messages
            raise OSError(str(error)) from None

    def recv(self) -> Any:
        content = self.socket.recv()
        if content == END:
            raise EOFError
        return pickle.loads(content)

    def poll(self) -> bool:
        return bool(self.socket.poll(0))

    def close(self) -> None:
        if not self.socket.closed:
            with contextlib.suppress(OSError):
                self._send(END)
            self.socket.close()


def wait_for(waited: Sequence[Any], timeout_s: float) -> list[Any]:
    """Those channels and descriptors that can be read."""
    poller = zmq.Poller()
    by_source = {one.socket if isinstance(one, Channel) else one: one for one in waited}
    for source in by_source:
        poller.register(source, zmq.POLLIN)
    return [by_source[source] for source, _ in poller.poll(1000 * timeout_s)]


def run_rank_at(address: str, rank: int, sizes: Sizes) -> None:
    """The process of a rank."""
    with zmq.Context() as context:
        socket = context.socket(zmq.PAIR)
        socket.connect(address)
        run_rank(Channel(socket), rank, sizes, wait_for)
        socket.close()


def start_process(context: Any, rank: int, sizes: Sizes, method: str = "spawn") -> tuple[Any, Any]:
    socket = context.socket(zmq.PAIR)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    arguments = (f"tcp://127.0.0.1:{port}", rank, sizes)
    maker: Any = multiprocessing.get_context(method)
    process = maker.Process(target=run_rank_at, args=arguments, daemon=True)
    process.start()
    return process, Channel(socket)


def main() -> Engine:
    """Two rounds, and the death of a rank between them."""
    with zmq.Context() as context:
        start = functools.partial(start_process, context, sizes=Sizes())
        engine = Engine(start, timeout_s=TIMEOUT_S, wait_for=wait_for)
        engine.wait_until_ready()
        for number in range(2):
            for keys in prompts(12):
                engine.serve(keys)
                engine.settle()
            if not number:
                engine.processes[1].kill()
                engine.serve(prompts(1)[0])  # ends, although rank 1 says nothing
            engine.wait_until_ready()
        print(
            f"{engine.loaded_blocks} blocks loaded, {engine.computed_blocks} computed, {engine.recomputed_blocks} of "
            f"them again, {engine.wrong} loads with wrong bytes"
        )
        engine.close()
    return engine


if __name__ == "__main__":
    main()
