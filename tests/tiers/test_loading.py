"""From storage to the device as one transfer: in order, held as long as anybody writes, and never half."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, DeviceCache, HostPool, LayerwiseScheduler, LeasedError, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule import arriving
from paddle_kv.testing.tiers.rig import ALIGNED, WAIT_S, Rig, keys
from paddle_kv.tiers import FilesEngine, Job, Outcome, Read, load
from paddle_kv.tracking.group import change
from tests.tiers.conftest import objects

LAYERS = ALIGNED.num_layers
SHORT_S = 0.05


class GatedEngine(FilesEngine):
    """Lets a stage arrive when it is told to; the thread that has read it waits."""

    def __init__(self, folder: Path) -> None:
        super().__init__({folder: 1 << 30}, threads_per_root=8)
        self.roots[0].most_batched = 1  # a thread for each object, so that each waits for itself
        self.gates = [threading.Event() for _ in range(3)]
        self.waiting = threading.Semaphore(0)  # one for each object of which the first bytes were read

    def read(self, items: Sequence[Read]) -> None:
        super().read([_Gated(item, self) for item in items])  # type: ignore[misc]

    def open_all(self) -> None:
        for gate in self.gates:
            gate.set()


class _Gated:
    def __init__(self, item: Any, engine: GatedEngine) -> None:
        self._item, self._engine = item, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def arrived(self, stage: int) -> bool:
        self._engine.waiting.release()
        self._engine.gates[stage].wait(WAIT_S)
        return bool(self._item.arrived(stage))


class Way:
    """Objects in files, a pool of 24 blocks of which 0..7 are ours, a device cache."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.engine = GatedEngine(folder)
        self.rig = Rig(self.engine, num_blocks=24)
        self.pool, self.tier = self.rig.pool, self.rig.tier
        self.cache = DeviceCache(ALIGNED, 24, "cpu")
        self.scheduler = LayerwiseScheduler(self.cache, self.pool, **options)
        self.keys = keys(4)
        assert self.rig.store(self.keys, range(20, 24)).done
        self.ids = self.pool.allocate(8)

    def load(self, timeout_s: float = WAIT_S) -> tuple[Any, Job]:
        return load(self.tier, self.scheduler, self.keys, self.ids[:4], [9, 3, 7, 1], timeout_s=timeout_s)

    def on_device(self, block_id: int, layers: range) -> np.ndarray:
        parts = [
            self.cache.tensor(name, layer)[block_id].numpy().tobytes()
            for layer in layers
            for name in ALIGNED.tensor_names
        ]
        return np.frombuffer(b"".join(parts), np.uint8)

    def is_on_device(self, layers: range, targets: Sequence[int] = (9, 3, 7, 1)) -> bool:
        step = ALIGNED.block_bytes
        part = slice(layers.start * step, layers.stop * step)
        return all(
            np.array_equal(self.on_device(target, layers), self.rig.content(key)[part])
            for key, target in zip(self.keys, targets, strict=True)
        )

    def close(self) -> None:
        self.engine.open_all()
        self.scheduler.close(WAIT_S)
        self.rig.close()
        self.engine.close(WAIT_S)
        self.pool.close()


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Way]:
    made = Way(tmp_path / "root")
    yield made
    made.close()


def test_layers_reach_the_device_as_they_arrive(way: Way) -> None:
    transfer, job = way.load()
    with pytest.raises(TimeoutError, match="still being read into host memory"):
        transfer.wait_layer(0, timeout_s=SHORT_S)
    for stage, layers in enumerate([range(0, 2), range(2, 4), range(4, 6)]):
        way.engine.gates[stage].set()
        for layer in layers:
            transfer.wait_layer(layer, timeout_s=WAIT_S)
        assert way.is_on_device(layers)
        if stage < 2:
            with pytest.raises(TimeoutError):
                transfer.wait_layer(layers.stop, timeout_s=SHORT_S)
            assert not transfer.done()
    transfer.wait(WAIT_S)
    assert job.done
    assert way.is_on_device(range(LAYERS))
    assert way.rig.wrong(job) == []
    way.scheduler.onload(way.ids[:4], [10, 11, 12, 13]).wait(WAIT_S)  # they are good in host memory too
    assert way.is_on_device(range(LAYERS), [10, 11, 12, 13])


