"""Which blocks go to storage and when; and that nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paddle_kv import ClosedError, DeviceCache, LayerwiseScheduler, LeasedError, TransferError
from paddle_kv.testing.tiers.rig import ALIGNED, WAIT_S, Rig, keys
from paddle_kv.tiers import FilesEngine, Outcome, Saver, Write


class Stuck(FilesEngine):
    """A disk that does not answer until it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__({folder: 1 << 30})
        self.answers = threading.Event()
        self.answers.set()
        self.num_writes = 0

    def write(self, items: Sequence[Write]) -> None:
        self.num_writes += len(items)
        super().write([_Stuck(item, self.answers) for item in items])  # type: ignore[misc]


class _Stuck:
    def __init__(self, item: Any, answers: threading.Event) -> None:
        self._item, self._answers = item, answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def buffers(self) -> Any:
        self._answers.wait(WAIT_S)
        return self._item.buffers()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(Stuck(tmp_path), num_blocks=12, max_store_bytes=4 * 53248)
    made.pool.allocate(12)
    for block_id, key in enumerate(keys(12)):
        made.rows[block_id] = made.content(key)
    yield made
    made.tier.engine.answers.set()  # type: ignore[attr-defined]
    made.close()
    made.tier.engine.close(WAIT_S)


def stored(rig: Rig) -> list[bool]:
    """Which of the first three keys are in the tier now."""
    rig.tier.drain(WAIT_S)
    return rig.tier.exists(keys(3))


def test_write_through(rig: Rig) -> None:
    saver = Saver(rig.tier, "write_through")
    saver.saved(keys(2), [0, 1])
    assert stored(rig) == [True, True, False]
    assert saver.saved(keys(2), [0, 1]) is None  # there already
    assert saver.used(keys(3), [0, 1, 2]) is None
    assert saver.evicting(keys(3), [0, 1, 2]) is None
    assert stored(rig) == [True, True, False]
    job = rig.load(keys(2), [8, 9])
    assert job.done
    assert rig.wrong(job) == []


def test_nth_use(rig: Rig) -> None:
    assert Saver(rig.tier, "nth_use").uses == 2
    saver = Saver(rig.tier, "nth_use", uses=3)
    saver.saved(keys(2), [0, 1])
    saver.used(keys(1), [0])
    assert stored(rig) == [False, False, False]
    job = saver.used(keys(2), [0, 1])
    assert job is not None
    assert job.keys == keys(1)
    assert stored(rig) == [True, False, False]
    assert saver.used(keys(3), [0, 1, 2]) is not None
    assert stored(rig) == [True, True, False]


def test_few_uses_are_remembered(rig: Rig) -> None:
    saver = Saver(rig.tier, "nth_use", uses=2, most_counted=2)
    saver.saved(keys(3), [0, 1, 2])
    saver.used(keys(3), [0, 1, 2])
    assert stored(rig) == [False] * 3  # each was forgotten before it came again
    saver.used(keys(1), [0])
    saver.used(keys(1), [0])
    assert stored(rig) == [True, False, False]


@pytest.mark.parametrize("when", ["write_back", "exclusive"])
def test_what_leaves_host_memory(rig: Rig, when: Any) -> None:
    saver = Saver(rig.tier, when)
    assert saver.saved(keys(3), [0, 1, 2]) is None
    assert saver.used(keys(3), [0, 1, 2]) is None
    assert stored(rig) == [False] * 3
    saver.evicting(keys(2), [0, 1])
    assert stored(rig) == [True, True, False]
    saver.loaded(keys(1))
    assert stored(rig) == [when == "write_back", True, False]


def test_a_freed_block_is_given_out_when_it_is_stored(rig: Rig) -> None:
    engine: Any = rig.tier.engine
    engine.answers.clear()
    job = Saver(rig.tier, "write_back").evicting(keys(2), [0, 1])
    assert job is not None
    rig.pool.free([0, 1, 2])
    assert rig.pool.allocate(1) == [2]
    assert rig.pool.num_free_blocks == 0
    scheduler = LayerwiseScheduler(DeviceCache(ALIGNED, 2, "cpu"), rig.pool)
    with pytest.raises(LeasedError):
        scheduler.offload([0], [1])
    engine.answers.set()
    rig.tier.drain(WAIT_S)
    assert job.over
    assert rig.pool.num_free_blocks == 2
    loaded = rig.load(keys(2), [8, 9])
    assert loaded.done
    assert rig.wrong(loaded) == []
    scheduler.close(WAIT_S)


