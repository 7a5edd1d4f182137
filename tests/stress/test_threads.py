from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from tests.stress.threads import CALLS, Stress


@pytest.fixture(autouse=True)
def shown_if_it_hangs() -> Iterator[None]:
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_threads(seed: int) -> None:
    counts = Stress(8, 500, seed).run()
    assert all(counts[call.__name__.strip("_")] for call in CALLS)
    # Some 200 of each on two cores; how many calls meet a block that another thread holds is a matter of luck.
    assert min(counts["compared"], counts["refused"]) > 30
