"""PADDLE_KV_CHECKSUM=1: of which bytes the sum is, and of which transfers it is told."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_kv import LayerwiseScheduler, TransferError
from paddle_kv.schedule import checksum
from tests.schedule.rig import WAIT_S, make_spec


@pytest.fixture
def scheduler(rig, monkeypatch, tmp_path):
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    monkeypatch.setattr(checksum.tempfile, "gettempdir", lambda: str(tmp_path))
    with LayerwiseScheduler(rig.cache, rig.pool) as made:
        yield made


@pytest.mark.parametrize("name", make_spec().tensor_names)
@pytest.mark.parametrize("at", [0, -1])
def test_the_first_and_the_last_byte_of_each_layer_count(rig, scheduler, name, at):
    scheduler.offload([3], [9]).wait(WAIT_S)
    for layer in range(rig.spec.num_layers):
        of_layer = rig.pool.view(name, layer, 9).reshape(-1).view(np.uint8)
        of_layer[at] ^= 1
        with pytest.raises(TransferError, match=r"do not hold what was saved to them: \[9\]"):
            scheduler.onload([9], [1])
        of_layer[at] ^= 1
    scheduler.onload([9], [1]).wait(WAIT_S)


def test_a_load_that_has_failed_is_not_compared(rig, copies, scheduler, tmp_path):
    copies.hold("offload", 4)
    copies.hold("onload", 4)
    copies.fail("onload", 4, RuntimeError("broken"))
    save = scheduler.offload([1], [9])
    load = scheduler.onload([9], [6])
    copies.go_on("offload")
    save.wait(WAIT_S)
    rig.pool.view("key", 0, 9)[...] = 3.0
    copies.go_on()
    with pytest.raises(TransferError, match=r"onload failed at layer 4: broken"):
        load.wait(WAIT_S)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["offload", "onload"])
def test_a_transfer_that_is_over_in_its_call_is_told_of(scheduler, call):
    getattr(scheduler, call)([], []).wait(WAIT_S)
    assert checksum._recent[-1]["num_blocks"] == 0
    assert checksum._recent[-1]["over_s"] is not None
