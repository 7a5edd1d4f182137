"""The channel between processes of one user: a unix socket in a folder that is private to him."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from typing import Protocol

from ..errors import PeerError
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..timeouts import check_timeout
from ..tracking.keeper import log
from .at_exit import threads
from .connection import Line, Loop
from .receiver import Receiver, check_receiver
from .sender import Sender

MOST_PATH_BYTES = 107  # of a unix socket's address


class Side(Protocol):
    """Who listens. All of it is called in the thread of the loop."""

    def received(self, peer: Line, data: bytes) -> object:
        """A message."""

    def holds(self, peer: Line) -> bool:
        """Whether the process at the other end may be touching blocks until it has ended."""

    def lost(self, peer: Line) -> object:
        """Of one that holds: its connection has ended, and its process perhaps not."""

    def gone(self, peer: Line) -> object:
        """Nothing more comes from it."""


class Listening:
    """A socket with those who have connected to it.

    Args:
        side: takes the messages.
        name: of the socket in a temporary folder.
        path: as of :class:`Listener`.
    """

    def __init__(self, side: Side, name: str, path: str | os.PathLike[str] | None) -> None:
        if path is not None:
            path = checked_path(path)
        self._side = side
        self._folder = tempfile.mkdtemp(prefix="paddle_kv-") if path is None else None
        self.path = os.path.join(self._folder or "", name) if path is None else path
        self._lines: set[Line] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            folder = os.path.dirname(os.path.abspath(self.path))
            _check_private(folder)
            with _alone_in(folder):
                _bind(self._socket, self.path)
                self._identity = _identity(self.path)
                self._socket.listen()
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            self._remove_folder()
            raise
        self._process_id = os.getpid()
        self._loop = Loop("paddle_kv-peers-listener")
        self._loop.post(self._watch)
        threads.add(self)

    def post(self, job: Callable[[], object]) -> None:
        """As :meth:`Loop.post`, in the thread that serves all of them."""
        self._loop.post(job)

    def later(self, seconds: float, job: Callable[[], object]) -> None:
        """As :meth:`Loop.later`."""
        self._loop.later(seconds, job)

    def close(self, timeout_s: float | None = None) -> None:
        """Ends all connections. Again: does nothing."""
        check_timeout(timeout_s)
        if self._process_id != os.getpid():
            return
        self._loop.post(self._close_here)
        self._loop.close(timeout_s)
        self._remove_folder()  # at exit the thread may have ended before

    # ---- in the thread of the loop ----
    def _watch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.watch(self._socket, selectors.EVENT_READ, self._accept)

    def _close_here(self) -> None:
        for line in self._lines:
            line._close()
        self._loop.forget(self._socket)
        if self._socket.fileno() >= 0:
            if _identity(self.path) == self._identity:  # somebody may have removed it, and another one come
                with contextlib.suppress(FileNotFoundError):  # whoever did not wait has removed the folder
                    os.unlink(self.path)  # while it is served: else another one might have replaced it by now
            self._socket.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left; it would be ready for ever
            log.warning("nobody can be let in at %s now: %s", self.path, error)
            self._loop.forget(self._socket)
            self._loop.later(Loop.PAUSE_S, self._watch)
            return
        line = Line(self._loop, connected, self._side.received, self._ended)
        if line.user_id != os.geteuid():
            log.warning("process %d of user %d was not let in", line.process_id, line.user_id)
            connected.close()
            return
        self._lines.add(line)
        line.start()

    def _ended(self, line: Line) -> None:
        if line.may_live and self._side.holds(line):
            self._side.lost(line)
            return  # the end of the process will be heard of
        self._side.gone(line)
        self._lines.discard(line)
        line._close()


class Listener(Listening):
    """Lets senders connect to a receiver: each connection is a peer of it.

    Processes of other users are not let in. Blocks that a connected process may be writing are held until it has said
    that it is through, or has ended.

    Args:
        receiver: takes the messages.
        path: of the socket; its folder must be private to the user (``0700``). None: in a temporary folder. A socket
            there to which nobody listens any more is replaced.

    Attributes:
        path: for :func:`connect`.

    Raises:
        TypeError: not a receiver, or not a path.
        ValueError: a path that is empty, has a zero byte, or is longer than the 107 bytes that an address holds.
        PermissionError: the folder is not the user's, or others may enter it.
        OSError: the socket cannot be made, for example because a process listens there.
    """

    def __init__(self, receiver: Receiver, path: str | os.PathLike[str] | None = None) -> None:
        check_receiver(receiver)
        super().__init__(receiver, "receiver", path)

    def close(self, timeout_s: float | None = None) -> None:
        """Ends all connections. Close the receiver before: it waits until its senders are through. Again: does
        nothing.

        Raises:
            TypeError, ValueError: a time that is none.
        """
        super().close(timeout_s)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def connect(scheduler: LayerwiseScheduler, path: str | os.PathLike[str]) -> Sender:
    """A sender that is connected to the receiver whose :class:`Listener` has this path. Its ``close`` ends the
    connection.

    Args:
        scheduler: as for :class:`Sender`.
        path: ``listener.path``.

    Raises:
        TypeError: not a path.
        ValueError: as of :class:`Listener`.
        PeerError: nobody listens there, or a process of another user.
        As :class:`Sender`.
    """
    check_scheduler(scheduler)
    path = checked_path(path)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            connected.connect(path)
        except OSError as error:
            raise PeerError(f"no receiver listens at {path!r}: {error.strerror}") from None
        line = _SenderLine(connected)
        try:
            check_user(line, path)
            sender = Sender(scheduler, line.send, hang_up=line.hang_up)
        except BaseException:
            line.hang_up()
            raise
    except BaseException:
        connected.close()
        raise
    line.begin(sender)
    return sender


def check_user(line: Line, path: str) -> None:
    """PeerError if another user's process listens there."""
    if line.user_id != os.geteuid():
        raise PeerError(f"a process of user {line.user_id} listens at {path!r}; it is not trusted")