def test_layers_that_share_an_event(tmp_path: Path) -> None:
    way = Way(tmp_path / "root", layers_per_event=4)
    transfer, _ = way.load()
    way.engine.gates[0].set()
    with pytest.raises(TimeoutError):
        transfer.wait_layer(0, timeout_s=SHORT_S)
    way.engine.open_all()
    transfer.wait(WAIT_S)
    assert way.is_on_device(range(LAYERS))
    way.close()


def test_a_load_of_the_same_host_blocks_follows(way: Way) -> None:
    _transfer, _ = way.load()
    second = way.scheduler.onload(way.ids[:4], [10, 11, 12, 13])
    with pytest.raises(TimeoutError):
        second.wait_layer(0, timeout_s=SHORT_S)
    way.engine.gates[0].set()
    second.wait_layer(1, timeout_s=WAIT_S)
    assert way.is_on_device(range(2), [10, 11, 12, 13])
    with pytest.raises(TimeoutError):
        second.wait_layer(2, timeout_s=SHORT_S)
    way.engine.open_all()
    second.wait(WAIT_S)
    assert way.is_on_device(range(LAYERS), [10, 11, 12, 13])


def test_it_does_not_write_over_what_is_being_saved(way: Way) -> None:
    save = way.scheduler.offload([9], [way.ids[6]], layerwise=True)
    transfer, _ = way.load()
    way.engine.open_all()
    with pytest.raises(TimeoutError):
        transfer.wait_layer(0, timeout_s=SHORT_S)
    for layer in range(LAYERS):
        save.mark_layer_written(layer)
    transfer.wait(WAIT_S)
    assert way.is_on_device(range(LAYERS))


@pytest.mark.parametrize("damaged", [False, True])
def test_what_does_not_come_is_poisoned_on_both_sides_and_the_rest_is_good(
    way: Way, tmp_path: Path, damaged: bool
) -> None:
    name = way.tier.format.name_of(way.keys[2])
    [mine] = [one for one in objects(tmp_path) if one.name == name]
    if damaged:
        mine.write(mine.read()[:-1] + bytes([way.rig.content(way.keys[2])[-1] ^ 1]))
    else:
        mine.write(next(one for one in objects(tmp_path) if one.name != name).read())  # the slot is another one's
    way.engine.open_all()
    transfer, job = way.load()
    with pytest.raises(
        TransferError, match=r"1 of 4 blocks did not come from the tier: 1 (missing|damaged)$"
    ) as caught:
        transfer.wait(WAIT_S)
    assert caught.value.block_ids == [7]
    assert job.outcomes.count(Outcome.DONE) == 3
    with pytest.raises(TransferError):
        transfer.wait_layer(0)
    assert transfer.failed and transfer.state.value == "failed"
    assert way.scheduler.stats()["failed"] == 1
    with pytest.raises(TransferError, match="holds no usable data"):
        way.scheduler.onload(way.ids[2:3], [10])
    with pytest.raises(TransferError, match="holds no usable data"):
        way.scheduler.offload([7], way.ids[7:])
    good = [0, 1, 3]
    for number, block in zip(good, [9, 3, 1], strict=True):
        assert np.array_equal(way.on_device(block, range(LAYERS)), way.rig.content(way.keys[number]))
    way.scheduler.onload([way.ids[i] for i in good], [10, 11, 12]).wait(WAIT_S)
    assert np.array_equal(way.on_device(11, range(LAYERS)), way.rig.content(way.keys[1]))
    way.scheduler.offload([9], way.ids[7:]).wait(WAIT_S)
    assert not way.tier.exists([way.keys[2]])[0]
    assert way.rig.store([way.keys[2]], [22]).done
    way.load()[0].wait(WAIT_S)  # and makes both sides usable again
    way.scheduler.onload(way.ids[:4], [10, 11, 12, 13]).wait(WAIT_S)
    assert way.is_on_device(range(LAYERS), [10, 11, 12, 13])


def test_who_reads_what_does_not_come_fails_too(way: Way, tmp_path: Path) -> None:
    name = way.tier.format.name_of(way.keys[2])
    next(one for one in objects(tmp_path) if one.name == name).write(bytes(4096))
    _transfer, job = way.load()
    second = way.scheduler.onload([*way.ids[:4], 20], [10, 11, 12, 13, 14])
    third = way.scheduler.onload(way.ids[3:4], [15])  # nothing of what does not come
    save = way.scheduler.offload([7, 20], way.ids[6:8])  # of what the load brings; a save moves all or nothing
    way.engine.open_all()
    for one, lost in ((second, [12]), (save, way.ids[6:8])):
        with pytest.raises(TransferError, match="reads blocks of a transfer that failed") as caught:
            one.wait(WAIT_S)
        assert caught.value.block_ids == lost
    with pytest.raises(TransferError, match=r"holds no usable data \(1 of 4 blocks did not come"):  # the first reason
        way.scheduler.onload(way.ids[7:8], [16])
    third.wait(WAIT_S)
    assert not third.failed
    for number, block in ((0, 10), (1, 11), (3, 13), (3, 15)):
        assert np.array_equal(way.on_device(block, range(LAYERS)), way.rig.content(way.keys[number]))
    assert np.array_equal(way.on_device(14, range(LAYERS)), way.rig.rows[20])
    assert job.outcomes.count(Outcome.DONE) == 3


