"""The engine "files": what is in the folder, who may use it, and what happens when it does not work."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import mmap
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_kv import ForkedError
from paddle_kv.errors import TierError
from paddle_kv.testing.tiers.rig import ALIGNED, ODD, WAIT_S, Rig, keys
from paddle_kv.tiers import FilesEngine, Job, Outcome, health, object_file, recovery
from paddle_kv.tiers.folder import Folder
from paddle_kv.tiers.slab import Slab, create
from paddle_kv.tiers.space import Place
from paddle_kv.tracking.keeper import Deadline, keeper
from tests.peers.conftest import until
from tests.tiers.conftest import MakeRig, objects, wait_for_recovery

OBJECT_BYTES = 53248


@dataclass
class Wanted:
    """As much of a write as a folder looks at."""

    name: bytes
    size_bytes: int


def stored_in(folder: Folder, *wanted: Wanted) -> list[Place]:
    places = []
    for place in folder.begin_write(wanted):  # type: ignore[arg-type]
        assert isinstance(place, Place)
        folder.end_write([place], complete=True)
        places.append(place)
    return places


def test_what_is_in_the_folder(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store([b"a secret of a user", b"another one"])
    root = tmp_path / "root"
    slab, table = root / f"{0:010d}-{OBJECT_BYTES}.slab", root / f"{0:010d}-{OBJECT_BYTES}.table"
    assert sorted(root.rglob("*")) == [slab, table, root / "lock"]
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    num_slots = (64 << 20) // OBJECT_BYTES
    assert slab.stat().st_size == num_slots * OBJECT_BYTES
    content = table.read_bytes()
    head = struct.pack("<8sIQQ", b"PDKVSLAB", 1, OBJECT_BYTES, num_slots)
    assert content[:32] == head + struct.pack("<I", zlib.crc32(head))
    found = objects(tmp_path)
    names = {rig.tier.format.name_of(key) for key in (b"a secret of a user", b"another one")}
    assert {one.name for one in found} == names
    for number, one in enumerate(found):
        record = struct.pack("<16sQI", one.name, number + 1, OBJECT_BYTES)
        assert content[32 * (one.slot + 1) :][:32] == record + struct.pack("<I", zlib.crc32(record))
        assert one.read()[:8] == b"PDKVTIER"
    used = {one.slot for one in found}
    assert all(content[32 * (slot + 1) :][:32] == bytes(32) for slot in range(num_slots) if slot not in used)


def test_small_objects_that_are_stored_together_are_written_and_read_together(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, writes = make_rig(num_blocks=70), []

    def counted(ranges: list[Any], call: Any = object_file.write_ranges) -> Any:
        writes.append([offset for _, offset, _ in ranges])
        return call(ranges)

    monkeypatch.setattr(object_file, "write_ranges", counted)
    rig.store(keys(6))
    rig.store(keys(70)[6:])
    assert list(map(len, writes)) == [6, 64]
    for starts in writes:
        assert starts == list(range(starts[0], starts[0] + len(starts) * OBJECT_BYTES, OBJECT_BYTES))
    reads, call = [], object_file.read_ranges
    monkeypatch.setattr(object_file, "read_ranges", lambda ranges: reads.append(ranges) or call(ranges))
    [root] = rig.tier.engine.roots  # type: ignore[attr-defined]
    until(lambda: root._num_idle == 8)  # also the one that has told of the last store
    job = rig.load(keys(70), layerwise=False)
    assert rig.wrong(job) == []
    assert len(reads) == 8  # for each thread its part
    for ranges in reads:
        starts = [offset for _, offset, _ in ranges]
        assert starts == list(range(starts[0], starts[0] + len(starts) * OBJECT_BYTES, OBJECT_BYTES))
    writes.clear()
    rig.store(keys(70, "more"))
    assert sorted(map(len, writes)) == [6, 64]  # at most 64 at once


def test_neighbours_are_read_by_one_call_of_the_system(tmp_path: Path) -> None:
    def calls() -> int:
        return int(Path("/proc/self/io").read_text().split("syscr:")[1].split()[0])

    content = np.random.default_rng(1).integers(0, 256, 40_000, np.uint8)
    (tmp_path / "file").write_bytes(content)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    found = np.full(60_000, 0xA5, np.uint8)
    views = [memoryview(found[at : at + 100]) for at in range(0, 60_000, 150)]
    ranges = [(descriptor, 100 * number, [view]) for number, view in enumerate(views)]
    before = calls()
    assert object_file.read_ranges(ranges) == [object_file.ALL_MOVED] * 400
    assert calls() - before < 10  # and those of this test
    found = found.reshape(-1, 150)
    assert found[:, :100].tobytes() == content.tobytes()
    assert (found[:, 100:] == 0xA5).all()
    os.close(descriptor)
    assert object_file.read_ranges(ranges[:2]) == [errno.EBADF] * 2
    assert object_file.read_ranges([]) == []
    with pytest.raises(BufferError):
        object_file.read_ranges([(0, 0, [memoryview(b"constant")])])


def test_ranges_and_tables_are_written_by_the_library(tmp_path: Path) -> None:
    content = np.random.default_rng(1).integers(0, 256, 60_000, np.uint8)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    parts = [memoryview(content[at : at + 100]).toreadonly() for at in range(0, 60_000, 150)]
    apart = lambda number: 100 * number + 1000 * (number >= 200)  # noqa: E731
    ranges = [(descriptor, apart(number), [part[:30], part[30:]]) for number, part in enumerate(parts)]
    ranges[300] = (-1, *ranges[300][1:])
    expected = [object_file.ALL_MOVED] * 400
    expected[300] = errno.EBADF
    assert object_file.write_ranges(ranges) == expected
    wanted = bytearray(b"".join(parts[:200]) + bytes(1000) + b"".join(parts[200:]))
    wanted[apart(300) : apart(301)] = bytes(100)
    assert (tmp_path / "file").read_bytes() == wanted
    folder = os.open(tmp_path, os.O_RDONLY)
    assert object_file.write_table(folder, b"file", descriptor, [(3, b"abc"), (9, b"d")]) == object_file.ALL_MOVED
    wanted[3:6], wanted[9:10] = b"abc", b"d"
    assert (tmp_path / "file").read_bytes() == wanted
    os.symlink("file", tmp_path / "other")
    assert object_file.write_table(folder, b"other", -1, [(0, b"wrong")]) == errno.ELOOP
    assert object_file.write_table(folder, b"none", -1, [(0, b"wrong")]) == errno.ENOENT
    assert object_file.write_table(folder, b"file", 1 << 20, [(0, b"wrong")]) == errno.EBADF
    os.rename(tmp_path / "file", tmp_path / "kept")
    gone = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.unlink(tmp_path / "file")
    assert object_file.write_table(folder, b"kept", gone, [(0, b"wrong")]) == errno.ENOENT
    assert (tmp_path / "kept").read_bytes() == wanted
    for one in (descriptor, folder, gone):
        os.close(one)


NONSENSE = [None, 7, "text", b"bytes", (), [None], [()], [(1, 2)], [(None, 0, [])], [(0, 0, [7])], [(1 << 80, 0, [])]]


@pytest.mark.parametrize("given", NONSENSE)
def test_nonsense_for_the_library_is_an_error_of_python(given: Any) -> None:
    for call in (object_file.read_ranges, object_file.write_ranges):
        with pytest.raises((TypeError, SystemError, IndexError, OverflowError, BufferError)):
            call(given)
    with pytest.raises((TypeError, SystemError, IndexError, OverflowError, BufferError)):
        object_file.write_table(-1, b"name", -1, given)
    with pytest.raises((TypeError, SystemError, IndexError, OverflowError, BufferError)):
        object_file.write_table(given, given, given, given)


def test_each_range_has_its_own_result(tmp_path: Path) -> None:
    content = np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_DIRECT):
        descriptor = os.open(tmp_path / "file", flags)
        memory = mmap.mmap(-1, 200 * 8192)
        offsets = [
            8192 * (37 * number % 100) for number in range(200)
        ]  # more than are queued at once, none side by side
        views = [memoryview(memory)[at : at + 4096] for at in range(0, len(memory), 8192)]
        ranges = [(descriptor, offset, [view]) for offset, view in zip(offsets, views, strict=True)]
        ranges[50] = (descriptor, 1 << 20, ranges[50][2])
        ranges[120] = (-1, 0, ranges[120][2])
        expected = [object_file.ALL_MOVED] * 200
        expected[50], expected[120] = object_file.FILE_ENDED, errno.EBADF
        assert object_file.read_ranges(ranges) == expected
        for number, (offset, view) in enumerate(zip(offsets, views, strict=True)):
            assert view == (bytes(4096) if expected[number] else content[offset : offset + 4096])
        assert memory[4096:8192] == bytes(4096)
        os.close(descriptor)


def test_one_engine_a_folder(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    for _ in range(2):
        with pytest.raises(TierError, match=r"root is in use by another engine"):
            FilesEngine({tmp_path / "other": 100, tmp_path / "root": 100})
    program = f"import fcntl; fcntl.flock(open({str(tmp_path / 'root' / 'lock')!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-S", "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "BlockingIOError" in ran.stderr, ran.stderr
    (tmp_path / "root" / "lock").unlink()
    with pytest.raises(TierError, match=r"root is in use by another engine"):
        FilesEngine({tmp_path / "root": 100})
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


def test_what_former_versions_left_is_deleted_and_the_rest_is_there(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(3))
    root = tmp_path / "root"
    former = root / f"{7:010d}-4096"
    former.mkdir()
    for name in ("_" + "0" * 32, "1" * 32):
        (former / name).write_bytes(b"object")
    others = root / f"{8:010d}-4096"
    others.mkdir()
    (others / "of somebody else").write_bytes(b"")
    (root / "folder of somebody else").mkdir()
    (root / f"{9:010d}-4096.table").write_bytes(b"of a slab that is gone")
    (root / f"{5:010d}-4097.slab").write_bytes(b"no size of a slot")
    (root / f"{6:010d}-4096.slab").symlink_to(root / "lock")
    rig = make_rig()
    wait_for_recovery(rig.tier.engine)  # type: ignore[arg-type]
    assert not former.exists()
    assert (others / "of somebody else").exists()
    assert not (root / f"{9:010d}-4096.table").exists()
    assert rig.load(keys(3)).done
    assert rig.store(keys(1, "new")).done
    assert rig.tier.stats()["engine_objects"] == 4


def test_a_start_does_not_wait_for_headers(make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known yet is a miss; its slots are nobody's, and what is stored meanwhile goes elsewhere."""
    rig = make_rig()
    rig.store(keys(6))
    rig = make_rig()
    rig.tier.engine.close(WAIT_S)
    next((tmp_path / "root").glob("*.table")).unlink()
    look, going = recovery._look, threading.Event()

    def waiting(*given: Any, **named: Any) -> Any:
        assert going.wait(WAIT_S)
        return look(*given, **named)

    monkeypatch.setattr(recovery, "_look", waiting)
    rig = make_rig(capacity_bytes=1 << 30)
    assert rig.tier.exists(keys(6)) == [False] * 6
    assert rig.store(keys(3)).done  # in another slab
    assert rig.store(keys(3, "new")).done
    going.set()
    wait_for_recovery(rig.tier.engine)  # type: ignore[arg-type]
    assert rig.tier.exists(keys(6)) == [True] * 6
    assert rig.tier.stats()["engine_objects"] == 9
    job = rig.load([*keys(6), *keys(3, "new")])
    assert job.done
    assert rig.wrong(job) == []


