"""PADDLE_KV_CHECKSUM=1: what was saved is what is loaded, or the load says which blocks are not."""

from __future__ import annotations

import json
import re
import weakref

import numpy as np
import pytest

from paddle_kv import CancelledError, HostPool, LayerwiseScheduler, TransferError
from paddle_kv.schedule import checksum
from tests.schedule.rig import WAIT_S, Rig, are_collected


@pytest.fixture(autouse=True)
def switched_on(monkeypatch, tmp_path):
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    monkeypatch.setattr(checksum.tempfile, "gettempdir", lambda: str(tmp_path))


def flip(pool: HostPool, block: int, *, layer: int = 3, name: str = "value", bit: int = 1) -> None:
    pool.view(name, layer, block).reshape(-1).view(np.uint8)[-1] ^= bit


def dump_of(error: TransferError) -> dict:
    [path] = re.findall(r"\S+/paddle_kv-transfers-\d+-\d+\.json", str(error))
    with open(path) as file:
        return json.load(file)


@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
def test_a_bit_that_changed_stops_the_load(layout):
    rig = Rig(layout=layout)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1, 5, 3], [4, 9, 2]).wait(WAIT_S)
        rig.expect_offload([1, 5, 3], [4, 9, 2])
        rig.check()
        flip(rig.pool, 9)
        flip(rig.pool, 2, layer=0, name="key", bit=0x80)
        with pytest.raises(TransferError, match=r"2 blocks .* do not hold what was saved to them: \[2, 9\]") as caught:
            scheduler.onload([4, 2, 9], [6, 7, 8])
        assert caught.value.block_ids == [2, 9]
        flip(rig.pool, 9)
        flip(rig.pool, 2, layer=0, name="key", bit=0x80)
        rig.check()  # nothing has moved
        assert scheduler.stats()["onload_transfers"] == 0
        scheduler.onload([4, 2, 9], [6, 7, 8]).wait(WAIT_S)
    rig.expect_onload([4, 2, 9], [6, 7, 8])
    rig.check()


def test_the_report_has_the_last_transfers(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        for _ in range(checksum.KEPT_TRANSFERS):
            scheduler.offload([7], [11]).wait(WAIT_S)
        save = scheduler.offload([1, 2], [4, 9])
        save.wait(WAIT_S)
        cancelled = scheduler.offload([3], [5], layerwise=True)
        cancelled.cancel()
        open_save = scheduler.offload([3], [6], layerwise=True)
        flip(rig.pool, 9)
        with pytest.raises(TransferError) as caught:
            scheduler.onload([9], [8])
        open_save.cancel()
    dump = dump_of(caught.value)
    assert dump["wrong_host_blocks"] == [9]
    assert len(dump["transfers"]) == checksum.KEPT_TRANSFERS
    done, failed, running = dump["transfers"][-3:]
    assert (done["direction"], done["device_ids"], done["host_ids"], done["error"]) == ("offload", [1, 2], [4, 9], None)
    assert done["started_s"] <= done["over_s"]
    assert failed["error"] == "offload was cancelled before layer 0 was moved"
    assert running["over_s"] is None
    assert [record["number"] for record in dump["transfers"]] == list(
        range(running["number"] - checksum.KEPT_TRANSFERS + 1, running["number"] + 1)
    )
    text = str(caught.value).splitlines()
    assert len(text) == 1 + checksum.SHOWN_TRANSFERS
    assert "offload of 2 blocks, device [1, 2], host [4, 9]" in text[-3]
    assert text[-3].endswith(": done")
    assert text[-2].endswith("was cancelled before layer 0 was moved")
    assert text[-1].endswith(": in flight")


def test_of_the_reports_of_a_process_the_latest_are_kept(rig, tmp_path):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [4]).wait(WAIT_S)
        flip(rig.pool, 4)
        written = []
        for _ in range(checksum.KEPT_FILES + 3):
            with pytest.raises(TransferError) as caught:
                scheduler.onload([4], [2])
            if len(written) == 1:
                (tmp_path / written[0]).unlink()  # by somebody else
            written += re.findall(r"paddle_kv-transfers-\d+-\d+\.json", str(caught.value))[:1]  # then older errors
    assert {path.name for path in tmp_path.iterdir()} == set(written[3:])
    assert len(set(written)) == len(written)


def test_a_report_that_cannot_be_written(rig, monkeypatch):
    monkeypatch.setattr(checksum.tempfile, "gettempdir", lambda: "/proc/nowhere")
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [4]).wait(WAIT_S)
        flip(rig.pool, 4)
        with pytest.raises(TransferError, match=r"\[4\].*no file \(") as caught:
            scheduler.onload([4], [2])
    assert caught.value.block_ids == [4]


def test_a_load_of_what_is_being_saved_is_compared_at_its_end(rig, copies):
    copies.hold("offload", 4)
    copies.hold("onload", 4)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1, 2], [4, 9])
        load = scheduler.onload([4, 9], [6, 7])
        copies.go_on("offload")
        save.wait(WAIT_S)
        flip(rig.pool, 9, layer=1)
        flip(rig.pool, 4, layer=4)
        copies.go_on()
        with pytest.raises(TransferError, match=r"2 blocks .* do not hold what was saved to them: \[4, 9\]") as caught:
            load.wait(WAIT_S)
        assert caught.value.block_ids == [6, 7]  # not to be used
        assert caught.value.damaged_host_blocks == [4, 9]
        with pytest.raises(TransferError, match=r"block 6 of the device cache holds no usable data"):
            scheduler.offload([6], [1])
        assert dump_of(caught.value)["wrong_host_blocks"] == [4, 9]
        flip(rig.pool, 9)
        with pytest.raises(TransferError):
            scheduler.onload([9], [8])
        assert "do not hold what was saved" in checksum._recent[-1]["error"]


