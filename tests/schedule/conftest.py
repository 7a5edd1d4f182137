from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_kv.backend import binding
from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule import rig as rig_module
from tests.schedule.alone_backend import AloneBackend
from tests.schedule.rig import Copies, Rig

# Each test of these runs twice: also with transfers that come alone started as on a GPU.
WITH_ALONE = (
    "test_access_check",
    "test_cancelled_before",
    "test_closing_twice",
    "test_failures",
    "test_finished",
    "test_fork_in_section",
    "test_forked_child",
    "test_from_inside",
    "test_handle",
    "test_hazards",
    "test_hearing_of_the_end",
    "test_interrupts",
    "test_scheduler",
    "test_threads",
    "test_threads_live",
    "test_what_is_dropped",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in WITH_ALONE:
        metafunc.parametrize("how_started", ["noted", "alone"], indirect=True)


@pytest.fixture(autouse=True)
def how_started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "noted") == "alone":
        for name in ("start_alone", "_start_alone", "started_alone", "most_blocks", "wait_on_compute"):
            monkeypatch.setattr(CpuBackend, name, getattr(AloneBackend, name), raising=False)


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