def test_a_name_that_is_there_twice_is_the_one_stored_last(make_rig: MakeRig, tmp_path: Path) -> None:
    """As after a process that lost its tables' last records."""
    rig = make_rig()
    rig.store(keys(4))
    found = objects(tmp_path)
    rig.tier.engine.close(WAIT_S)
    table = found[0].slab.with_suffix(".table")
    content = bytearray(table.read_bytes())
    for one, name, stored in ((found[1], found[0].name, 9), (found[2], found[3].name, 1)):
        record = struct.pack("<16sQI", name, stored, OBJECT_BYTES)
        at = 32 * (one.slot + 1)
        content[at : at + 32] = record + struct.pack("<I", zlib.crc32(record))
    table.write_bytes(content)
    folder = Folder(tmp_path / "root", 1 << 30)
    assert len(folder) == 2
    assert folder.space.used_bytes == 2 * OBJECT_BYTES
    places = {name: folder.space.at(place)[1] for name, place in folder.space.index.items()}
    assert places == {found[0].name: found[1].slot, found[3].name: found[3].slot}
    folder.close()
    assert {(one.name, one.slot) for one in objects(tmp_path)} == set(places.items())


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


def test_neighbours_of_about_one_age_make_room_together(tmp_path: Path) -> None:
    """Threads that store and load side by side mix the ages of neighbours; pieces must not become ever smaller."""
    folder = Folder(tmp_path, 256 * 4096)
    names = [b"%016d" % number for number in range(256)]
    places = stored_in(folder, *(Wanted(name, 4096) for name in names))
    slots = [place.slot for place in places]
    mixed = [start + number for start in range(240, -1, -16) for number in (*range(1, 16, 2), *range(0, 16, 2))]
    for spot in folder.begin_read(names[number] for number in mixed):
        assert spot is not None
        folder.end_read([spot])
    assert folder.names() == [names[number] for number in mixed]
    later = stored_in(folder, *(Wanted(b"later%011d" % number, 4096) for number in range(32)))
    assert [place.slot for place in later] == sorted(slots[240:]) + sorted(slots[224:240])
    assert set(folder.names()) == {*names[:224], *(place.name for place in later)}
    folder.close()


