"""A stream that is held, and few channels to the device, hold neither callers nor urgent loads nor the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy")

from tests.gpu.held_stream import HOLD_MS

ROOT = Path(__file__).resolve().parents[2]
ONE_CHANNEL = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
NO_BATCHES = {"PADDLE_KV_BATCHED_COPIES": "0"}


def ask(what: str, engine: str, variables: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.held_stream", what, "--engine", engine]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(what, engine, variables, found)
    return found


@pytest.mark.parametrize("variables", [{}, NO_BATCHES], ids=["batches", "one by one"])
@pytest.mark.parametrize("engine", ["copy_engine", "kernel", "staging"])
def test_saves_behind_a_held_stream_hold_nobody_else(engine: str, variables: dict[str, str]) -> None:
    found = ask("saves", engine, variables)
    assert found["submit_ms"] < HOLD_MS / 4, "the caller waited for the stream"
    assert found["still_held"], "the urgent load waited for the stream"


@pytest.mark.parametrize("variables", [{}, ONE_CHANNEL], ids=["channels", "one channel"])
@pytest.mark.parametrize("engine", ["copy_engine", "kernel", "staging"])
def test_the_model_runs_beside_a_load_whose_events_are_waited_for(engine: str, variables: dict[str, str]) -> None:
    found = ask("model", engine, variables)
    assert found["kernels_beside_it"] > 1, "kernels waited for the end of the load"
    assert found["longest_kernel_ms"] < found["load_ms"] / 2


def test_what_was_copied_one_by_one_is_the_same(machine: Any) -> None:
    """The whole conformance of the engine that copies in batches, without them."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/gpu/test_engines.py", "-k", "copy_engine"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **NO_BATCHES}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:]
