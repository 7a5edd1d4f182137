from __future__ import annotations

import sys
from subprocess import run

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv.backend.work import TransferPlan
from paddle_kv.schedule.plan import check_blocks, make_plan
from paddle_kv.timeouts import check_timeout


def plan(device_ids, host_ids, direction="offload", layers=7, per_event=3):
    check_blocks(direction, device_ids, host_ids, device_blocks=10, host_blocks=20)
    return make_plan(direction, device_ids, host_ids, num_layers=layers, layers_per_event=per_event)


def test_direction_decides_what_is_source_and_target():
    offload, onload = plan([1, 2], [13, 4]), plan([1, 2], [13, 4], "onload")
    assert (offload.source_ids.tolist(), offload.target_ids.tolist()) == ([1, 2], [13, 4])
    assert (onload.source_ids.tolist(), onload.target_ids.tolist()) == ([13, 4], [1, 2])


def test_ids_are_contiguous_whatever_they_were():
    """The compiled library reads them by their address."""
    made = plan(np.arange(10, dtype=np.int32)[::3], np.arange(20, dtype=np.int32)[:8:2])
    assert made.device_ids.tolist() == [0, 3, 6, 9]
    assert made.host_ids.tolist() == [0, 2, 4, 6]
    for ids in (made.device_ids, made.host_ids):
        assert ids.dtype == np.int64 and ids.flags.c_contiguous


@given(layers=st.integers(1, 40), per_event=st.integers(1, 50))
def test_groups_cover_each_layer_once_in_order(layers, per_event):
    made = TransferPlan("onload", (1,), (2,), layers, per_event)
    covered = [layer for group in range(made.num_groups) for layer in made.layers_of(group)]
    assert covered == list(range(layers))
    assert all(layer in made.layers_of(made.group_of(layer)) for layer in range(layers))
    assert all(0 < len(made.layers_of(group)) <= per_event for group in range(made.num_groups))


def test_layers_of_groups_that_are_left_out_are_not_moved():
    made = TransferPlan("onload", (1,), (2,), 7, 2, frozenset({1, 3}))
    assert (made.num_groups, list(made.groups), made.num_moved_layers) == (4, [0, 2], 4)


def test_no_blocks_no_groups():
    assert plan([], []).num_groups == 0


@pytest.mark.parametrize(
    ("device_ids", "host_ids", "direction", "error", "message"),
    [
        ([1, 10], [3, 4], "offload", IndexError, r"device_block_ids\[1\] = 10 must be in \[0, 10\)"),
        ([-1, 2], [3, 4], "offload", IndexError, r"device_block_ids\[0\] = -1 must be in \[0, 10\)"),
        ([1, 2], [3, 20], "onload", IndexError, r"host_block_ids\[1\] = 20 must be in \[0, 20\)"),
        ([1, 2], [-(2**80), 3], "onload", IndexError, r"host_block_ids\[0\] = -1208\d* must be in \[0, 20\)"),
        ([1, 2], [3], "onload", ValueError, "device_block_ids has 2 ids, host_block_ids has 1"),
        ([1, 2, 3], [5, 7, 7], "offload", ValueError, "host_block_ids names block 7 more than once"),
        ([4, 4], [5, 7], "onload", ValueError, "device_block_ids names block 4 more than once"),
    ],
)
def test_wrong_ids(device_ids, host_ids, direction, error, message):
    with pytest.raises(error, match=message):
        plan(device_ids, host_ids, direction)


def test_one_source_may_have_many_targets():
    assert plan([4, 4], [5, 7]).source_ids.tolist() == [4, 4]
    assert plan([5, 7], [4, 4], "onload").source_ids.tolist() == [4, 4]


@pytest.mark.parametrize("timeout_s", [None, 0, -1, 0.5, 3])
def test_timeouts(timeout_s):
    check_timeout(timeout_s)


def test_plan_and_hazards_need_neither_paddle_nor_cupy():
    """They are what a simulator and a proof work on."""
    program = """
import importlib.util, pathlib, sys, types
for name in ("paddle_kv", "paddle_kv.schedule"):
    package = types.ModuleType(name); package.__path__ = [str(pathlib.Path(sys.argv[1], *name.split(".")))]
    sys.modules[name] = package
import paddle_kv.schedule.plan, paddle_kv.tracking.memories
sys.exit(any(name.split(".")[0] in ("paddle", "cupy") for name in sys.modules))
"""
    root = __file__.rsplit("/tests/", 1)[0]
    assert run([sys.executable, "-c", program, root], check=False, timeout=60).returncode == 0


def test_each_side_has_its_own_bound():
    with pytest.raises(IndexError, match=r"host_block_ids\[0\] = 7 must be in \[0, 5\)"):
        check_blocks("onload", [7], [7], device_blocks=9, host_blocks=5)
