"""What goes wrong in a folder of the engine "nixl"."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.errors import TierError
from paddle_kv.testing.tiers.rig import ALIGNED, ODD, WAIT_S, Rig, keys
from paddle_kv.tiers import Job, Outcome, at_exit, health, nixl
from paddle_kv.tiers.nixl import NixlEngine

pytest.importorskip("nixl", reason="nixl is not installed: pip install --no-deps nixl nixl-cu12")

CAPACITY_BYTES = 16 << 20


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    engine = NixlEngine(tmp_path, CAPACITY_BYTES, threads=1, objects_per_call=8)
    made = Rig(engine)
    yield made
    made.tier.drain(WAIT_S)
    assert _descriptors(tmp_path) == 0
    made.close()
    engine.close(WAIT_S)


def _descriptors(folder: Path) -> int:
    """Of objects that are open."""
    found = 0
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = Path(f"/proc/self/fd/{one}").readlink()
            found += target.parent == folder and target.name != "lock"
    return found


def test_a_folder_has_one_engine(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(TierError, match="used by another"):
        NixlEngine(tmp_path, CAPACITY_BYTES)


def test_it_is_closed_before_the_interpreter_goes(rig: Rig) -> None:
    assert rig.tier.engine in at_exit.engines


def test_what_is_cleared_is_gone(rig: Rig, tmp_path: Path) -> None:
    rig.store(keys(4))
    rig.tier.clear()
    assert rig.tier.exists(keys(4)) == [False] * 4
    assert rig.tier.engine.stats()["used_bytes"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert rig.store(keys(4)).done


def test_what_a_crash_left_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "_7").write_bytes(bytes(5000))
    (tmp_path / "somebody's").write_bytes(b"")
    with NixlEngine(tmp_path, CAPACITY_BYTES) as engine:
        assert engine.stats()["objects"] == engine.stats()["used_bytes"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "somebody's"]


@pytest.mark.parametrize("size", [0, 4096, 53247, 60000])
def test_an_object_of_another_size_is_damaged_and_the_others_come(rig: Rig, tmp_path: Path, size: int) -> None:
    rig.store(keys(4))
    os.truncate(tmp_path / rig.tier.format.name_of(b"key-2").hex(), size)
    for _ in range(2):
        load = rig.load(keys(4))
        assert [one is Outcome.DONE for one in load.outcomes] == [True, True, False, True]
        assert rig.wrong(load) == []
    assert rig.tier.exists(keys(4)) == [True, True, False, True]
    assert rig.store(keys(4)).done
    assert rig.load(keys(4)).done


def test_a_file_that_somebody_removed_is_a_miss(rig: Rig, tmp_path: Path) -> None:
    rig.store(keys(2))
    (tmp_path / rig.tier.format.name_of(b"key-1").hex()).unlink()
    assert rig.load(keys(2)).outcomes == [Outcome.DONE, Outcome.MISSING]
    assert rig.tier.exists(keys(2)) == [True, False]


@pytest.mark.parametrize("kind", [OSError, SystemExit])
@pytest.mark.parametrize("way", ["WRITE", "READ"])
def test_an_error_leaves_nothing_behind_and_the_engine_rests(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, kind: type[BaseException]
) -> None:
    monkeypatch.setattr(health, "FIRST_REST_S", 60.0)
    rig.store(keys(2))
    used = rig.tier.stats()["engine_used_bytes"]
    move = nixl._Agent.move

    def broken(agent: Any, wanted: str, moves: Any) -> None:
        if wanted == way:
            raise kind("the disk is gone")
        move(agent, wanted, moves)

    monkeypatch.setattr(nixl._Agent, "move", broken)
    asked = rig.store(keys(3, "new")) if way == "WRITE" else rig.load(keys(2))
    assert set(asked.outcomes) == {Outcome.FAILED}
    assert rig.tier.stats()["engine_resting_roots"]
    monkeypatch.setattr(nixl._Agent, "move", move)
    again = rig.store(keys(3, "new")) if way == "WRITE" else rig.load(keys(2))
    assert set(again.outcomes) == {Outcome.DROPPED}
    assert rig.tier.stats()["engine_used_bytes"] == used
    assert rig.tier.exists(keys(2)) == [way == "WRITE"] * 2
    assert len(list(tmp_path.iterdir())) == 3
    rig.tier.engine.reads = rig.tier.engine.writes = nixl.Health("disk")
    assert rig.load(keys(2)).done


def test_a_short_read_is_an_error_of_nixl(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(keys(2))
    path = tmp_path / rig.tier.format.name_of(b"key-1").hex()
    size = path.stat().st_size
    monkeypatch.setattr(nixl.os, "fstat", lambda descriptor: os.stat_result([0] * 6 + [size] + [0] * 3))
    os.truncate(path, 8192)
    load = rig.load(keys(2))
    assert rig.wrong(load) == []
    assert load.outcomes[1] in (Outcome.FAILED, Outcome.DAMAGED)


def test_the_same_object_several_times_is_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for block_id in range(3):
        rig.rows[block_id] = rig.content(b"key")
    rig.tier.store([Job([b"key"] * 3, range(3))])
    rig.tier.drain(WAIT_S)
    assert rig.tier.stats()["engine_used_bytes"] == rig.tier.format.object_bytes
    moved: list[Any] = []
    monkeypatch.setattr(nixl._Agent, "move", lambda agent, way, moves: moved.extend(moves))
    assert rig.store([b"key"]).done
    assert moved == []


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    with NixlEngine(tmp_path, 3 * 53248) as engine:
        rig = Rig(engine)
        for key in keys(3):
            rig.store([key])
        assert rig.load(keys(1)).done
        rig.store([b"new"])
        assert rig.tier.exists([*keys(3), b"new"]) == [True, False, True, True]
        rig.close()


def test_a_transfer_that_hangs_holds_nobody_up_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NixlEngine(tmp_path, CAPACITY_BYTES)
    rig = Rig(engine, ODD)
    rig.store(keys(2))
    gate, begun, move = threading.Event(), threading.Event(), nixl._Agent.move

    def hanging(*arguments: Any) -> None:
        begun.set()
        gate.wait()
        move(*arguments)

    monkeypatch.setattr(nixl._Agent, "move", hanging)
    load = Job(keys(2), [5, 6], timeout_s=2.0)
    rig.tier.load([load])
    assert begun.wait(WAIT_S)
    while not load.settled:
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        rig.tier.drain(0.2)
    rig.tier.close(0.1)
    with pytest.raises(TimeoutError):
        engine.close(0.1)
    assert set(load.outcomes) == {Outcome.LATE}
    assert not load.over
    gate.set()
    engine.close(WAIT_S)
    rig.close()
    assert load.over


def test_closing_drops_the_layers_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NixlEngine(tmp_path, CAPACITY_BYTES)
    rig = Rig(engine)
    rig.store(keys(2))
    gate, begun, move = threading.Event(), threading.Event(), nixl._Agent.move
    calls = []

    def hanging(*arguments: Any) -> None:
        calls.append(len(arguments[2]))
        begun.set()
        gate.wait()
        move(*arguments)

    monkeypatch.setattr(nixl._Agent, "move", hanging)
    load = Job(keys(2), [5, 6])
    rig.tier.load([load])
    assert begun.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        engine.close(0.1)
    gate.set()
    engine.close(WAIT_S)
    assert load.over
    assert set(load.outcomes) == {Outcome.DROPPED}
    assert sum(calls) == 2  # the first layer of both
    rig.close()


def test_direct_io_only_where_it_fits(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    move = nixl._Agent.move

    def looking(agent: Any, way: str, moves: Any) -> None:
        seen.extend(bool(_flags(opened.descriptor) & os.O_DIRECT) for opened, _ in moves)
        move(agent, way, moves)

    monkeypatch.setattr(nixl._Agent, "move", looking)
    assert rig.pool.spec is ALIGNED
    rig.store(keys(2))
    assert rig.load(keys(2)).done
    assert set(seen) == {True}


def _flags(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)
