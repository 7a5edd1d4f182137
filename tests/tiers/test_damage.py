"""Whatever happens to an object's slot, its bytes are not served. PADDLE_KV_STRESS=10000 damages so many."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_kv import KVCacheSpec
from paddle_kv.testing.tiers.rig import ALIGNED, ODD, WAIT_S, Rig, keys
from paddle_kv.tiers import FilesEngine, Outcome, object_file, slab
from paddle_kv.tiers.slab import Slab
from tests.tiers.conftest import MakeRig, Stored, objects, wait_for_recovery

BATCH = 36
fallocate = slab._fallocate  # type: ignore[attr-defined]
NUM_DAMAGED = int(os.environ.get("PADDLE_KV_STRESS", "0")) or 4 * BATCH
Damage = Callable[[Stored, Stored, np.random.Generator], object]


def flip(low: float, high: float) -> Damage:
    """One bit of a byte that lies within these parts of the object."""

    def damage(mine: Stored, other: Stored, rng: np.random.Generator) -> None:
        content = bytearray(mine.read())
        content[int(rng.integers(int(low * len(content)), int(high * len(content))))] ^= 1 << int(rng.integers(8))
        mine.write(bytes(content))

    return damage


def truncate(mine: Stored, other: Stored, rng: np.random.Generator) -> None:
    """As a write that ended early, over zeros."""
    content = mine.read()
    mine.write(content[: int(rng.integers(len(content)))].ljust(len(content), b"\0"))


def older_rest(mine: Stored, other: Stored, rng: np.random.Generator) -> None:
    """As a write that ended early, over another object."""
    at = int(rng.integers(1, mine.size_bytes - 1))
    mine.write(mine.read()[:at] + other.read()[at:])


def shift(mine: Stored, other: Stored, rng: np.random.Generator) -> None:
    """All bytes one sector further."""
    mine.write((bytes(512) + mine.read())[: mine.size_bytes])


def swap(mine: Stored, other: Stored, rng: np.random.Generator) -> None:
    mine.write(other.read())


def swap_payload(mine: Stored, other: Stored, rng: np.random.Generator) -> None:
    mine.write(mine.read()[:4096] + other.read()[4096:])


def swap_layers(mine: Stored, other: Stored, rng: np.random.Generator) -> None:
    content, layer = mine.read(), (mine.size_bytes - 4096) // 6
    first, second = content[4096 : 4096 + layer], content[4096 + layer : 4096 + 2 * layer]
    mine.write(content[:4096] + second + first + content[4096 + 2 * layer :])


def empty(mine: Stored, other: Stored, rng: np.random.Generator) -> None:
    mine.write(bytes(mine.size_bytes))


KINDS = [
    flip(0, 200 / 53248),
    flip(184 / 53248, 0.07),
    flip(0.08, 1),
    truncate,
    older_rest,
    shift,
    swap,
    swap_payload,
    empty,
]


def damage_all(rig: Rig, found: list[Stored], names: list[bytes], rng: np.random.Generator) -> None:
    """The slot of each, by one of the kinds in turn, beside a few that stay as they are."""
    there = {one.name: one for one in found}
    mine = [there[rig.tier.format.name_of(name)] for name in names]
    healthy = mine.pop()
    for number, one in enumerate(mine):
        KINDS[number % len(KINDS)](one, healthy, rng)


@pytest.mark.parametrize("spec", [ALIGNED, ODD])
@pytest.mark.parametrize("layerwise", [True, False])
def test_all_damage_is_found(make_rig: MakeRig, tmp_path: Path, spec: KVCacheSpec, layerwise: bool) -> None:
    rig, rng = make_rig(spec), np.random.default_rng(int(layerwise))
    served, found = [], 0
    for batch in range(NUM_DAMAGED // (4 * BATCH)):
        names = keys(BATCH + 1, f"batch{batch}")
        assert rig.store(names).done
        damage_all(rig, objects(tmp_path), names, rng)
        job = rig.load(names, layerwise=layerwise)
        served += [name for name, outcome in zip(names[:-1], job.outcomes, strict=False) if outcome is Outcome.DONE]
        found += sum(outcome in (Outcome.DAMAGED, Outcome.MISSING) for outcome in job.outcomes)
        assert job.outcomes[-1] is Outcome.DONE
        assert rig.wrong(job) == []
        # It is not found again, and comes anew with the next store.
        assert rig.tier.exists(names) == [False] * BATCH + [True]
        assert rig.store(names).done
        assert rig.load(names).done
        rig.tier.delete(names)
    assert served == []
    assert found == NUM_DAMAGED // (4 * BATCH) * BATCH


def test_layers_in_another_order(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(1))
    [mine] = objects(tmp_path)
    swap_layers(mine, mine, np.random.default_rng(0))
    job = rig.load(keys(1))
    assert job.outcomes == [Outcome.DAMAGED]
    assert rig.tier.stats()["load_damaged"] == 1


def test_a_slab_that_is_too_short(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(6))
    found = objects(tmp_path)
    os.truncate(found[0].slab, 3 * found[0].slot_bytes + 5000)
    job = rig.load(keys(6))
    assert [outcome is Outcome.DONE for outcome in job.outcomes].count(True) == 3
    assert job.outcomes.count(Outcome.DAMAGED) == 3
    assert rig.wrong(job) == []
    assert rig.store(keys(6)).done
    assert rig.load(keys(6)).done


def test_an_object_under_the_name_of_another_spec(make_rig: MakeRig, tmp_path: Path) -> None:
    """As after a collision of names, which the header decides."""
    other = KVCacheSpec(num_layers=6, num_kv_heads=2, head_dim=64, block_size=16, dtype="float16")
    rig = make_rig(other)
    rig.store(keys(1))
    [theirs] = objects(tmp_path)
    content = theirs.read()
    rig = make_rig()
    rig.store(keys(1))
    objects(tmp_path)[1].write(content)
    assert rig.tier.exists(keys(1)) == [True]
    assert rig.load(keys(1)).outcomes == [Outcome.MISSING]
    assert rig.tier.exists(keys(1)) == [False]
    assert rig.tier.stats()["load_damaged"] == 0


# ---- tables ----
def test_a_record_that_is_wrong_is_looked_up_in_its_header(make_rig: MakeRig, tmp_path: Path) -> None:
    rig, rng = make_rig(), np.random.default_rng(1)
    rig.store(keys(30))
    found = objects(tmp_path)
    rig.tier.engine.close(10)
    table = found[0].slab.with_suffix(".table")
    content = bytearray(table.read_bytes())
    for one in found[:28]:  # bit by bit; the last of them holds nothing that could be right
        content[32 * (one.slot + 1) + int(rng.integers(32))] ^= 1 << int(rng.integers(8))
    content[32 * (found[27].slot + 1) : 32 * (found[27].slot + 2)] = bytes([7]) * 32
    record = found[26].name + (27).to_bytes(8, "little") + (53249).to_bytes(4, "little")  # right, and impossible
    content[32 * (found[26].slot + 1) : 32 * (found[26].slot + 2)] = record + zlib.crc32(record).to_bytes(4, "little")
    found[3].write(bytes(4096))  # nor is there a header
    table.write_bytes(content)
    rig = make_rig()
    wait_for_recovery(rig.tier.engine)  # type: ignore[arg-type]
    there = rig.tier.exists(keys(30))
    lost = {name for name, has in zip(keys(30), there, strict=True) if not has}
    assert {rig.tier.format.name_of(name) for name in lost} == {found[3].name}
    job = rig.load([name for name in keys(30) if name not in lost])
    assert job.done
    assert rig.wrong(job) == []
    assert rig.tier.stats()["engine_used_bytes"] == 29 * 53248
    assert [one.size_bytes for one in objects(tmp_path)] == [53248] * 29  # the records are right again
    assert rig.store(sorted(lost)).done


@pytest.mark.parametrize("what", ["gone", "short", "long", "magic", "version", "slots", "noise", "empty", "link"])
@pytest.mark.parametrize("spec", [ALIGNED, ODD])
def test_without_a_table_headers_tell(make_rig: MakeRig, tmp_path: Path, what: str, spec: KVCacheSpec) -> None:
    rig = make_rig(spec)
    rig.store(keys(12))
    rig.tier.delete(keys(2))
    rig.store(keys(1, "again"))  # where one of the deleted was
    rig.close()
    rig.tier.engine.close(10)
    [table] = (tmp_path / "root").glob("*.table")
    content = table.read_bytes()
    if what == "gone":
        table.unlink()
    elif what == "link":
        table.rename(tmp_path / "elsewhere")
        table.symlink_to(tmp_path / "elsewhere")
    else:
        at = {"magic": 0, "version": 8, "slots": 20}.get(what)
        if at is not None:
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        content = {"short": content[:-1], "long": content + b"\0", "empty": b"", "noise": os.urandom(len(content))}.get(
            what, content
        )
        table.write_bytes(content)
    rig = make_rig(spec)
    wait_for_recovery(rig.tier.engine)  # type: ignore[arg-type]
    assert rig.tier.exists([*keys(12)[2:], *keys(1, "again")]) == [True] * 11
    there = [name for name, has in zip(keys(12), rig.tier.exists(keys(12)), strict=True) if has]
    job = rig.load([*there, *keys(1, "again")])  # one that was deleted may be there again: its bytes are right
    assert job.done
    assert rig.wrong(job) == []
    assert not table.is_symlink()
    assert rig.store(keys(6, "new")).done
    rig = make_rig(spec)
    assert rig.load([*there, *keys(6, "new")]).done


def refuse_room() -> None:
    raise OSError(errno.EOPNOTSUPP, "no room ahead")


def without_tables(rig: Rig, folder: Path) -> None:
    rig.close()
    rig.tier.engine.close(10)
    for table in folder.rglob("*.table"):
        table.unlink()


def test_a_header_that_cannot_be_read_costs_its_object_alone(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.store(keys(6))
    without_tables(rig, tmp_path)
    bad = 2 * 53248

    def failing(descriptor: int, buffers: Any, offset: int, call: Any = os.preadv) -> int:
        if offset == bad:
            raise OSError(errno.EIO, "a bad sector")
        return int(call(descriptor, buffers, offset))

    monkeypatch.setattr(os, "preadv", failing)
    rig = make_rig()
    wait_for_recovery(rig.tier.engine)  # type: ignore[arg-type]
    assert sum(rig.tier.exists(keys(6))) == 5
    assert rig.tier.engine.roots[0].folder.unknown == []  # type: ignore[attr-defined]


def test_what_nobody_has_looked_at_is_cleared_too(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.store(keys(6))
    without_tables(rig, tmp_path)
    begun, go_on = threading.Event(), threading.Event()

    def held(descriptor: int, buffers: Any, offset: int, call: Any = os.preadv) -> int:
        if offset == 3 * 53248:  # the three behind it are known
            begun.set()
            assert go_on.wait(WAIT_S)
        return int(call(descriptor, buffers, offset))

    monkeypatch.setattr(os, "preadv", held)
    rig = make_rig()
    assert begun.wait(WAIT_S)
    clearing = threading.Thread(target=rig.tier.clear)
    clearing.start()
    go_on.set()
    clearing.join(WAIT_S)
    assert not clearing.is_alive()
    wait_for_recovery(rig.tier.engine)  # type: ignore[arg-type]
    assert rig.tier.exists(keys(6)) == [False] * 6
    assert rig.tier.stats()["engine_used_bytes"] == 0
    assert rig.store(keys(6, "new")).done
    assert make_rig().tier.exists(keys(6)) == [False] * 6


def test_slabs_of_two_folders_in_one(make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Rig(FilesEngine({tmp_path / "other": 64 << 20}), ODD, num_blocks=40)
    other.store(keys(6))
    other.close()
    other.tier.engine.close(10)
    rig = make_rig()
    rig.store(keys(6))
    rig.close()
    rig.tier.engine.close(10)
    for path in (tmp_path / "other").glob("0*"):
        shutil.copy(path, tmp_path / "root")
    rig = make_rig()
    assert "another slab has its number" in caplog.text
    engine: Any = rig.tier.engine
    assert len(engine.roots[0].folder) == 6
    assert rig.store(keys(20, "new")).done
    engine.delete(engine.roots[0].folder.names())
    assert engine.stats()["objects"] == engine.stats()["used_bytes"] == 0


def test_a_deletion_that_cannot_be_recorded_is_told(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.store(keys(6))

    def failing(slab: Slab, slots: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Slab, "clear_records", failing)
        rig.tier.delete(keys(2))
        rig.tier.engine.close(10)
    assert "what was deleted may be found again after a restart: [Errno 30] read-only" in caplog.text
    assert rig.tier.stats()["engine_errors"] == 1
    assert make_rig().tier.exists(keys(6)) == [True] * 6


def on_disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.slab"))


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("punches", [True, False])
def test_the_books_are_never_below_what_is_on_the_disk(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: bool, punches: bool
) -> None:
    """Whatever a start knows of the slots, and on a file system that makes no holes."""
    punch = Slab.punch

    def refused(one: Slab, slots: Any) -> None:
        if not punches:
            raise OSError(errno.EOPNOTSUPP, "no holes")
        punch(one, slots)

    monkeypatch.setattr(Slab, "punch", refused)
    monkeypatch.setattr(slab, "_fallocate", lambda *given: fallocate(*given) if given[1] else refuse_room())
    capacity_bytes = 40 * 53248
    rig = make_rig(capacity_bytes=capacity_bytes)
    rig.store(keys(20))
    rig.tier.delete(keys(10))
    if table:
        rig.close()
        rig.tier.engine.close(10)
    else:
        without_tables(rig, tmp_path)
    rig = make_rig(capacity_bytes=capacity_bytes)
    engine: Any = rig.tier.engine
    wait_for_recovery(engine)
    space = engine.roots[0].folder.space
    assert space.charged_bytes >= on_disk_bytes(tmp_path)
    for number in range(6):
        rig.store(keys(20, f"other{number}"))
        assert on_disk_bytes(tmp_path) <= space.charged_bytes <= capacity_bytes


@pytest.mark.parametrize("stuck", [False, True])
def test_what_is_cleared_is_not_there_after_a_restart_whatever_fails(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    rig = make_rig()
    rig.store(keys(6))

    def refused(path: str, **more: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(object_file, "write_table", lambda *_: errno.EMFILE)
        if stuck:
            patch.setattr(os, "unlink", refused)
            with pytest.raises(OSError, match="after a restart"):
                rig.tier.clear()
        else:
            rig.tier.clear()
    assert rig.tier.exists(keys(6)) == [False] * 6
    assert rig.tier.stats()["engine_used_bytes"] == 0
    restarted = make_rig()
    assert restarted.tier.exists(keys(6)) == [stuck] * 6
    assert restarted.store(keys(6, "new")).done
