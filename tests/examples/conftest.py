"""The examples are scripts: they import each other from their own folder. Here they run on the CPU, GPU or not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import paddle
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    before = paddle.device.get_device()
    paddle.set_device("cpu")
    yield
    paddle.set_device(before)
