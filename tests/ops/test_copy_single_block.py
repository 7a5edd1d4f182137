"""copy_single_block against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddle_kv import ops
from tests.machine import DTYPES, Machine
from tests.ops.copy_conformance import check_untouched, make
from tests.reference.copy import copied


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(machine: Machine, dtype: str) -> None:
    keys, values = (make(machine, 5, (3, 5, 7), dtype, seed) for seed in (1, 2))
    ops.copy_single_block(keys.tensor, values.tensor, 4, 1)
    machine.synchronize()
    for cache in (keys, values):
        cache.check(copied(cache.bits, [(4, 1)]))


def test_the_caches_are_returned(machine: Machine) -> None:
    keys, values = (make(machine, 5, (3, 5), "int8", seed) for seed in (1, 2))
    result = ops.copy_single_block(keys.tensor, values.tensor, np.int64(0), np.int32(2))
    assert result[0] is keys.tensor and result[1] is values.tensor
    assert ops.copy_single_block(keys.tensor, None, 0, 1)[1] is None


@pytest.mark.parametrize("block_bytes", [1, 33, 4099, (2 << 20) + 7])
def test_block_sizes(machine: Machine, block_bytes: int) -> None:
    cache = make(machine, 3, (1, block_bytes), "uint8", 1)
    ops.copy_single_block(cache.tensor, None, 2, 0)
    machine.synchronize()
    cache.check(copied(cache.bits, [(2, 0)]))


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        (5, 0, IndexError, r"source_block_id\[0\] = 5 must be in \[0, 5\)"),
        (-1, 0, IndexError, r"source_block_id\[0\] = -1"),
        (0, 5, IndexError, r"target_block_id\[0\] = 5"),
        (0, -2, IndexError, r"target_block_id\[0\] = -2"),
        (3, 3, ValueError, "block 3 is in source_block_id and in target_block_id"),
        (1.0, 0, TypeError, "source_block_id is 1.0"),
        (0, None, TypeError, "target_block_id is None"),
        (0, True, TypeError, "target_block_id is True"),
        (0, 2**63, ValueError, "does not fit in 64 bits"),
    ],
)
def test_wrong_ids(machine: Machine, source: Any, target: Any, error: type[Exception], message: str) -> None:
    keys, values = (make(machine, 5, (2, 3), "float32", seed) for seed in (1, 2))
    with pytest.raises(error, match=message):
        ops.copy_single_block(keys.tensor, values.tensor, source, target)
    check_untouched(keys, values)
