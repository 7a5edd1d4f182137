"""Messages over a socket: a length of four bytes, then so many bytes. One thread serves many sockets."""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import itertools
import os
import queue
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable

from ..tracking.keeper import Living, log
from ..tracking.worker import Worker
from .at_exit import threads
from .messages import MOST_BYTES

LENGTH = struct.Struct(">I")
CREDENTIALS = struct.Struct("3i")  # process, user, group
MOST_UNSENT_BYTES = 1 << 20  # of a peer that does not read
LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of which there may be more later


class Loop:
    """A thread that waits for sockets and processes, and does what others leave for it: it alone reads and closes
    them."""

    PAUSE_S = 1.0  # until what lacked a descriptor is tried again

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._do_jobs)
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._ended = False
        self._timed: list[tuple[float, int, Callable[[], object]]] = []  # when, in which order, what
        self._numbers = itertools.count()
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._thread = Worker(self._run, name)
        self._thread.start()
        threads.add(self)
        _loops.add(self)

    def post(self, job: Callable[[], object]) -> None:
        """Does it soon, in the thread, behind what was posted before."""
        self._jobs.put(job)
        os.eventfd_write(self._wake, 1)

    def watch(self, source: int | socket.socket, events: int, ready: Callable[[], object]) -> None:
        """In the thread: ``ready()`` when there is something, until :meth:`forget`; again: other events."""
        if isinstance(source, socket.socket):
            self.sockets.add(source)
        try:
            self._selector.modify(source, events, ready)
        except KeyError:
            self._selector.register(source, events, ready)

    def later(self, seconds: float, job: Callable[[], object]) -> None:
        """In the thread: does it there after so many seconds."""
        heapq.heappush(self._timed, (time.monotonic() + seconds, next(self._numbers), job))

    def forget(self, source: int | socket.socket) -> None:
        """In the thread."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def close(self, timeout_s: float | None = None) -> None:
        """Behind what was posted before. Again: does nothing."""
        if self._ended:
            return
        self._jobs.put(None)
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(self._left_s()):
                self._do(key.data)
            while self._left_s() == 0 and not self._ended:
                self._do(heapq.heappop(self._timed)[2])
        self._selector.close()

    def _left_s(self) -> float | None:
        """Until the next one that is timed; None: there is none."""
        return max(0.0, self._timed[0][0] - time.monotonic()) if self._timed else None

    @staticmethod
    def _do(job: Callable[[], object]) -> None:
        with Living("an error in a channel between peers"):
            job()

    def _do_jobs(self) -> None:
        os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while not self._ended:
                job = self._jobs.get_nowait()
                if job is None:
                    self._ended = True
                    return
                self._do(job)


_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child would keep the connections of its parent open beyond the parent's end."""
    for loop in list(_loops):
        for one in list(loop.sockets):
            one.close()
        loop._ended = True
    _loops.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Line:
    """One connection. Where the process at its other end has ended, all that it had said is told before.

    Args:
        loop: serves it.
        connected: a socket.
        taken: a message.
        ended: nothing more will come: the other end was closed, or its process has ended (``dead``). Where a process
            closes its end and goes on, it is called twice.
    """

    def __init__(
        self,
        loop: Loop,
        connected: socket.socket,
        taken: Callable[[Line, bytes], object],
        ended: Callable[[Line], object],
    ) -> None:
        self._loop = loop
        self._socket = connected
        self._taken = taken
        self._ended = ended
        self._sending = threading.Lock()  # for the socket until it is closed, and for what is unsent
        self._unsent = bytearray()
        self._unread = bytearray()
        self._out_of_step = False
        self._at_end = False
        self._closed = False
        self.process_id, self.user_id, _ = CREDENTIALS.unpack(
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        self.dead = False
        self._process: int | None = None
        connected.setblocking(False)

    def start(self) -> None:
        """In the thread of the loop."""
        if self._closed:
            return  # before there was a descriptor
        try:
            self._process = os.pidfd_open(self.process_id)
        except OSError as error:  # not allowed, or it has ended: then the end of the connection tells
            if error.errno in LACKING:  # it would write blocks, and nobody would see whether it still can
                log.warning("process %d is not heard now: %s", self.process_id, error)
                self._loop.later(Loop.PAUSE_S, self.start)
                return
        else:
            self._loop.watch(self._process, selectors.EVENT_READ, self._process_ended)
        self._loop.watch(self._socket, selectors.EVENT_READ, self._ready)

    def send(self, data: bytes) -> None:
        """From any thread. Goes out at once where the socket has room: a thread that had to be woken for that would
        take longer than all else. But not out of the main thread, of which a signal handler may leave half a message.
        """
        message = LENGTH.pack(len(data)) + data
        if threading.current_thread() is threading.main_thread():
            self._loop.post(functools.partial(self._write, message))
        else:
            self._write(message)

    def close(self) -> None:
        """From any thread, behind what was sent before."""
        self._loop.post(self._close)

    @property
    def may_live(self) -> bool:
        """Whether the process at the other end may be there although the connection has ended."""
        return self._process is not None and not self.dead

    # ---- in any thread but the main one ----
    def _write(self, message: bytes) -> None:
        with self._sending:
            if self._closed or self._out_of_step or self._at_end:
                return
            had_room = not self._unsent
            self._unsent += message
            if had_room:
                self._send_unsent()
            has_room = not self._unsent
        if not has_room:
            self._loop.post(self._wait_for_room)

    def _send_unsent(self) -> None:
        """What there is room for, under the lock."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # its end will be seen by reading

    # ---- in the thread of the loop ----
    def _wait_for_room(self) -> None:
        if self._closed or self._out_of_step or self._at_end:
            return
        if len(self._unsent) > MOST_UNSENT_BYTES:
            self._give_up("it does not read")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._loop.watch(self._socket, events, self._ready)

    def _ready(self) -> None:
        if self._unsent:
            with self._sending:
                self._send_unsent()
            self._wait_for_room()
        self._read()

    def _read(self) -> None:
        """All that there is."""
        while not (self._at_end or self._closed):
            try:
                found = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            if not found:
                self._at_end = True
                self._loop.forget(self._socket)  # it would be ready for ever
                self._ended(self)
            elif not self._out_of_step:
                self._unread += found
                self._take_messages()

    def _take_messages(self) -> None:
        while len(self._unread) >= LENGTH.size:
            [size_bytes] = LENGTH.unpack_from(self._unread)
            if size_bytes > MOST_BYTES:
                self._give_up(f"it has sent a message of {size_bytes} bytes")
                return
            end = LENGTH.size + size_bytes
            if len(self._unread) < end:
                return
            data = bytes(self._unread[LENGTH.size : end])
            del self._unread[:end]
            self._taken(self, data)

    def _give_up(self, why: str) -> None:
        """Says and hears nothing more, but for the end: until then the other side may be writing blocks."""
        log.warning("the connection to process %d is given up: %s", self.process_id, why)
        self._unread.clear()
        with self._sending:
            self._out_of_step = True
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        self._loop.watch(self._socket, selectors.EVENT_READ, self._ready)

    def _process_ended(self) -> None:
        self._read()  # what it has said before
        self.dead = True
        self._at_end = True
        self._ended(self)
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._loop.forget(self._socket)
        with self._sending:
            self._closed = True
            self._socket.close()
        if self._process is not None:
            self._loop.forget(self._process)
            os.close(self._process)
            self._process = None
