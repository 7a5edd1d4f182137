"""One connection: what was said before an end counts, whichever of the two the loop sees first."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.peers import Listener, connection
from paddle_kv.peers.connection import Line, Loop
from paddle_kv.peers.messages import MOST_BYTES, encode
from tests.peers.conftest import Decode, until
from tests.peers.test_messages import BEGIN_ID
from tests.schedule.rig import WAIT_S


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


class StillLoop:
    """A loop in which nothing happens by itself."""

    def __init__(self) -> None:
        self.watched: dict[Any, Callable[[], object]] = {}
        self.events: dict[Any, int] = {}
        self.timed: list[tuple[float, Callable[[], object]]] = []

    def later(self, seconds: float, job: Callable[[], object]) -> None:
        self.timed.append((seconds, job))

    def post(self, job: Callable[[], object]) -> None:
        job()

    def watch(self, source: Any, events: int, ready: Callable[[], object]) -> None:
        self.watched[source], self.events[source] = ready, events

    def forget(self, source: Any) -> None:
        self.watched.pop(source, None)


class Ends:
    """A connection with both of its ends, and what was told of it."""

    def __init__(self) -> None:
        self.loop = StillLoop()
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.told: list[Any] = []
        self.line = Line(
            self.loop,  # type: ignore[arg-type]
            self.here,
            lambda _, data: self.told.append(data),
            lambda line: self.told.append("ended, dead" if line.dead else "ended"),
        )
        self.line.start()

    @property
    def process(self) -> int:
        return next(one for one in self.loop.watched if isinstance(one, int))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.line._close()
    made.there.close()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ESRCH])
def test_where_the_end_of_a_process_cannot_be_seen_that_of_its_connection_tells(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(_: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refused)
    ends = Ends()
    ends.there.sendall(framed(b"may I write?"))
    assert ends.told == [] and list(ends.loop.watched) == [ends.here]
    ends.loop.watched[ends.here]()
    assert ends.told == [b"may I write?"]
    assert not ends.line.may_live and not ends.loop.timed
    ends.line._close()
    ends.there.close()


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_is_not_heard_before_its_end_can_be_seen(
    monkeypatch: pytest.MonkeyPatch, number: int, closed: bool
) -> None:
    """For want of descriptors or memory: it is tried again, until the connection is closed."""

    def refused(_: int) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refused)
        ends = Ends()
        ends.there.sendall(framed(b"may I write?"))
        for tries in (1, 2):
            assert ends.told == [] and not ends.loop.watched
            assert not ends.line.may_live
            assert [seconds for seconds, _ in ends.loop.timed] == [1.0] * tries
            if tries == 1:
                ends.loop.timed[-1][1]()
    if closed:
        ends.line._close()
    ends.loop.timed[-1][1]()
    assert len(ends.loop.timed) == 2
    if closed:
        assert not ends.loop.watched and not ends.line.may_live
    else:
        assert ends.line.may_live and set(ends.loop.watched) == {ends.here, ends.process}
        ends.loop.watched[ends.here]()
        assert ends.told == [b"may I write?"]
        ends.line._close()
    ends.there.close()


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_process_has_said_is_told_before_its_end(ends: Ends, closed: bool) -> None:
    """Its end is seen first, and its socket may be held open by another process."""
    large = bytes(range(256)) * (MOST_BYTES // 256)  # more than one call of recv() gives
    said = [large[:size] for size in (0, 1, 7, *[MOST_BYTES] * 40)]
    ends.here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    ends.there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    ends.there.sendall(b"".join(map(framed, said)) + framed(large)[:-1])
    if closed:
        ends.there.close()
    process = ends.process
    ends.loop.watched[process]()
    assert ends.told == [*said, *["ended"] * closed, "ended, dead"]  # and nothing of the message that is cut off
    assert ends.here.fileno() == -1
    assert ends.loop.watched == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process)
    assert not ends.line.may_live


def test_a_process_that_lives_behind_the_end_of_its_connection_is_told_of_twice(ends: Ends) -> None:
    ends.there.sendall(framed(b"one"))
    ends.there.close()
    assert ends.line.may_live
    ends.loop.watched[ends.here]()
    assert ends.told == [b"one", "ended"]
    assert ends.line.may_live
    assert list(ends.loop.watched) == [ends.process]  # the socket would be ready for ever
    ends.line.send(b"nobody reads it")
    assert list(ends.loop.watched) == [ends.process]
    ends.loop.watched[ends.process]()
    assert ends.told == [b"one", "ended", "ended, dead"]


def test_nothing_is_told_behind_the_end(ends: Ends) -> None:
    ready = ends.loop.watched[ends.here]
    ends.there.sendall(framed(b"one"))
    ends.line.close()
    ready()  # both were found in one look
    ends.line._close()
    assert ends.told == []


def test_a_message_that_is_larger_than_any_is_not_taken_and_none_behind_it(ends: Ends) -> None:
    ready = ends.loop.watched[ends.here]
    ends.there.sendall(framed(b"x" * MOST_BYTES) + struct.pack(">I", MOST_BYTES + 1) + framed(b"y") * 3)
    ready()
    assert ends.told == [b"x" * MOST_BYTES]
    assert ends.there.recv(1) == b""  # it hears of that
    ends.there.sendall(framed(b"y"))
    ready()
    ends.line.send(b"no more")
    ends.there.close()
    ready()
    assert ends.told == [b"x" * MOST_BYTES, "ended"]


def test_what_does_not_fit_into_the_socket_is_sent_when_there_is_room(ends: Ends) -> None:
    ends.here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    said = [bytes([number]) * 3000 for number in range(40)]
    for one in said:
        ends.line.send(one)
    assert ends.loop.events[ends.here] == connection.selectors.EVENT_READ | connection.selectors.EVENT_WRITE
    heard = b""
    while len(heard) < len(said) * 3004:
        heard += ends.there.recv(1 << 16)
        ends.loop.watched[ends.here]()
    assert heard == b"".join(map(framed, said))
    assert ends.loop.events[ends.here] == connection.selectors.EVENT_READ  # or it would be ready for ever


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_no_connection_open() -> None:
    """Else the other side would not hear that it was closed."""
    loop = Loop("test")
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    line = Line(loop, here, lambda _, data: None, lambda _: None)
    begun = threading.Event()
    loop.post(line.start)
    loop.post(begun.set)
    assert begun.wait(WAIT_S)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the test is over, or its process
        os._exit(0)
    try:
        line.close()
        loop.close(WAIT_S)
        there.settimeout(WAIT_S / 2)
        assert there.recv(1) == b""
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)
        there.close()


def test_an_error_ends_neither_the_thread_nor_what_is_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    loop, behind, again = Loop("test"), threading.Event(), threading.Event()
    reading, writing = os.pipe()

    def ready() -> None:
        again.set() if os.read(reading, 1) == b"2" else 1 / 0

    loop.post(lambda: 1 / 0)
    loop.post(lambda: loop.watch(reading, connection.selectors.EVENT_READ, ready))
    loop.post(behind.set)
    assert behind.wait(WAIT_S)
    os.write(writing, b"1")
    os.write(writing, b"2")
    assert again.wait(WAIT_S)
    loop.close(WAIT_S)
    assert [record.message for record in caplog.records] == ["an error in a channel between peers"] * 2
    os.close(reading)
    os.close(writing)


def test_what_is_timed_is_done_in_its_order_and_no_sooner(caplog: pytest.LogCaptureFixture) -> None:
    loop, end, seen = Loop("test"), threading.Event(), []
    began_s = time.monotonic()

    def time_them() -> None:
        with pytest.MonkeyPatch.context() as patch:  # all at once, however long it takes
            patch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: began_s))
            loop.later(0.04, lambda: (seen.append("last"), end.set()))
            loop.later(0.02, lambda: seen.append(time.monotonic() - began_s))
            loop.later(0.0, lambda: seen.append("first"))
            loop.later(0.01, lambda: 1 / 0)

    loop.post(time_them)
    assert end.wait(WAIT_S)
    assert [seen[0], seen[2]] == ["first", "last"]
    assert seen[1] >= 0.02
    assert len(caplog.records) == 1
    loop.close(WAIT_S)


def test_a_loop_that_has_done_its_jobs_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, done = Loop("test"), threading.Event()
    looks = []
    select = loop._selector.select
    monkeypatch.setattr(loop._selector, "select", lambda left_s: looks.append(None) or select(left_s))
    loop.post(done.set)
    assert done.wait(WAIT_S)
    time.sleep(0.05)
    assert len(looks) <= 2
    loop.close(WAIT_S)


@pytest.mark.parametrize("of", ["loop", "listener"])
def test_the_end_of_a_thread_is_waited_for_as_long_as_the_caller_says(of: str, decode: Decode) -> None:
    go_on, through = threading.Event(), threading.Event()
    listener = Listener(decode.receiver) if of == "listener" else None
    loop = Loop("test") if listener is None else listener._loop
    loop.post(lambda: (go_on.wait(WAIT_S), through.set()))
    (listener or loop).close(0.01)
    assert not through.is_set()
    go_on.set()
    assert through.wait(WAIT_S)
    loop._thread.join(WAIT_S)
    assert not loop._thread.is_alive()


PROGRAM = """
import socket, sys
path, before, behind = sys.argv[1], *map(bytes.fromhex, sys.argv[2:])
line = socket.socket(socket.AF_UNIX)
line.connect(path)
line.sendall(before)
line.recv(4096)
line.sendall(behind)
"""


def test_a_sender_that_ends_right_behind_its_last_word_has_handed_all_over(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the end of its process and of its last messages, which are found in one look, the end comes first."""
    load, grant = decode.receiver.grant([3], timeout_s=WAIT_S)
    begin = framed(encode("begin", grant.grant_id, BEGIN_ID, digest=grant.digest))
    layers = framed(encode("layers", grant.grant_id, BEGIN_ID, first=0, end=grant.num_layers))
    done = framed(encode("done", grant.grant_id, BEGIN_ID))
    loop, told, go_on = decode.listener._loop, threading.Event(), threading.Event()
    select = loop._selector.select
    monkeypatch.setattr(loop._selector, "select", lambda left_s: sorted(select(left_s), key=lambda one: -one[0].fd))
    send = connection.Line.send

    def stop(line: Line, data: bytes) -> None:
        send(line, data)
        loop.post(lambda: (told.set(), go_on.wait(WAIT_S)))

    monkeypatch.setattr(connection.Line, "send", stop)
    sender = subprocess.Popen(
        [sys.executable, "-S", "-c", PROGRAM, decode.listener.path, begin.hex(), (layers + done).hex()]
    )
    assert told.wait(WAIT_S)
    assert sender.wait(WAIT_S) == 0
    go_on.set()
    load.wait(WAIT_S)
    until(lambda: not decode.listener._lines)
    decode.forget([3])


def test_a_thread_of_the_library_sends_by_itself_and_the_main_thread_does_not(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may end a call of the main thread behind any byte."""
    posted: list[Callable[[], object]] = []
    monkeypatch.setattr(ends.loop, "post", posted.append)

    def send_elsewhere(data: bytes) -> None:
        thread = threading.Thread(target=ends.line.send, args=(data,))
        thread.start()
        thread.join(WAIT_S)

    ends.line.send(b"one")
    assert len(posted) == 1
    send_elsewhere(b"two")
    assert ends.there.recv(100) == framed(b"two")
    posted.pop()()
    assert ends.there.recv(100) == framed(b"one")

    ends.here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    said = [bytes([number]) * 3000 for number in range(9)]
    for one in said:
        send_elsewhere(one)  # there is no room for all: the loop waits for it
    assert posted
    while posted:
        posted.pop()()
    assert ends.loop.events[ends.here] & connection.selectors.EVENT_WRITE
    heard = b""
    while len(heard) < len(said) * 3004:
        heard += ends.there.recv(1 << 16)
        ends.loop.watched[ends.here]()
    assert heard == b"".join(map(framed, said))  # whole ones, in order
    assert not ends.loop.events[ends.here] & connection.selectors.EVENT_WRITE