def test_an_evicted_object_gives_its_slot(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(capacity_bytes=6 * OBJECT_BYTES)
    rig.store(keys(6))
    before = {(one.slab, one.slot) for one in objects(tmp_path)}
    rig.store(keys(6, "new"))
    assert {(one.slab, one.slot) for one in objects(tmp_path)} == before
    job = rig.load(keys(6, "new"))
    assert job.done
    assert rig.wrong(job) == []


def test_what_is_being_read_is_not_overwritten(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "root", 2 * 4096)
    a, b, c, d = (Wanted(bytes([number]) * 16, 4096) for number in range(4))
    stored_in(folder, a, b)
    spots = [folder.begin_read([a.name])[0] for _ in range(2)]
    assert spots[0] == spots[1] is not None
    folder.end_read([spots[0]])
    [place] = folder.begin_write([c])  # type: ignore[list-item]
    assert isinstance(place, Place)
    assert folder.present(a.name)
    assert not folder.present(b.name)
    assert folder.begin_write([d]) == [Outcome.DROPPED]  # type: ignore[list-item]
    folder.end_write([place], complete=False)  # one was being read, one written
    assert folder.space.used_bytes == 4096
    folder.end_read([spots[1]])
    folder.close()


def test_what_is_deleted_while_it_is_read_keeps_its_slot_until_then(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "root", 4096)
    a, b = (Wanted(bytes([number]) * 16, 4096) for number in range(2))
    [place] = stored_in(folder, a)
    spots = [folder.begin_read([a.name])[0] for _ in range(2)]
    folder.clear(folder.delete([a.name]))
    for spot in spots:
        assert spot == (place.slab, place.slot)
        assert folder.begin_write([b]) == [Outcome.DROPPED]  # type: ignore[list-item]
        folder.end_read([spot])
    assert [(one.slab, one.slot) for one in stored_in(folder, b)] == spots[:1]
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


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.slab"))


def test_a_large_object_makes_as_many_small_ones_go_as_it_needs(in_memory: Path) -> None:
    folder = Folder(in_memory, 100 * 4096)
    small = [Wanted(number.to_bytes(16, "big"), 4096) for number in range(100)]
    stored_in(folder, *small)
    stored_in(folder, Wanted(b"l" * 16, 70 * 4096))
    assert [folder.present(one.name) for one in small] == [False] * 70 + [True] * 30
    assert folder.space.used_bytes == folder.space.charged_bytes == 100 * 4096
    stored_in(folder, Wanted(b"m" * 16, 4096))  # and a small one needs as much as one: of those used longest ago
    assert [folder.present(one.name) for one in small] == [False] * 71 + [True] * 29
    stored_in(folder, *(Wanted(b"n%15d" % number, 4096) for number in range(30)))
    assert not folder.present(b"l" * 16)
    assert folder.space.used_bytes <= folder.space.charged_bytes <= 100 * 4096
    assert len(folder) == 31
    assert sorted(path.name[11:] for path in in_memory.glob("*.slab")) == ["4096.slab"]  # an empty one is deleted
    assert len(list(in_memory.glob("*.table"))) == 1
    folder.close()


def test_what_the_disk_holds_is_within_the_capacity(in_memory: Path) -> None:
    capacity = 3 << 20
    folder = Folder(in_memory, capacity)
    rng = np.random.default_rng(5)
    for number in range(400):
        size = int(rng.choice([4096, 3 * 4096, 50 * 4096, 5000]))
        for place in folder.begin_write([Wanted(number.to_bytes(16, "big"), size)]):  # type: ignore[list-item]
            assert isinstance(place, Place)
            os.pwrite(place.slab.file(direct=False), bytes([1]) * size, place.slot * place.slab.slot_bytes)
            folder.end_write([place], complete=bool(rng.random() < 0.9))
        if rng.random() < 0.2:
            folder.clear(folder.delete([int(rng.integers(number + 1)).to_bytes(16, "big")]))
        assert folder.space.used_bytes <= folder.space.charged_bytes <= capacity
        assert on_disk(in_memory) <= capacity
        assert sum(slab.num_charged * slab.slot_bytes for slab in folder.space.slabs.values()) == (
            folder.space.charged_bytes
        )
    assert folder.space.evicted > 100
    assert folder.space.used_bytes == sum(folder.space.at(place)[0].slot_bytes for place in folder.space.index.values())
    folder.close()


def test_a_slab_has_its_bytes_before_it_is_used(in_memory: Path) -> None:
    folder = Folder(in_memory, 4 << 20)
    stored_in(folder, Wanted(b"a" * 16, 4096))
    assert on_disk(in_memory) == 4 << 20
    folder.close()
    folder = Folder(in_memory, 1 << 20)  # and gives them back when it may have less
    assert on_disk(in_memory) <= 1 << 20
    assert folder.present(b"a" * 16)
    folder.close()


def test_the_index_is_small(in_memory: Path) -> None:
    """Of tables alone: slabs need not be read."""
    names = [number.to_bytes(16, "big") for number in range(6000)]
    descriptor = os.open(in_memory, os.O_RDONLY)
    for number in range(12):
        slab = create(descriptor, number, 4096, 500, direct=False, allocate=False)
        mine = names[500 * number :][:500]
        slab.write_records(range(500), [(name, 500 * number + at + 1, 4096) for at, name in enumerate(mine)])
        for one in slab.descriptors():
            os.close(one)
    os.close(descriptor)
    gc.collect()
    tracemalloc.start()
    index = Folder(in_memory, 1 << 40)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == 6000
    assert index.space.used_bytes == 6000 * 4096
    assert held / 6000 <= 200
    assert index.names() == names  # in order of age
    index.close()


# ---- what does not work ----
class Broken:
    """Calls of the library that fail while it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[str, int] = {}
        self.now_s = 1000.0  # how long a root rests does not depend on how busy the machine is
        monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        for name in ("read_ranges", "write_ranges"):
            monkeypatch.setattr(object_file, name, self._ranges(name, getattr(object_file, name)))
        monkeypatch.setattr(object_file, "write_table", self._table(object_file.write_table))

    def mend(self) -> None:
        """It works again, and every root has rested."""
        self.errors.clear()
        self.now_s += health.LONGEST_REST_S

    def _ranges(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ranges: [self.errors[name]] * len(ranges) if name in self.errors else call(ranges)

    def _table(self, call: Callable[..., int]) -> Callable[..., int]:
        return lambda *given: self.errors.get("write_table", 0) or call(*given)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    return Broken(monkeypatch)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("write_ranges", errno.ENOSPC),
        ("write_ranges", errno.EIO),
        ("write_table", errno.EROFS),
        ("write_table", errno.EMFILE),
    ],
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
    assert rig.tier.stats()["engine_used_bytes"] == 3 * OBJECT_BYTES
    assert rig.store(keys(5, "later")).done
    assert "works again" in caplog.records[-1].getMessage()
    assert len(warnings_of(caplog)) == 1
    assert rig.load(keys(5, "later")).done


def test_what_is_queued_behind_an_error_is_dropped(tmp_path: Path, broken: Broken) -> None:
    engine = FilesEngine({tmp_path: 1 << 30}, threads_per_root=1)
    rig = Rig(engine, num_blocks=80)
    rig.store(keys(1, "first"))
    broken.errors["write_ranges"] = errno.ENOSPC
    job = rig.store(keys(80))
    assert job.outcomes == [Outcome.FAILED] * 64 + [Outcome.DROPPED] * 16  # those of one call, and all others
    assert rig.tier.stats()["engine_errors"] == 1
    rig.close()
    engine.close(WAIT_S)


def test_reading_fails_for_a_while(make_rig: MakeRig, broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    rig.store(keys(30))
    broken.errors["read_ranges"] = errno.EIO
    gone = set()
    for _ in range(3):
        job = rig.load(keys(5))
        assert not set(job.outcomes) - {Outcome.FAILED, Outcome.DROPPED, Outcome.MISSING}
        gone |= {key for key, outcome in zip(job.keys, job.outcomes, strict=True) if outcome is Outcome.FAILED}
    assert len(gone) >= 3
    assert len(warnings_of(caplog)) == 1
    for _ in range(2):
        assert rig.tier.exists(keys(30)) == [False] * 30
    assert set(rig.load(keys(30)[10:]).outcomes) == {Outcome.DROPPED}
    broken.mend()
    assert rig.tier.exists(keys(30)) == [key not in gone for key in keys(30)]  # what could not be read is gone
    job = rig.load(keys(30)[5:])
    assert job.done
    assert rig.wrong(job) == []


@pytest.mark.parametrize("direction", ["reading", "writing"])
def test_a_sector_that_fails_takes_its_object_alone(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    rig = make_rig()
    rig.store(keys(12))
    bad = objects(tmp_path)[4]
    hit, write, read = [], object_file.write_ranges, object_file.read_ranges

    def is_bad(fd: int, offset: int, buffers: Any) -> bool:
        start, stop = bad.slot * OBJECT_BYTES, (bad.slot + 1) * OBJECT_BYTES
        mine = offset < stop and offset + sum(map(len, buffers)) > start
        hit.append(mine and "slab" in os.readlink(f"/proc/self/fd/{fd}"))
        return bool(hit[-1])

    def writing(ranges: list[Any]) -> list[int]:
        return [errno.EIO if is_bad(*one) else code for one, code in zip(ranges, write(ranges), strict=True)]

    def reading(ranges: list[Any]) -> list[int]:
        return [errno.EIO if is_bad(*one) else code for one, code in zip(ranges, read(ranges), strict=True)]

    [lost] = [key for key in keys(12) if rig.tier.format.name_of(key) == bad.name]
    if direction == "writing":
        rig.tier.delete(keys(12))
        while objects(tmp_path):  # the slots are free when their records are gone
            time.sleep(0.001)
    monkeypatch.setattr(object_file, "write_ranges", writing)
    monkeypatch.setattr(object_file, "read_ranges", reading)
    job = rig.load(keys(12), layerwise=False) if direction == "reading" else rig.store(keys(12))
    assert any(hit)
    assert sorted(outcome.value for outcome in job.outcomes if outcome) == ["done"] * 11 + ["failed"]
    assert rig.wrong(job) == []
    stats = rig.tier.stats()
    assert (stats["engine_errors"], stats["engine_resting_roots"]) == (1, 0)
    assert rig.tier.exists(keys(12)).count(False) == 1
    if direction == "reading":
        assert job.outcomes[keys(12).index(lost)] is Outcome.FAILED
    else:
        assert rig.store(keys(12)).done  # elsewhere
        monkeypatch.undo()
        job = rig.load(keys(12))
        assert job.done
        assert rig.wrong(job) == []


def test_a_system_that_does_less_than_asked(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python writes and reads: tables that are made, and headers that are looked up."""

    def half(fd: int, buffers: Any, offset: int, call: Any = os.pwritev) -> Any:
        return call(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)

    monkeypatch.setattr(os, "pwritev", half)
    rig = make_rig(ODD)
    assert rig.store(keys(3)).done
    job = rig.load(keys(3))
    assert job.done
    assert rig.wrong(job) == []


@pytest.mark.parametrize("what", ["the folder", "a slab", "a table", "both"])
def test_somebody_removes_the_folder(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    rig = make_rig()
    rig.store(keys(5))
    slab = objects(tmp_path)[0].slab
    if what == "the folder":
        shutil.rmtree(tmp_path / "root")
    if what in ("a slab", "both"):
        slab.unlink()
    if what in ("a table", "both"):
        slab.with_suffix(".table").unlink()
    job = rig.load(keys(5))
    assert rig.wrong(job) == []
    assert rig.store(keys(5, "new")).done
    assert rig.tier.exists(keys(5)) == [False] * 5  # it is known since then
    job = rig.load(keys(5, "new"))
    assert job.done
    assert rig.wrong(job) == []
    assert len(objects(tmp_path / "root")) == 5
    assert rig.tier.stats()["engine_used_bytes"] == 5 * OBJECT_BYTES
    assert warnings_of(caplog) == []
    with pytest.raises(TierError):
        Folder(tmp_path / "root", 1)  # held again
    rig = make_rig()
    assert rig.load(keys(5, "new")).done


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
    flags: list[tuple[str, int]] = []
    call = os.open

    def spying(path: Any, given: int, *rest: Any, **named: Any) -> int:
        flags.append((str(path), given))
        return call(path, given, *rest, **named)

    for spec, direct in ((ALIGNED, True), (ODD, False)):
        monkeypatch.setattr(os, "open", spying)
        rig = make_rig(spec)
        if not rig.tier.engine.roots[0].folder.direct:  # type: ignore[attr-defined]
            pytest.skip("this file system has no direct I/O")
        rig.store(keys(1))
        rig.load(keys(1))
        monkeypatch.setattr(os, "open", call)
        slabs = [(path.endswith(".slab"), bool(given & os.O_DIRECT)) for path, given in flags]
        assert (True, True) in slabs
        assert ((True, False) in slabs) != direct
        flags.clear()


def test_the_engine_writes_from_and_reads_into_the_pool(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy on the host: the addresses that the system is given are those of the pool."""
    rig, seen = make_rig(), []
    write, read = object_file.write_ranges, object_file.read_ranges

    def see(ranges: list[Any]) -> None:
        for _, _, buffers in ranges:
            seen.extend((np.frombuffer(one, np.uint8).ctypes.data, len(one)) for one in buffers[-1:])

    def writing(ranges: list[Any]) -> list[int]:
        see(ranges)
        return write(ranges)

    def reading(ranges: list[Any]) -> list[int]:
        see(ranges)
        return read(ranges)

    monkeypatch.setattr(object_file, "write_ranges", writing)
    monkeypatch.setattr(object_file, "read_ranges", reading)
    rig.store(keys(1), [3])
    rig.load(keys(1), [5])
    start, size = rig.rows.ctypes.data, rig.rows.shape[1]
    assert seen[0] == (start + 3 * size, size)
    assert [address for address, _ in seen[1:]] == [start + 5 * size + at for at in (0, size // 3, 2 * size // 3)]


def test_the_faster_folder_gets_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = object_file.write_ranges

    def dawdling(ranges: list[Any]) -> list[int]:
        if "slow" in os.readlink(f"/proc/self/fd/{ranges[0][0]}"):
            time.sleep(0.03)
        return call(ranges)

    monkeypatch.setattr(object_file, "write_ranges", dawdling)
    engine = FilesEngine({tmp_path / "slow": 1 << 30, tmp_path / "quick": 1 << 30}, threads_per_root=1)
    rig = Rig(engine)
    for attempt in range(8):
        rig.store(keys(20, f"attempt{attempt}"))
    counts = [len(root.folder) for root in engine.roots]
    assert sum(counts) == 160
    assert counts[1] > counts[0] > 0
    rig.close()
    engine.close(WAIT_S)


def test_a_closed_engine_has_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    def held() -> tuple[set[threading.Thread], set[str]]:
        return set(threading.enumerate()), set(os.listdir("/proc/self/fd"))

    gc.collect()  # what other tests have left
    keeper.call(list)  # its thread is the library's, and stays
    before = held()
    engine = FilesEngine({tmp_path / "root": 1 << 20})
    rig = Rig(engine)
    rig.store(keys(3))
    rig.load(keys(3))
    rig.close()
    engine.close(WAIT_S)
    engine.close(WAIT_S)
    rig.close()
    for now, then in zip(held(), before, strict=True):
        assert now <= then  # what other tests have left may end meanwhile


def test_threads_that_close_at_once_close_no_descriptor_twice(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, closed, failed = make_rig(), [], []
    rig.store(keys(3))

    def close(descriptor: int, call: Any = os.close) -> None:
        closed.append(descriptor)
        time.sleep(0.001)
        call(descriptor)

    def run() -> None:
        try:
            rig.tier.engine.close(WAIT_S)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert failed == []
    assert len(set(closed)) == len(closed) >= 3


def test_a_closed_engine_deletes_nothing_and_raises_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store(keys(3))
    rig.tier.engine.close(WAIT_S)
    rig.tier.engine.delete([rig.tier.format.name_of(key) for key in keys(3)])
    rig.tier.clear()
    assert make_rig().tier.exists(keys(3)) == [True] * 3


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
    folder = engine.roots[0].folder
    for name in ("_lock_descriptor", "descriptor"):
        os.close(getattr(folder, name))
        setattr(folder, name, -1)
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


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="nothing was written"):
        object_file.write_range(-1, 0, [memoryview(b"a")])


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
    folder.check()
    assert folder.descriptor >= 0
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


def test_no_call_waits_for_a_system_that_does_not_answer(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a thread of the engine does: look-ups, deletions and new jobs return at once."""
    rig = make_rig()
    rig.store(keys(4))
    going, call, waiting = threading.Event(), object_file.write_ranges, threading.Semaphore(0)

    def stuck(*given: Any) -> Any:
        waiting.release()
        assert going.wait(WAIT_S)
        return call(*given)

    def stuck_table(call: Callable[..., int], *given: Any) -> int:
        assert going.wait(WAIT_S)
        return call(*given)

    monkeypatch.setattr(object_file, "write_ranges", stuck)
    monkeypatch.setattr(
        object_file, "write_table", lambda *given, call=object_file.write_table: stuck_table(call, *given)
    )
    jobs = [Job(keys(1, "new"), [5]), Job(keys(1), [6]), Job(keys(1), [7])]
    rig.tier.store(jobs[:1])
    assert waiting.acquire(timeout=WAIT_S)
    answers: list[object] = []

    def ask() -> None:
        rig.tier.delete(keys(2))
        answers.append(rig.tier.exists(keys(4)))
        rig.tier.load(jobs[1:2])
        rig.tier.store(jobs[2:])
        answers.append(rig.tier.stats()["engine_objects"])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(WAIT_S / 2)
    returned = list(answers)
    going.set()
    assert returned == [[False, False, True, True], 2]
    rig.tier.drain(WAIT_S)
    assert [job.outcomes for job in jobs] == [[Outcome.DONE], [Outcome.MISSING], [Outcome.DONE]]


@pytest.mark.parametrize("works", [True, False])
def test_a_store_beside_one_of_the_same_key_ends_with_it(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """It does not count as stored before it is, and is stored if the other one fails."""
    rig = make_rig()
    going, call, began, failures = threading.Event(), object_file.write_ranges, threading.Event(), [] if works else [1]

    def waiting(ranges: list[Any]) -> list[int]:
        began.set()
        assert going.wait(WAIT_S)
        if failures:
            failures.pop()
            return [errno.EIO] * len(ranges)
        return call(ranges)

    monkeypatch.setattr(object_file, "write_ranges", waiting)
    for block in (0, 1):
        rig.rows[block] = rig.content(b"key-0")
    jobs = [Job(keys(1), [0]), Job(keys(1), [1])]
    rig.tier.store(jobs[:1])
    assert began.wait(WAIT_S)
    rig.tier.store(jobs[1:])
    time.sleep(0.05)
    assert jobs[1].outcomes == [None]
    going.set()
    rig.tier.drain(WAIT_S)
    assert [job.outcomes for job in jobs] == [[Outcome.DONE if works else Outcome.FAILED], [Outcome.DONE]]
    assert rig.tier.stats()["engine_objects"] == 1
    job = rig.load(keys(1))
    assert job.done
    assert rig.wrong(job) == []


def test_a_root_rests_at_the_third_failed_sector_in_a_row() -> None:
    sector = OSError(errno.EIO, "a sector")
    one = health.Health("reading")
    for _ in range(3):
        for _ in range(2):
            one.failed(sector)
        assert not one.resting
        one.worked()
    for resting in (False, False, True):
        one.failed(sector)
        assert one.resting == resting
    other = health.Health("writing")
    other.failed(OSError(errno.ENOSPC, "full"))
    assert other.resting


def test_what_is_cleared_is_gone_for_the_next_process_at_once(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(5))
    rig.tier.clear()
    assert objects(tmp_path) == []


def test_what_could_not_be_recorded_is_not_there_after_a_crash(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    write = Slab.write_records

    def torn(*given: Any) -> None:
        write(*given)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Slab, "write_records", torn)
    assert rig.store(keys(2)).outcomes == [Outcome.FAILED] * 2
    assert objects(tmp_path) == []


def test_a_closed_engine_looks_at_nothing_more(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(3))
    rig.tier.engine.close(WAIT_S)
    former = tmp_path / "root" / f"{7:010d}-4096"
    former.mkdir()
    (former / ("1" * 32)).touch()
    next((tmp_path / "root").glob("*.table")).unlink()
    folder = Folder(tmp_path / "root", 1 << 30)
    recovery.recover(folder, lambda: True)
    assert len(folder) == 0
    assert len(list(former.iterdir())) == 1
    recovery.recover(folder, lambda: False)
    assert len(folder) == 3
    assert not former.exists()
    folder.close()


def test_another_thread_may_end_a_read_before_the_one_that_queued_its_next_stage_goes_on(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.store(keys(4))
    [root] = rig.tier.engine.roots  # type: ignore[attr-defined]

    def at_once(readings: Any) -> bool:
        root._read(list(readings))
        return True

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(root, "_queue_again", at_once)
    job = Job(keys(4), range(10, 14), layerwise=True)
    rig.tier.load([job])
    rig.tier.drain(WAIT_S)
    assert job.outcomes == [Outcome.DONE] * 4
    assert rig.wrong(job) == []
    rig.tier.close(WAIT_S)
    rig.tier.engine.close(WAIT_S)
    assert raised == []


def test_an_engine_that_is_closed_between_two_layers_lets_go(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.store(keys(1))
    [root] = rig.tier.engine.roots  # type: ignore[attr-defined]
    queue_again = root._queue_again

    def behind_a_close(readings: Any) -> bool:
        threading.Thread(target=rig.tier.engine.close, args=[WAIT_S]).start()
        until(lambda: root._closed)
        return bool(queue_again(readings))

    monkeypatch.setattr(root, "_queue_again", behind_a_close)
    job = Job(keys(1), [10], layerwise=True, timeout_s=WAIT_S)
    rig.tier.load([job])
    rig.tier.drain(WAIT_S / 4)
    assert job.outcomes == [Outcome.DROPPED]
    rig.close()
    rig.pool.close()


def test_what_is_deleted_behind_a_close_stays_deleted(make_rig: MakeRig) -> None:
    """By a thread that ends: it has found an object damaged."""
    rig = make_rig()
    rig.store(keys(3))
    [root] = rig.tier.engine.roots  # type: ignore[attr-defined]
    assert root.close(Deadline(WAIT_S))
    root.delete([rig.tier.format.name_of(keys(3)[1])])
    rig = make_rig()
    wait_for_recovery(rig.tier.engine)
    assert rig.tier.exists(keys(3)) == [True, False, True]


@pytest.mark.parametrize("threads", [1, 3])
def test_what_was_asked_for_first_is_read_first(tmp_path: Path, threads: int) -> None:
    """All layers of it: it would be there last of all, if the first layers of others came before its second ones."""
    go_on, order, seen = threading.Event(), list[tuple[int, int]](), threading.Lock()

    class Watched:
        def __init__(self, item: Any, number: int) -> None:
            self._item, self._number = item, number

        def __getattr__(self, name: str) -> Any:
            return getattr(self._item, name)

        def arrived(self, stage: int) -> bool:
            go_on.wait(WAIT_S)
            with seen:
                order.append((self._number, stage))
            return bool(self._item.arrived(stage))

    engine = FilesEngine({tmp_path: 1 << 30}, threads_per_root=threads)
    engine.roots[0].most_batched = 1
    rig = Rig(engine, num_blocks=40)
    rig.store(keys(12))
    read, calls = engine.read, itertools.count()

    def watched(items: Any) -> None:
        number = next(calls)
        read([Watched(item, number) for item in items])  # type: ignore[misc]

    engine.read = watched  # type: ignore[method-assign]
    jobs = [Job(keys(12)[first : first + 4], range(20 + first, 24 + first), layerwise=True) for first in (0, 4, 8)]
    for job in jobs:
        rig.tier.load([job])
    go_on.set()
    rig.tier.drain(WAIT_S)
    assert all(job.done and rig.wrong(job) == [] for job in jobs)
    [root] = engine.roots
    assert (len(root._calls), root._num_reads) == (0, 0)
    stages = len(order) // 12
    assert stages > 1
    assert sorted(order) == [(number, stage) for number in range(3) for stage in range(stages) for _ in range(4)]
    if threads == 1:
        assert order == sorted(order)
    rig.close()
    engine.close(WAIT_S)


def test_behind_a_read_that_hangs_others_are_read_together_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of one object each."""
    engine = FilesEngine({tmp_path: 1 << 30}, threads_per_root=2)
    rig = Rig(engine, num_blocks=60)
    rig.store(keys(40))
    [root] = engine.roots
    hangs, read, batches = threading.Event(), object_file.read_ranges, list[int]()

    def slow(ranges: Any) -> Any:
        batches.append(len(ranges))
        if len(batches) <= 2:  # one for each thread; the second one goes on when all is queued
            hangs.wait(WAIT_S) if len(batches) == 1 else queued.wait(WAIT_S)
        return read(ranges)

    queued = threading.Event()
    monkeypatch.setattr(object_file, "read_ranges", slow)
    jobs = [Job([key], [20 + number]) for number, key in enumerate(keys(40))]
    for number, job in enumerate(jobs):
        rig.tier.load([job])
        until(lambda number=number: len(batches) > min(1, number))  # type: ignore[misc]
    queued.set()
    until(lambda: sum(job.over for job in jobs) >= 39)
    assert (len(root._calls), root._num_reads, sum(job.over for job in jobs)) == (0, 0, 39)
    assert max(batches) > 8  # and not one by one
    hangs.set()
    rig.tier.drain(WAIT_S)
    assert all(job.done and rig.wrong(job) == [] for job in jobs)
    rig.close()
    engine.close(WAIT_S)


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_the_threads_live_whatever_is_raised_in_them(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def broken(*given: object) -> Any:
        raise kind("of an item")

    rig = make_rig()
    rig.store(keys(2))
    [root] = rig.tier.engine.roots  # type: ignore[attr-defined]
    for part in ("_wanted", "_begin"):
        with monkeypatch.context() as patch:
            patch.setattr(root, part, broken)
            assert not (rig.store(keys(2, "new")) if part == "_wanted" else rig.load(keys(2))).done
    assert rig.store(keys(2, "later")).done
    assert rig.load(keys(2)).done
    assert {record.getMessage() for record in caplog.records} == {"an error in a thread of the engine files"}
    assert all(thread.is_alive() for thread in root._threads if thread is not root.recovery)
