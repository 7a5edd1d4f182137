"""What all tests share: Paddle imported the safe way, the machine they run on, and tests/gpu left out without a GPU."""

from __future__ import annotations

import gc
import os
import warnings
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # each Paddle has something to say about the machine when it is imported
    import paddle

from tests.machine import Machine, cpu_machine

# What commands print is compared as it is without colours, in lines of 80: typer looks when it is imported.
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "TERMINAL_WIDTH"):
    os.environ.pop(name, None)
os.environ["COLUMNS"] = "80"

GPU_TESTS = Path(__file__).resolve().parent / "gpu"

settings.register_profile("paddle_kv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paddle_kv")


def gpu_count() -> int:
    """Asked before any GPU place is made: Paddle 2.6 ends the process when it makes one without a GPU."""
    from paddle_kv import devices

    return devices.gpu_count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A process a core; with a GPU none but this one: they would share its memory and time."""
    return 0 if gpu_count() > 0 else min(len(os.sched_getaffinity(0)), 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if gpu_count() > 0:
        return
    why = "no GPU" if paddle.is_compiled_with_cuda() else "this Paddle is built without CUDA and has no device plugin"
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module", autouse=True)
def default_device() -> Iterator[None]:
    """Tensors that a test makes without naming a place are in RAM; tests/gpu changes that for itself."""
    before = paddle.get_device()
    paddle.set_device("cpu")
    yield
    paddle.set_device(before)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """The collector leaves out what was made before the module. Full collections would look at a million objects,
    nearly all of Paddle and of the tests themselves."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def machine() -> Machine:
    return cpu_machine()


@pytest.fixture
def device(machine: Machine) -> paddle.base.core.Place:
    """Where the caches of a test live."""
    return machine.place
