"""The soak run on a GPU: nothing is found over sound code, and every wait that is left out is told."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("cupy")

from paddle_kv.testing.soak.mismatch import SoakFailure
from paddle_kv.testing.soak.run import Setup, Soak, run
from paddle_kv.testing.soak.traffic import Traffic
from tests.gpu import delay
from tests.gpu.scheduler_rig import Watched, WithoutComputeEvent, WithoutDependency, WithoutLayerWait, WithoutLook

SETUP = Setup(
    device="gpu:0",
    layers=4,
    block_bytes=4096,
    device_blocks=96,  # few, so that transfers meet
    host_blocks=520,
    checkpoint_steps=300,
    traffic=Traffic(max_blocks=40, max_delay_us=2000.0, seed=1),
)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """A process opens a file more some time after it has begun to use a GPU, in the middle of a run, once."""
    run(SETUP, minutes=1, max_moves=60_000)


@pytest.mark.parametrize(
    "changes",
    [{}, {"block_bytes": 37, "layers_per_event": 3}, {"pool_layout": "block_first"}, {"block_bytes": 60_000}],
    ids=["4 KiB", "odd sizes", "block first", "60 kB"],
)
def test_a_sound_run(changes):
    report = run(dataclasses.replace(SETUP, **changes), minutes=1, max_moves=60_000)
    assert report.failure == ""
    for what in ("transfers", "cancelled", "refused", "device_checks", "host_checks"):
        assert report.counts[what] > 0, what


@pytest.mark.parametrize("side", ["device", "host"])
def test_one_byte_changed_behind_its_back(side):
    import cupy

    with Soak(SETUP) as soak:
        for _ in range(100):
            soak.server.step()
        soak.server.finish()
        server = soak.server
        if side == "device":
            block = int(np.flatnonzero(server.device.whole)[-1])
            start = soak.cache.tensor("value", 2).data_ptr() + block * (SETUP.block_bytes + 16) + 20
            cupy.cuda.runtime.memset(start, 0xA5 ^ _byte(start), 1)
        else:
            block = int(server.host_ids[np.flatnonzero(server.host.whole)[-1]])
            server.host_memory.rows[2][1][block, 20] ^= 0xA5
        with pytest.raises(SoakFailure) as caught:
            server.finish()
    mismatch = caught.value.mismatch
    assert (mismatch.side, mismatch.block, mismatch.layer, mismatch.tensor) == (side, block, 2, "value")
    assert mismatch.offset_bytes == 16  # the word


def _byte(address: int) -> int:
    import cupy

    seen = np.empty(1, np.uint8)
    cupy.cuda.runtime.memcpy(seen.ctypes.data, address, 1, cupy.cuda.runtime.memcpyDeviceToHost)
    return int(seen[0])


def test_the_backend_as_it_is():
    assert _failure_of(Watched) == ""


@pytest.mark.parametrize("backend_type", [WithoutComputeEvent, WithoutDependency, WithoutLayerWait, WithoutLook])
def test_a_wait_that_is_left_out(backend_type):
    assert "is expected" in _failure_of(backend_type)


def _failure_of(backend_type) -> str:
    class Late(backend_type):
        """Every second transfer comes late, so that nothing is right by luck; the others are early."""

        late = False

        def copy_layers(self, binding, work, stream):
            self.late = not self.late
            if self.late:
                delay.busy(stream, 2.0)
            super().copy_layers(binding, work, stream)

    with Soak(dataclasses.replace(SETUP, block_bytes=32_752), Late) as soak:
        return soak.run(minutes=0.5, max_moves=100_000).failure
