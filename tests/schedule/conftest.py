from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_kv.backend import binding
from tests.schedule import rig as rig_module
from tests.schedule.rig import Copies, Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Every copy of the CPU backend goes through it; what a test leaves held goes on at its end."""
    made = Copies(binding.copy)
    monkeypatch.setattr(binding, "copy", made)
    yield made
    made.go_on()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a transfer behind: the tracker is shared by the whole process."""
    yield
    rig_module.collect()
    assert rig_module.in_flight() == []