def test_who_waits_hears_at_once_of_what_does_not_come(way: Way) -> None:
    """Also where no layer can move yet: a save of a target is not marked."""
    save = way.scheduler.offload([9], way.ids[6:7], layerwise=True)
    way.tier.delete(way.keys[2:3])
    transfer, _ = way.load()
    heard: list[TransferError] = []

    def wait() -> None:
        try:
            transfer.wait_layer(0, timeout_s=WAIT_S)
        except TransferError as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not transfer._movement.layer_waiters:
        threading.Event().wait(0.001)
    way.engine.open_all()
    thread.join(WAIT_S / 2)
    assert not thread.is_alive() and len(heard) == 1
    assert heard[0].block_ids == [7]
    save.cancel()
    transfer.wait_over(WAIT_S)


def test_nothing_comes(way: Way) -> None:
    way.tier.delete(way.keys)
    way.engine.open_all()
    before = way.on_device(9, range(LAYERS))
    transfer, _ = way.load()
    with pytest.raises(TransferError, match="4 of 4 blocks did not come from the tier: 4 missing") as caught:
        transfer.wait(WAIT_S)
    assert caught.value.block_ids == [9, 3, 7, 1]
    assert np.array_equal(way.on_device(9, range(LAYERS)), before)  # nothing has moved