class _SenderLine(Line):
    """With a thread of its own."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(Loop("paddle_kv-peers-sender"), connected, _nobody, _nobody)

    def begin(self, sender: Sender) -> None:
        self._taken = lambda _, data: sender.received(data)
        self._ended = lambda _: sender.gone()
        self._loop.post(self.start)

    def hang_up(self) -> None:
        self.close()
        self._loop.close()


def _nobody(*_: object) -> None:
    pass


def checked_path(path: str | os.PathLike[str]) -> str:
    """As a string; TypeError or ValueError unless it can name a socket."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path is {path!r}; a string or a path is expected")
    found = os.fspath(path)
    if not isinstance(found, str):
        raise TypeError(f"path is {path!r}; a path of characters, not of bytes, is expected")
    # With a zero byte in front it would be a name that lies in no folder, and so in none that is private.
    if "\0" in found or not 0 < len(os.fsencode(found)) <= MOST_PATH_BYTES:
        raise ValueError(f"path = {path!r} must have 1 to {MOST_PATH_BYTES} bytes, none of them zero")
    return found


def _check_private(folder: str) -> None:
    found = os.stat(folder)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"the folder {folder!r} has mode {stat.S_IMODE(found.st_mode):o} and user {found.st_uid}; "
            f"700 and {os.geteuid()} are expected"
        )


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Two processes that found the same socket served by nobody would replace each other's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
        os.close(descriptor)


def _bind(listening: socket.socket, path: str) -> None:
    try:
        listening.bind(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _is_served(path):
            raise
        os.unlink(path)
        listening.bind(path)
    os.chmod(path, 0o600)


def _identity(path: str) -> tuple[int, int] | None:
    """None: there is nothing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = os.lstat(path)
        return found.st_dev, found.st_ino
    return None


def _is_served(path: str) -> bool:
    """Whether it is anything but a socket to which nobody listens."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # one that is stopped takes no more connections
        return probe.connect_ex(path) != errno.ECONNREFUSED
