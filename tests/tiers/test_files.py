"""The engine "files": what is in the folder, who may use it, and what happens when it does not work."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import ForkedError
from paddle_kv.errors import TierError
from paddle_kv.testing.tiers.rig import ALIGNED, ODD, WAIT_S, Rig, keys
from paddle_kv.tiers import FilesEngine, Job, Outcome, health, object_file
from paddle_kv.tiers.folder import SHELF_OBJECTS, Folder
from tests.tiers.conftest import MakeRig, objects

OBJECT_BYTES = 53248


def test_what_is_in_the_folder(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store([b"a secret of a user", b"another one"])
    everything = sorted(path for path in (tmp_path / "root").rglob("*"))
    shelf = tmp_path / "root" / f"{0:010d}-{OBJECT_BYTES}"
    names = sorted(rig.tier.format.name_of(key).hex() for key in (b"a secret of a user", b"another one"))
    assert everything == [shelf, *(shelf / name for name in names), tmp_path / "root" / "lock"]
    for path in [tmp_path / "root", *everything]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert all(path.stat().st_size == OBJECT_BYTES for path in objects(tmp_path))


def test_one_engine_a_folder(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    for _ in range(2):
        with pytest.raises(TierError, match=r"root is in use by another engine"):
            FilesEngine({tmp_path / "other": 100, tmp_path / "root": 100})
    program = f"import fcntl; fcntl.flock(open({str(tmp_path / 'root' / 'lock')!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-S", "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "BlockingIOError" in ran.stderr, ran.stderr
    FilesEngine({tmp_path / "other": 100}).close()  # it was given back
    rig.tier.engine.close(WAIT_S)
    Folder(tmp_path / "root", 1).close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierError, match="cannot be used"):
        FilesEngine({tmp_path / "file" / "root": 100})


@pytest.mark.parametrize(
    ("roots", "error", "text"),
    [
        ({}, ValueError, "at least one folder"),
        ("folder", TypeError, "a mapping folder"),
        ({"folder": 0}, ValueError, r"roots\['folder'\] = 0"),
    ],
)
def test_bad_roots(roots: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FilesEngine(roots)


def test_what_a_crash_left_is_deleted_and_the_rest_is_there(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(3))
    shelf = objects(tmp_path)[0].parent
    (shelf / ("_" + "0" * 32)).write_bytes(b"half")
    (shelf / "of somebody else").write_bytes(b"")
    (tmp_path / "root" / "folder of somebody else").mkdir()
    empty = tmp_path / "root" / f"{7:010d}-4096"
    empty.mkdir()
    rig = make_rig()
    assert not (shelf / ("_" + "0" * 32)).exists()
    assert (shelf / "of somebody else").exists()
    assert not empty.exists()
    assert rig.load(keys(3)).done
    rig.store(keys(1, "new"))
    assert (tmp_path / "root" / f"{8:010d}-{OBJECT_BYTES}").exists()  # younger than all that was there


def test_the_capacity_holds_across_restarts_and_the_oldest_go(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(20))
    rig = make_rig(capacity_bytes=12 * OBJECT_BYTES)
    for name in keys(4, "new"):
        rig.store([name])
    assert len(objects(tmp_path)) == 12
    assert rig.tier.stats()["engine_used_bytes"] == 12 * OBJECT_BYTES
    assert rig.tier.stats()["engine_evicted"] == 12
    assert rig.tier.exists(keys(4, "new")) == [True] * 4


def test_what_was_used_stays(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_bytes=6 * OBJECT_BYTES)
    for name in keys(6):
        rig.store([name])
    rig.load(keys(3))
    for name in keys(3, "new"):
        rig.store([name])
    assert rig.tier.exists(keys(6)) == [True] * 3 + [False] * 3


def test_an_evicted_object_gives_its_file(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(capacity_bytes=6 * OBJECT_BYTES)
    rig.store(keys(6))
    before = {path.stat().st_ino for path in objects(tmp_path)}
    rig.store(keys(6, "new"))
    assert {path.stat().st_ino for path in objects(tmp_path)} == before
    job = rig.load(keys(6, "new"))
    assert job.done
    assert rig.wrong(job) == []


def test_what_is_being_read_is_not_overwritten(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "root", 2 * 100)
    for name in (b"a" * 16, b"b" * 16):
        place = folder.begin_write(name, 100)
        assert place is not None
        (tmp_path / "root" / place.temporary).write_bytes(bytes(100))
        folder.end_write(place, complete=True)
    for _ in range(2):
        assert folder.begin_read(b"a" * 16) is not None
    folder.end_read(b"a" * 16)
    place = folder.begin_write(b"c" * 16, 100)
    assert place is not None
    assert folder.present(b"a" * 16)
    assert not folder.present(b"b" * 16)
    assert folder.begin_write(b"d" * 16, 100) is None  # one is being read, one written
    folder.end_write(place, complete=False)
    assert folder.used_bytes == 100
    folder.close()


def test_an_object_that_fits_nowhere_is_dropped(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_bytes=OBJECT_BYTES - 1)
    assert rig.store(keys(2)).outcomes == [Outcome.DROPPED] * 2


def test_objects_of_two_sizes_share_a_capacity(tmp_path: Path) -> None:
    engine = FilesEngine({tmp_path: 4 * OBJECT_BYTES})
    first, second = Rig(engine), Rig(engine, ODD)
    first.store(keys(4))
    second.store(keys(3))
    assert engine.stats()["used_bytes"] <= 4 * OBJECT_BYTES
    assert second.load(keys(3)).done
    for rig in (first, second):
        rig.close()
    engine.close(WAIT_S)


def test_a_folder_has_few_files(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "root", 1 << 30)
    for number in range(SHELF_OBJECTS + 1):
        place = folder.begin_write(number.to_bytes(16, "big"), 10)
        assert place is not None
        (tmp_path / "root" / place.temporary).write_bytes(bytes(10))
        folder.end_write(place, complete=True)
    assert [len(list(shelf.iterdir())) for shelf in sorted((tmp_path / "root").glob("*-10"))] == [SHELF_OBJECTS, 1]
    for number in range(SHELF_OBJECTS):
        folder.delete(number.to_bytes(16, "big"))
    assert len(list((tmp_path / "root").glob("*-10"))) == 1
    folder.close()


def test_the_index_is_small(in_memory: Path) -> None:
    """Of names alone: the files need not be read."""
    names = [number.to_bytes(16, "big") for number in range(6000)]
    for shelf in range(12):
        folder = in_memory / f"{shelf:010d}-4096"
        folder.mkdir()
        for name in names[500 * shelf : 500 * shelf + 500]:
            (folder / name.hex()).touch()
    gc.collect()
    tracemalloc.start()
    index = Folder(in_memory, 1 << 40)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 6000
    assert index.used_bytes == 6000 * 4096
    assert held / 6000 <= 200
    assert [sorted(index.names()[at : at + 500]) for at in range(0, 6000, 500)] == [
        names[at : at + 500] for at in range(0, 6000, 500)
    ]  # in order of age
    index.close()


# ---- what does not work ----
class Broken:
    """Calls of the system that fail, or do less than asked for, while it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[str, int] = {}
        self.short = False
        self.now_s = 1000.0  # how long a root rests does not depend on how busy the machine is
        monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        for name in ("pwritev", "preadv", "open"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def mend(self) -> None:
        """It works again, and every root has rested."""
        self.errors.clear()
        self.now_s += health.LONGEST_REST_S

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            if name in self.errors and (name != "open" or "dir_fd" in named):
                raise OSError(self.errors[name], os.strerror(self.errors[name]))
            if self.short and name != "open":
                descriptor, [buffer, *_], offset = given
                return call(descriptor, [buffer[: max(1, len(buffer) // 2)]], offset)
            return call(*given, **named)

        return wrapped


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    return Broken(monkeypatch)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("call", "code"), [("pwritev", errno.ENOSPC), ("pwritev", errno.EIO), ("open", errno.EROFS), ("open", errno.EMFILE)]
)
def test_writing_fails_for_a_while(
    make_rig: MakeRig, tmp_path: Path, broken: Broken, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    rig = make_rig()
    rig.store(keys(3))
    caplog.set_level(logging.INFO, "paddle_kv")
    broken.errors[call] = code
    for attempt in range(3):
        assert not set(rig.store(keys(5, f"attempt{attempt}")).outcomes) - {Outcome.FAILED, Outcome.DROPPED}
    [text] = warnings_of(caplog)
    assert os.strerror(code) in text
    assert str(tmp_path / "root") in text
    assert rig.tier.stats()["engine_errors"] >= 1
    assert rig.tier.stats()["engine_resting_roots"] == 1
    broken.errors.clear()
    assert rig.store(keys(1, "too early")).outcomes == [Outcome.DROPPED]
    broken.mend()
    assert rig.load(keys(3)).done  # serving goes on
    assert len(objects(tmp_path)) == 3
    assert list(tmp_path.rglob("_*")) == []
    assert rig.tier.stats()["engine_used_bytes"] == 3 * OBJECT_BYTES
    assert rig.store(keys(5, "later")).done
    assert "works again" in caplog.records[-1].getMessage()
    assert len(warnings_of(caplog)) == 1
    assert rig.load(keys(5, "later")).done


def test_what_is_queued_behind_an_error_is_dropped(make_rig: MakeRig, broken: Broken) -> None:
    rig = make_rig()
    broken.errors["pwritev"] = errno.ENOSPC
    job = rig.store(keys(40))
    failed = job.outcomes.count(Outcome.FAILED)
    assert rig.tier.stats()["engine_errors"] == failed <= 16  # one in each thread
    assert job.outcomes.count(Outcome.DROPPED) == 40 - failed


def test_reading_fails_for_a_while(make_rig: MakeRig, broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    rig.store(keys(5))
    broken.errors["preadv"] = errno.EIO
    for _ in range(3):
        job = rig.load(keys(5))
        assert not set(job.outcomes) - {Outcome.FAILED, Outcome.DROPPED, Outcome.MISSING}
    assert len(warnings_of(caplog)) == 1
    assert rig.tier.exists(keys(5)) == [False] * 5
    assert rig.tier.exists(keys(5)) == [False] * 5
    broken.mend()
    assert rig.tier.exists(keys(5)) == [True] * 5
    job = rig.load(keys(5))
    assert job.done
    assert rig.wrong(job) == []


@pytest.mark.parametrize("spec", [ODD])
def test_a_system_that_does_less_than_asked(make_rig: MakeRig, broken: Broken, spec: Any) -> None:
    rig = make_rig(spec)
    broken.short = True
    assert rig.store(keys(3)).done
    job = rig.load(keys(3))
    assert job.done
    assert rig.wrong(job) == []


@pytest.mark.parametrize("whole", [True, False])
def test_somebody_removes_the_folder(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    rig = make_rig()
    rig.store(keys(5))
    target = tmp_path / "root" if whole else objects(tmp_path)[0].parent
    shutil.rmtree(target)
    assert rig.load(keys(5)).outcomes == [Outcome.MISSING] * 5
    assert rig.store(keys(5, "new")).done
    job = rig.load(keys(5, "new"))
    assert job.done
    assert rig.wrong(job) == []
    assert len(objects(tmp_path / "root")) == 5
    assert rig.tier.stats()["engine_used_bytes"] == 5 * OBJECT_BYTES
    with pytest.raises(TierError):
        Folder(tmp_path / "root", 1)  # held again


def test_a_clock_that_jumps(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    rig.store(keys(3))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert rig.load(keys(3)).done
    assert rig.store(keys(3, "new")).done


def test_without_direct_io(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_file, "DIRECT", os.O_DIRECTORY)  # a flag with which a file cannot be opened
    rig = make_rig()
    assert rig.store(keys(3)).done
    job = rig.load(keys(3))
    assert job.done
    assert rig.wrong(job) == []
    assert ["no direct I/O" in text for text in warnings_of(caplog)] == [True]


def test_direct_io_is_used_where_it_can_be(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    call = os.open

    def spying(path: Any, given: int, *rest: Any, **named: Any) -> int:
        flags.append(given)
        return call(path, given, *rest, **named)

    for spec, direct in ((ALIGNED, True), (ODD, False)):
        rig = make_rig(spec)
        if not rig.tier.engine.roots[0].direct:  # type: ignore[attr-defined]
            pytest.skip("this file system has no direct I/O")
        monkeypatch.setattr(os, "open", spying)
        rig.store(keys(1))
        rig.load(keys(1))
        monkeypatch.setattr(os, "open", call)
        assert [bool(one & os.O_DIRECT) for one in flags] == [direct] * 2
        flags.clear()


def test_the_engine_writes_from_and_reads_into_the_pool(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy on the host: the addresses that the system is given are those of the pool."""
    import numpy as np

    rig, seen = make_rig(), []
    for name in ("pwritev", "preadv"):
        call = getattr(os, name)

        def spying(fd: int, buffers: Any, offset: int, call: Any = call) -> Any:
            seen.extend((np.frombuffer(one, np.uint8).ctypes.data, len(one)) for one in buffers if len(one) != 4096)
            return call(fd, buffers, offset)

        monkeypatch.setattr(os, name, spying)
    rig.store(keys(1), [3])
    rig.load(keys(1), [5])
    start, size = rig.rows.ctypes.data, rig.rows.shape[1]
    assert seen[0] == (start + 3 * size, size)
    assert [address for address, _ in seen[1:]] == [start + 5 * size + at for at in (0, size // 3, 2 * size // 3)]


def test_the_faster_folder_gets_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = os.pwritev

    def dawdling(fd: int, *rest: Any) -> int:
        if "slow" in os.readlink(f"/proc/self/fd/{fd}"):
            time.sleep(0.03)
        return call(fd, *rest)

    monkeypatch.setattr(os, "pwritev", dawdling)
    engine = FilesEngine({tmp_path / "slow": 1 << 30, tmp_path / "quick": 1 << 30}, threads_per_root=1)
    rig = Rig(engine)
    for attempt in range(8):
        rig.store(keys(20, f"attempt{attempt}"))
    counts = [len(root.folder) for root in engine.roots]
    assert sum(counts) == 160
    assert counts[1] > counts[0] > 0
    rig.close()
    engine.close(WAIT_S)


def test_many_objects_and_few_descriptors(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_kv.tiers.root.MOST_OPEN_FILES", 2)
    rig = make_rig()
    rig.store(keys(30))
    job = rig.load(keys(30))
    assert job.done
    assert rig.wrong(job) == []
    assert rig.tier.engine.roots[0]._num_open == 0  # type: ignore[attr-defined]


def test_a_closed_engine_has_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    def held() -> tuple[set[int], set[str]]:
        return {thread.ident or 0 for thread in threading.enumerate()}, set(os.listdir("/proc/self/fd"))

    before = held()
    engine = FilesEngine({tmp_path / "root": 1 << 20})
    rig = Rig(engine)
    rig.store(keys(3))
    rig.load(keys(3))
    rig.close()
    engine.close(WAIT_S)
    engine.close(WAIT_S)
    rig.close()
    assert held() == before


def test_a_forked_child_is_told(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(keys(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            rig.tier.load([Job(keys(1), [1])])
        except ForkedError:
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert rig.load(keys(1)).done


def test_a_folder_is_given_back_whatever_children_live(tmp_path: Path) -> None:
    """A lock belongs to all processes that inherited it, so a forked one must not keep it."""
    engine = FilesEngine({tmp_path / "root": 1 << 20})
    ours, childs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        childs.send(b"!")
        childs.recv(1)  # until the parent has closed its end
        os._exit(0)
    childs.close()
    assert ours.recv(1) == b"!"
    # As if this process had died: nothing but its own descriptors goes.
    os.close(engine.roots[0].folder._lock_descriptor)
    engine.roots[0].folder._lock_descriptor = -1
    try:
        Folder(tmp_path / "root", 1).close()
    finally:
        ours.close()
        os.waitpid(child, 0)
        engine.close(WAIT_S)


def test_an_engine_that_gets_no_threads_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def few(self: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", few)
        with pytest.raises(RuntimeError, match="new thread"):
            FilesEngine({tmp_path / "a": 100, tmp_path / "b": 100}, threads_per_root=2)
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    FilesEngine({tmp_path / "a": 100, tmp_path / "b": 100}).close()


def test_what_nobody_wants_evicts_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(capacity_bytes=3 * OBJECT_BYTES)
    rig.store(keys(3))
    job = Job(keys(3, "new"), [0, 1, 2])
    job.cancel()
    rig.tier.store([job])
    rig.tier.drain(WAIT_S)
    assert job.outcomes == [Outcome.DROPPED] * 3
    assert rig.tier.exists(keys(3)) == [True] * 3
    assert rig.tier.stats()["engine_used_bytes"] == 3 * OBJECT_BYTES


def test_a_link_is_no_object(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(2))
    outside = tmp_path / "outside"
    first = next(path for path in objects(tmp_path) if path.name == rig.tier.format.name_of(keys(1)[0]).hex())
    first.rename(outside)
    first.symlink_to(outside)
    job = rig.load(keys(2))
    assert job.outcomes == [Outcome.DAMAGED, Outcome.DONE]
    assert not first.is_symlink()
    assert outside.stat().st_size == OBJECT_BYTES
    assert rig.tier.stats()["engine_errors"] == 0


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="nothing was written"):
        object_file.write_file(-1, str(tmp_path / "file"), [memoryview(b"a")], direct=False)


def test_a_folder_that_comes_back_in_other_hands_leaves_descriptors_alone(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "root", 100)
    before = folder.descriptor
    shutil.rmtree(tmp_path / "root")
    other = Folder(tmp_path / "root", 100)
    for _ in range(3):
        with pytest.raises(OSError, match="in use by another engine"):
            folder.check()
        os.fstat(before)  # another thread may be about to use it
    other.close()
    assert folder.check()
    folder.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(before)


def test_a_miss_is_not_behind_a_system_that_does_not_answer(make_rig: MakeRig) -> None:
    rig = make_rig()
    folder = rig.tier.engine.roots[0].folder  # type: ignore[attr-defined]
    job = Job(keys(1), [0])
    loading = threading.Thread(target=lambda: rig.tier.load([job]), daemon=True)
    with folder._lock:  # as of a thread in a call that makes room
        loading.start()
        loading.join(5.0)
        assert not loading.is_alive()
    assert job.outcomes == [Outcome.MISSING]