@pytest.mark.parametrize("how", ["cancel", "late"])
def test_blocks_are_held_until_nobody_writes_them(way: Way, how: str) -> None:
    transfer, job = way.load(timeout_s=WAIT_S if how == "cancel" else 1.5)
    assert all(way.engine.waiting.acquire(timeout=WAIT_S) for _ in range(4))
    later = way.scheduler.offload([20], [way.ids[0]])  # writes a block that the storage still writes
    if how == "cancel":
        transfer.cancel()
        error: type[Exception] = CancelledError
    else:
        error = TransferError
        while not job.settled:
            threading.Event().wait(0.001)
    with pytest.raises(error):
        transfer.wait_layer(0, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        transfer.wait_over(SHORT_S)
    way.pool.free(way.ids[:4])
    assert way.pool.num_free_blocks == 16
    with pytest.raises(TimeoutError):
        later.wait(SHORT_S)
    way.engine.open_all()
    later.wait(WAIT_S)
    transfer.wait_over(WAIT_S)
    assert way.pool.num_free_blocks == 20
    assert job.over
    assert np.array_equal(way.rig.rows[way.ids[0]], way.on_device(20, range(LAYERS)))


def test_a_scheduler_closes_only_behind_the_storage(way: Way) -> None:
    transfer, _ = way.load()
    assert all(way.engine.waiting.acquire(timeout=WAIT_S) for _ in range(4))
    with pytest.raises(TimeoutError):
        way.scheduler.close(SHORT_S)
    with pytest.raises(CancelledError):
        transfer.wait_layer(0)
    way.engine.open_all()
    way.scheduler.close(WAIT_S)
    assert way.pool.domain.busy(range(24)) == []


def test_host_blocks_in_use_are_refused(way: Way) -> None:
    with way.pool.lease(way.ids[:1]), pytest.raises(LeasedError, match="is in use"):
        way.load()
    save = way.scheduler.offload([20], [way.ids[1]], layerwise=True)
    with pytest.raises(LeasedError, match=f"block {way.ids[1]} of the host pool is in use"):
        way.load()
    save.cancel()
    way.engine.open_all()
    save.wait_over(WAIT_S)
    way.load()[0].wait(WAIT_S)


def test_calls_that_make_no_sense(way: Way) -> None:
    other = HostPool(ALIGNED, 2)
    with LayerwiseScheduler(way.cache, other) as scheduler, pytest.raises(ValueError, match="different host pools"):
        load(way.tier, scheduler, way.keys, way.ids[:4], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="host_block_ids names block"):
        load(way.tier, way.scheduler, way.keys, [way.ids[0]] * 4, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="keys has 3 entries, block_ids has 4"):
        load(way.tier, way.scheduler, way.keys[:3], way.ids[:4], [1, 2, 3, 4])
    way.rig.close()
    with pytest.raises(RuntimeError, match="the tier is closed"):
        way.load()
    assert way.scheduler.in_flight() == []
    assert way.pool.domain.busy(range(24)) == []


def test_nothing_to_load(way: Way) -> None:
    transfer, job = load(way.tier, way.scheduler, [], [], [])
    transfer.wait(WAIT_S)
    assert job.done


def test_a_handle_that_is_dropped(way: Way) -> None:
    way.load()
    way.engine.open_all()
    way.scheduler.drain(WAIT_S)
    assert way.is_on_device(range(LAYERS))


def test_who_comes_behind_a_cancelled_load_is_behind_what_that_was_behind(way: Way) -> None:
    before = way.on_device(9, range(LAYERS))
    save = way.scheduler.offload([9], [way.ids[6]], layerwise=True)
    transfer, job = way.load()
    later = way.scheduler.onload([20], [9])
    transfer.cancel()
    assert job.cancelled
    way.engine.open_all()
    while not job.over:
        threading.Event().wait(0.001)
    with pytest.raises(TimeoutError):
        later.wait_layer(0, timeout_s=SHORT_S)
    for layer in range(LAYERS):
        save.mark_layer_written(layer)
    later.wait(WAIT_S)
    save.wait(WAIT_S)
    assert np.array_equal(way.rig.rows[way.ids[6]], before)
    assert np.array_equal(way.on_device(9, range(LAYERS)), way.rig.rows[20])


def test_a_checksum_of_what_was_there_before_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    way = Way(tmp_path / "root")
    way.engine.open_all()
    way.scheduler.offload([20], [way.ids[0]]).wait(WAIT_S)
    way.load()[0].wait(WAIT_S)
    way.scheduler.onload(way.ids[:1], [11]).wait(WAIT_S)
    assert np.array_equal(way.on_device(11, range(LAYERS)), way.rig.content(way.keys[0]))
    way.close()


def test_blocks_whose_transfer_has_ended_unheard_are_taken(tmp_path: Path) -> None:
    class Silent(CpuBackend):
        silent = True

        def watch(self, events: Any, report: Any) -> None:
            if not self.silent:
                super().watch(events, report)

    way = Way(tmp_path / "root", backend=(backend := Silent()))
    way.engine.open_all()
    save = way.scheduler.offload([20], [way.ids[1]])
    assert save._movement.last_event.wait(WAIT_S)
    backend.silent = False
    way.load()[0].wait(WAIT_S)
    assert way.is_on_device(range(LAYERS))
    way.close()


def test_what_is_lost_of_a_load_that_has_ended_or_failed_changes_nothing(way: Way) -> None:
    def lose(transfer: Any) -> None:
        change(way.pool.domain, functools.partial(arriving.lose, transfer._movement, way.ids[2:3], "lost"))

    cancelled, _ = way.load()
    assert all(way.engine.waiting.acquire(timeout=WAIT_S) for _ in range(4))
    cancelled.cancel()
    lose(cancelled)
    with pytest.raises(TransferError, match=r"holds no usable data \(onload was cancelled"):
        way.scheduler.onload(way.ids[2:3], [10])
    way.engine.open_all()
    cancelled.wait_over(WAIT_S)
    transfer, _ = way.load()
    transfer.wait(WAIT_S)
    lose(transfer)
    assert transfer.error is None
    way.scheduler.onload(way.ids[2:3], [10]).wait(WAIT_S)


def test_two_blocks_are_lost_one_behind_the_other(way: Way) -> None:
    transfer, _ = way.load()
    for block_id, why in ((way.ids[2], "the first"), (way.ids[0], "the second")):
        lose = functools.partial(arriving.lose, transfer._movement, [block_id], why)
        change(way.pool.domain, lose)
    way.engine.open_all()
    with pytest.raises(TransferError, match="the first") as caught:
        transfer.wait(WAIT_S)
    assert caught.value.block_ids == [9, 7]
    for block_id, why in ((way.ids[2], "the first"), (way.ids[0], "the second")):
        with pytest.raises(TransferError, match=rf"block {block_id} of the host pool holds no usable data \({why}"):
            way.scheduler.onload([block_id], [10])
    way.scheduler.onload([way.ids[1], way.ids[3]], [10, 11]).wait(WAIT_S)
