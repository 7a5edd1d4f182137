"""What is raised in a stream's thread ends the transfer, whatever it is, and nothing else."""

from __future__ import annotations

import pytest

from paddle_kv import LayerwiseScheduler, TransferError
from tests.schedule.rig import WAIT_S


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_a_copy_ends_the_transfer(rig, copies, error):
    copies.fail("onload", 2, error)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([3], [2])
        with pytest.raises(TransferError, match=rf"failed at layer 2: {type(error).__name__}"):
            load.wait(WAIT_S)
        copies.heal()
        scheduler.onload([3], [2]).wait(WAIT_S)