def test_a_load_of_what_is_being_saved(rig, copies):
    copies.hold("offload", 2)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1, 2], [4, 9])
        load = scheduler.onload([9, 9, 4], [6, 7, 8])
        copies.go_on()
        load.wait(WAIT_S)
    rig.expect_offload([1, 2], [4, 9])
    rig.expect_onload([9, 9, 4], [6, 7, 8])
    rig.check()


def test_a_save_over_a_save_that_is_not_over(rig, copies):
    """The stamp is that of the later one, whichever is looked at first."""
    copies.hold("offload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as one, LayerwiseScheduler(rig.cache, rig.pool) as other:
        first = one.offload([1], [4])
        second = other.offload([2], [4])
        copies.go_on()
        second.wait(WAIT_S)
        first.wait(WAIT_S)
        one.onload([4], [6]).wait(WAIT_S)
        rig.expect_offload([2], [4])
        rig.expect_onload([4], [6])
        rig.check()
        flip(rig.pool, 4)
        with pytest.raises(TransferError, match=r"\[4\]"):
            one.onload([4], [6])


def test_no_stamp_while_a_later_save_writes(rig, copies):
    """When the second one has written some layers, what lies there is neither's."""
    copies.hold("offload", 4)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first, second = scheduler.offload([1], [4]), scheduler.offload([2], [4])
        assert copies.arrived.acquire(timeout=WAIT_S)
        copies.hold("offload", 0, 2)
        copies.go_on("offload", 4)
        assert copies.arrived.acquire(timeout=WAIT_S)
        first.wait(WAIT_S)
        copies.go_on("offload", 0)
        assert copies.arrived.acquire(timeout=WAIT_S)
        load = scheduler.onload([4], [6])
        copies.go_on()
        load.wait(WAIT_S)
        second.wait(WAIT_S)
        rig.expect_offload([2], [4])
        rig.expect_onload([4], [6])
        rig.check()


def test_a_save_that_failed_keeps_nothing_alive():
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [4], layerwise=True).cancel()
    pool = weakref.ref(rig.pool)
    del rig, scheduler
    assert are_collected(pool)


def test_stamps_are_known_to_every_scheduler_on_the_memory(rig):
    pointers = {name: [rig.pool.pointer(name, layer) for layer in range(5)] for name in rig.spec.tensor_names}
    strides = {name: rig.pool.stride_bytes(name) for name in rig.spec.tensor_names}
    again = HostPool.adopt(rig.spec, pointers, 17, strides_bytes=strides)
    with LayerwiseScheduler(rig.cache, rig.pool) as one, LayerwiseScheduler(rig.cache, again) as other:
        one.offload([1], [4]).wait(WAIT_S)
        flip(rig.pool, 4)
        with pytest.raises(TransferError, match=r"\[4\]"):
            other.onload([4], [6])


def test_whoever_may_write_a_block_may_write_it(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        rig.pool.allocate(17)
        scheduler.offload([1, 2, 3], [4, 9, 2]).wait(WAIT_S)
        rig.pool.free([4])
        assert rig.pool.allocate(1) == [4]
        flip(rig.pool, 4)
        with rig.pool.lease([9], write=True):
            flip(rig.pool, 9)
        flip(rig.pool, 2)
        rig.pool.mark_rewritten([2])
        scheduler.onload([4, 9, 2], [6, 7, 8]).wait(WAIT_S)
        scheduler.offload([1], [5]).wait(WAIT_S)
        with rig.pool.lease([5]):  # for reading
            flip(rig.pool, 5)
        with pytest.raises(TransferError, match=r"\[5\]"):
            scheduler.onload([5], [6])


def test_a_save_that_was_cancelled_leaves_no_stamp(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [4]).wait(WAIT_S)
        save = scheduler.offload([2], [4], layerwise=True)
        save.mark_layer_written(0)
        save.cancel()
        with pytest.raises(CancelledError, match="cancelled"):
            save.wait(WAIT_S)
        with pytest.raises(TransferError, match="holds no usable data"):
            scheduler.onload([4], [6])
        rig.pool.mark_rewritten([4])
        scheduler.onload([4], [6]).wait(WAIT_S)


def test_random_traffic_raises_no_false_alarm():
    from paddle_kv.testing.soak.run import Setup, run
    from paddle_kv.testing.soak.traffic import Traffic

    setup = Setup(
        layers=3,
        block_bytes=21,
        device_blocks=40,
        host_blocks=100,
        checkpoint_steps=200,
        traffic=Traffic(max_blocks=6, seed=3),
    )
    report = run(setup, minutes=30, max_moves=25_000)
    assert report.failure == ""
    assert report.counts["moves"] >= 25_000


def test_switched_off_it_is_not_there(rig, monkeypatch):
    monkeypatch.delenv("PADDLE_KV_CHECKSUM")
    monkeypatch.setattr(checksum, "ChecksumObserver", None)
    monkeypatch.setattr(checksum, "zlib", None)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [4]).wait(WAIT_S)
        flip(rig.pool, 4)
        scheduler.onload([4], [6]).wait(WAIT_S)


def test_a_save_does_not_ask_for_host_blocks_that_have_the_numbers_of_its_device_blocks(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [4]).wait(WAIT_S)
        flip(rig.pool, 4)
        scheduler.offload([4], [9]).wait(WAIT_S)


def test_nobody_observes_what_was_not_asked_for_or_cannot_be_read(rig, monkeypatch):
    for enabled, in_host_memory in ((True, True), (True, False), (False, True)):
        monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1" if enabled else "0")
        monkeypatch.setattr(rig.pool, "in_host_memory", in_host_memory)
        with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
            assert (scheduler.observer is not None) is (enabled and in_host_memory)
