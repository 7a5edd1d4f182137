"""The channel: who is let in, what is cut off, and when a connection that ends means that nobody writes any more."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler, PeerError, TransferError
from paddle_kv.peers import Listener, Receiver, connect, connection, unix_socket
from paddle_kv.peers.messages import encode
from tests.peers.conftest import Decode, until
from tests.peers.prefill import Prefill
from tests.peers.test_messages import BEGIN_ID
from tests.schedule.rig import SHORT_S, WAIT_S, Rig, settles, threads_since


def raw(decode: Decode) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(WAIT_S)
    made.connect(decode.listener.path)
    return made


def held_copy(decode: Decode, prefill: Prefill, *, held: int, marked: Sequence[int]) -> Any:
    """The load of a hand-over whose copy of one layer is under way until it may go on."""
    load, grant = decode.receiver.grant([3], timeout_s=WAIT_S)
    prefill.ask("hold", held)
    prefill.ask("send", "a", grant.to_json(), [4])
    prefill.ask("mark", "a", marked)
    return load


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def test_folder_and_socket_are_private(decode: Decode, tmp_path: Path) -> None:
    path = Path(decode.listener.path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tmp_path.chmod(0o750)
    with pytest.raises(PermissionError, match="750"):
        Listener(decode.receiver, tmp_path / "socket")
    assert not (tmp_path / "socket").exists()
    tmp_path.chmod(0o700)
    with Listener(decode.receiver, tmp_path / "socket"):
        assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600
        with pytest.raises(OSError, match="in use"):
            Listener(decode.receiver, tmp_path / "socket")
    assert not (tmp_path / "socket").exists()


def test_a_listener_that_cannot_be_made_leaves_nothing(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(listening: socket.socket, path: str) -> None:
        assert os.path.isdir(os.path.dirname(path))
        made.append(listening)
        raise OSError("no space left")

    made: list[socket.socket] = []
    monkeypatch.setattr(unix_socket, "_bind", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="no space left"):
        Listener(decode.receiver)
    assert list(tmp_path.iterdir()) == []
    assert made[0].fileno() == -1


def test_a_socket_that_nobody_serves_is_replaced_and_nothing_else(decode: Decode, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "left"))
    left.close()
    Listener(decode.receiver, tmp_path / "left").close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="in use"):
        Listener(decode.receiver, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_socket_that_nobody_serves_is_replaced_once(
    decode: Decode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though two find it at the same time."""
    tmp_path.chmod(0o700)
    path = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    made: list[Listener | OSError] = []

    def make() -> None:
        try:
            made.append(Listener(decode.receiver, path))
        except OSError as error:
            made.append(error)

    other = threading.Thread(target=make)

    def is_served(path: str) -> bool:
        monkeypatch.undo()
        served = unix_socket._is_served(path)
        other.start()
        other.join(SHORT_S)  # it waits, or has replaced the socket
        return served

    monkeypatch.setattr(unix_socket, "_is_served", is_served)
    make()
    other.join(WAIT_S)
    [listener] = [one for one in made if isinstance(one, Listener)]
    assert len(made) == 2
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(str(path))
    listener.close()