def test_a_full_queue_drops_and_nobody_waits(rig: Rig) -> None:
    engine: Any = rig.tier.engine
    engine.answers.clear()
    job = Saver(rig.tier, "write_through").saved(keys(7), range(7))
    assert job is not None
    assert job.outcomes[4:] == [Outcome.DROPPED] * 3
    assert engine.num_writes == 4
    assert rig.tier.stats()["store_dropped"] == 3
    engine.answers.set()
    rig.tier.drain(WAIT_S)
    assert rig.tier.exists(keys(7)) == [True] * 4 + [False] * 3
    assert rig.pool.domain.busy(range(12)) == []


def test_blocks_that_somebody_writes_are_not_stored(rig: Rig) -> None:
    saver = Saver(rig.tier, "write_through")
    scheduler = LayerwiseScheduler(DeviceCache(ALIGNED, 2, "cpu"), rig.pool)
    save = scheduler.offload([0], [1], layerwise=True)
    assert saver.saved(keys(3), [0, 1, 2]) is None
    save.cancel()
    save.wait_over(WAIT_S)
    with pytest.raises(TransferError, match="holds no usable data"):
        saver.saved(keys(3), [0, 1, 2])
    assert stored(rig) == [False] * 3
    assert rig.pool.domain.busy(range(12)) == []
    scheduler.close(WAIT_S)


def test_a_closed_tier_leaves_no_lease(rig: Rig) -> None:
    saver = Saver(rig.tier, "write_through")
    rig.close()
    with pytest.raises(RuntimeError, match="closed"):
        saver.saved(keys(1), [0])
    assert rig.pool.domain.busy(range(12)) == []


def test_uses_longest_ago_are_forgotten(rig: Rig) -> None:
    saver = Saver(rig.tier, "nth_use", uses=3, most_counted=2)
    for key in (0, 1, 0, 2):  # the third one makes room: the second goes
        saver.used([keys(3)[key]], [key])
    saver.used(keys(1), [0])
    assert stored(rig) == [True, False, False]


@pytest.mark.parametrize("when", ["write_through", "nth_use"])
def test_wrong_blocks_are_named(rig: Rig, when: Any) -> None:
    saver = Saver(rig.tier, when, uses=1)
    for ids, error, text in (
        ([12], IndexError, r"block_ids\[0\] = 12"),
        ([1, 2], ValueError, "keys has 1 entries, block_ids has 2"),
        ([], ValueError, "keys has 1 entries, block_ids has 0"),
    ):
        with pytest.raises(error, match=text):
            saver.saved(keys(1), ids)
    assert rig.pool.domain.busy(range(12)) == []
    with pytest.raises(TypeError, match="timeout_s is None"):
        Saver(rig.tier, when, timeout_s=None)  # type: ignore[arg-type]
    assert saver.saved(keys(1), [0]) is not None


def test_who_waits_for_a_block_is_told_when_it_is_stored(rig: Rig) -> None:
    engine: Any = rig.tier.engine
    engine.answers.clear()
    assert Saver(rig.tier, "write_through").saved(keys(1), [0]) is not None
    got: list[bool] = []

    def wait() -> None:
        with rig.pool.lease([0], write=True, timeout_s=WAIT_S):
            got.append(True)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert not got
    engine.answers.set()
    waiting.join(WAIT_S / 2)
    assert got


def test_a_store_that_fails_holds_blocks_only_while_it_runs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = rig.tier.engine
    saver = Saver(rig.tier, "write_through", timeout_s=7.0)

    def fail() -> None:
        raise RuntimeError("not begun")

    with monkeypatch.context() as patch:
        patch.setattr(rig.tier._deadlines, "start", fail)
        with pytest.raises(RuntimeError, match="not begun"):
            saver.saved(keys(1), [0])
    assert rig.pool.domain.busy(range(12)) == []

    lent: list[Write] = []

    def fail_later(items: Sequence[Write]) -> None:
        lent.extend(items[:1])
        assert items[0].buffers() is not None
        raise RuntimeError("begun")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "write", fail_later)
        job = saver.saved(keys(2), [0, 1])
    assert job is not None
    assert job.outcomes == [Outcome.FAILED] * 2
    assert job.timeout_s == 7.0
    assert rig.pool.domain.busy(range(12)) == [0, 1]  # the engine has an address of them
    assert rig.tier.stats()["store_failed"] == 2
    lent[0].ended(Outcome.DONE)
    rig.tier.drain(WAIT_S)
    assert rig.pool.domain.busy(range(12)) == []


def test_a_tier_that_is_closed_is_no_error_of_its_engine(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver(rig.tier, "write_through")
    rig.tier.close(WAIT_S)
    with pytest.raises(ClosedError, match="the tier is closed"):
        saver.saved(keys(1), [0])
    assert rig.pool.domain.busy(range(12)) == []
    assert not caplog.records


def test_bad_policies(rig: Rig) -> None:
    with pytest.raises(ValueError, match=r"^when = 'later' must be one of write_through, write_back, nth_use"):
        Saver(rig.tier, "later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="uses = 0"):
        Saver(rig.tier, "nth_use", uses=0)