def test_a_child_that_was_forked_while_a_listener_was_made_keeps_nobody_waiting(
    decode: Decode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    flock, kept = fcntl.flock, list[int]()

    def lock(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        kept.append(os.dup(descriptor))  # as the child has it

    monkeypatch.setattr(unix_socket, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": lock}))
    first = Listener(decode.receiver, tmp_path / "first")
    monkeypatch.undo()
    second = threading.Thread(target=lambda: Listener(decode.receiver, tmp_path / "second").close(), daemon=True)
    second.start()
    second.join(WAIT_S / 4)
    assert not second.is_alive()
    first.close()
    for descriptor in kept:
        os.close(descriptor)


def test_a_socket_is_removed_while_it_is_served(
    decode: Decode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody replaces it before, whose socket would be removed."""
    tmp_path.chmod(0o700)
    listener, unlink, found = Listener(decode.receiver, tmp_path / "socket"), os.unlink, list[bool]()

    def look(path: str) -> None:
        found.append(unix_socket._is_served(path))
        unlink(path)

    monkeypatch.setattr(unix_socket, "os", SimpleNamespace(**vars(os) | {"unlink": look}))
    listener.close()
    assert found == [True]
    assert not (tmp_path / "socket").exists()


def test_a_socket_of_another_one_is_left(decode: Decode, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "socket"
    first = Listener(decode.receiver, path)
    path.unlink()  # by somebody who believed that it was served by nobody
    with Listener(decode.receiver, path):
        first.close()
        assert path.exists()
    assert not path.exists()


def test_a_listener_that_is_stopped_keeps_its_path(decode: Decode, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind(str(tmp_path / "socket"))
        full.listen(0)
        first.connect(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="in use"):
            Listener(decode.receiver, tmp_path / "socket")


def test_no_descriptor_for_who_comes(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection.Loop, "PAUSE_S", SHORT_S)
    with Listener(decode.receiver) as listener, socket.socket(socket.AF_UNIX) as coming:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(coming.fileno() + 1, before[0]), before[1]))
        taken, started_s = [], time.monotonic()
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            coming.connect(listener.path)
            until(lambda: "nobody can be let in" in caplog.text)
            time.sleep(4 * SHORT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for one in taken:
                os.close(one)
        tries = caplog.text.count("nobody can be let in")
        assert 1 <= tries <= (time.monotonic() - started_s) / SHORT_S + 2
        until(lambda: listener._lines)


@pytest.mark.parametrize("stays", [True, False])
def test_no_descriptor_for_the_process_of_who_comes(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stays: bool
) -> None:
    opened, tries = os.pidfd_open, threading.Semaphore(0)
    lacking = True

    def open_process(process_id: int) -> int:
        if lacking:
            tries.release()
            raise OSError(connection.LACKING[0], "none is left")
        return opened(process_id)

    monkeypatch.setattr(os, "pidfd_open", open_process)
    monkeypatch.setattr(connection.Loop, "PAUSE_S", SHORT_S)
    with raw(decode) as coming:
        coming.sendall(framed(encode("begin", "0" * 32, BEGIN_ID, digest="x")))
        for _ in range(3):
            assert tries.acquire(timeout=WAIT_S)
        assert "is not heard now" in caplog.text
        [line] = decode.listener._lines
        if stays:
            lacking = False
            assert b"the grant is over" in coming.recv(4096)
            return
        line.close()
        with pytest.raises(ConnectionResetError):  # with what nobody has read
            coming.recv(1)
    before = tries._value
    time.sleep(3 * SHORT_S)
    assert tries._value <= before + 1  # nobody asks for ever


def test_a_listener_that_nobody_closes_leaves_no_folder() -> None:
    program = """
import os
from paddle_kv import LayerwiseScheduler
from paddle_kv.peers import Listener, Receiver, connect
from tests.schedule.rig import Rig
rig = Rig(shared=True)
scheduler = LayerwiseScheduler(rig.cache, rig.pool)
receiver = Receiver(scheduler)
listener = Listener(receiver)
load, grant = receiver.grant([3])
sender = connect(scheduler, listener.path)
if os.fork() == 0:
    raise SystemExit  # has nothing of its parent's to close
os.wait()
assert os.path.exists(listener.path)
print(listener.path)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.split()[-1])
    assert path.name == "receiver"
    assert not path.parent.exists()


def test_other_users_are_not_let_in(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with raw(decode) as line:
        assert line.recv(1) == b""
    with pytest.raises(PeerError, match="not trusted"):
        connect(decode.scheduler, decode.listener.path)


@pytest.mark.parametrize("wrong", ["", "\0name", "folder/\0", "x" * 108, "\u00e4" * 54])
def test_a_path_that_names_no_socket(
    decode: Decode, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)  # with a zero byte in front the kernel would take the name, and others could reach it
    for use in (lambda: Listener(decode.receiver, wrong), lambda: connect(decode.scheduler, wrong)):
        with pytest.raises(ValueError, match=r"path = .* must have 1 to 107 bytes, none of them zero"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_the_longest_path(decode: Decode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    with Listener(decode.receiver, "x" * 107):
        assert (tmp_path / ("x" * 107)).is_socket()


def test_a_path_of_bytes(decode: Decode) -> None:
    class OfBytes:
        def __fspath__(self) -> bytes:
            return b"socket"

    for use in (lambda: Listener(decode.receiver, OfBytes()), lambda: connect(decode.scheduler, OfBytes())):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a path of characters, not of bytes, is expected"):
            use()


def test_nobody_listens(decode: Decode, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no receiver listens"):
        connect(decode.scheduler, tmp_path / "nothing")


def test_messages_in_pieces_and_several_at_once(decode: Decode) -> None:
    before = decode.receiver.stats()["refused_messages"]
    with raw(decode) as line:
        wrong = framed(encode("done", "0" * 32, BEGIN_ID))
        for piece in wrong:
            line.sendall(bytes([piece]))
        line.sendall(wrong * 40 + framed(encode("begin", "0" * 32, BEGIN_ID, digest="x")))
        assert line.recv(4096)[4:].endswith(b'"reason":"the grant is over, or not of this receiver"}')
    assert decode.receiver.stats()["refused_messages"] == before + 42


@pytest.mark.parametrize("size_bytes", [4097, 1 << 20, (1 << 32) - 1])
def test_who_sends_what_is_too_long_is_heard_no_more(decode: Decode, size_bytes: int) -> None:
    before = decode.receiver.stats()["refused_messages"]
    with raw(decode) as line:
        line.sendall(struct.pack(">I", size_bytes) + framed(encode("done", "0" * 32, BEGIN_ID)) * 100)
        assert line.recv(1) == b""
        line.sendall(framed(encode("done", "0" * 32, BEGIN_ID)) * 100)
    time.sleep(SHORT_S)
    assert decode.receiver.stats()["refused_messages"] == before


def test_who_does_not_read_is_given_up(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "MOST_UNSENT_BYTES", 1000)
    with raw(decode) as line:
        line.sendall(framed(encode("begin", "0" * 32, BEGIN_ID, digest="x")) * 5000)
        until(lambda: "it does not read" in caplog.text)  # it reads only then: else it may be as quick as the writer
        heard_bytes = 0
        while found := line.recv(1 << 20):
            heard_bytes += len(found)  # what was under way; then it ends
    assert 0 < heard_bytes < 5000 * 100


def test_a_process_that_ends_its_connection_and_lives_still_holds_its_blocks(decode: Decode) -> None:
    prefill = Prefill(decode.exported, decode.listener.path)
    free = decode.pool.num_free_blocks
    load = held_copy(decode, prefill, held=0, marked=[0])
    prefill.ask("held")
    prefill.ask("shut")  # without a word; its copy goes on
    until(lambda: load.failed)
    time.sleep(SHORT_S)
    assert decode.pool.num_free_blocks == free - 1
    assert not load.done()
    prefill.kill()
    with pytest.raises(TransferError, match="the sender is gone"):
        load.wait(WAIT_S)
    assert decode.pool.num_free_blocks == free
    decode.forget([3])


def test_a_sender_out_of_step_stops_writing_and_the_blocks_are_back_with_its_process(decode: Decode) -> None:
    prefill = Prefill(decode.exported, decode.listener.path)
    free = decode.pool.num_free_blocks
    load = held_copy(decode, prefill, held=1, marked=range(5))
    prefill.ask("raw", b"\xff" * 8)
    time.sleep(SHORT_S)
    assert decode.pool.num_free_blocks == free - 1  # its copy goes on
    until(lambda: prefill.ask("failed", "a"))  # it has heard of the end
    prefill.ask("go_on")
    assert prefill.ask("wait", "a") == "cancelled"
    until(lambda: load.failed)  # it has hung up, and nothing that it said was heard
    assert decode.pool.num_free_blocks == free - 1
    prefill.end()
    with pytest.raises(TransferError, match="the sender is gone"):
        load.wait(WAIT_S)
    assert decode.pool.num_free_blocks == free
    decode.forget([3])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_of_a_sender_does_not_keep_the_connection(decode: Decode) -> None:
    prefill = Prefill(decode.exported, decode.listener.path)
    child = prefill.ask("fork")
    load, grant = decode.receiver.grant([3], timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [4])
    prefill.kill()
    with pytest.raises(TransferError, match="the sender is gone"):
        load.wait(WAIT_S / 2)
    os.kill(child, 9)
    decode.forget([3])


def test_a_connection_that_has_ended_is_forgotten_though_its_process_lives(decode: Decode) -> None:
    with Listener(decode.receiver) as listener:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(listener.path)
                line.sendall(framed(encode("begin", "0" * 32, BEGIN_ID, digest="x")))
                line.settimeout(WAIT_S)
                assert line.recv(1)
                assert listener._lines
        until(lambda: not listener._lines)


def test_a_sender_whose_receiver_is_gone_ends_without_a_complaint(
    decode: Decode, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    with Listener(decode.receiver) as listener:
        sender = connect(decode.scheduler, listener.path)
    until(lambda: not [one for one in threads_since(before) if "peers" in one.name])
    sender.close(0.0)
    assert caplog.records == []


def test_threads_and_descriptors_are_given_back() -> None:
    gc.collect()  # what the tests before have left is not given back by this one
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        rig = Rig(shared=True)
        with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, Receiver(scheduler) as receiver:
            with Listener(receiver) as listener:
                folder = os.path.dirname(listener.path)
                sender = connect(scheduler, listener.path)
                load, _ = receiver.grant([1])
                load.cancel()
                sender.close(WAIT_S)
                sender.close(WAIT_S)
            listener.close()
            load.wait_over(WAIT_S)
            assert not os.path.exists(folder)
        rig.pool.close()
    del rig, scheduler, receiver, listener, sender, load, _
    left: Any = {one for one in threads_since(threads) if "peers" in one.name}
    assert not left

    def are_given_back() -> bool:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) <= descriptors

    assert settles(are_given_back)
