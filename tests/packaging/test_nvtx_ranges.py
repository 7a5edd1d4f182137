"""The ranges that a profiler sees, recorded by a library in a profiler's place. The operators run on CPU tensors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_kv import ops

CALLS = """
import numpy as np, paddle
from paddle_kv import ops
cache = paddle.to_tensor(np.zeros((4, 1, 2, 3), "int8"), place=paddle.CPUPlace())
ops.copy_blocks([cache], None, [(0, 1)])
try:
    ops.copy_blocks([cache], None, [(0, 9)])
except IndexError:
    pass
ops.universal_from_cache([cache], None, [2])
"""


def nvtx_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    return next((folder for folder in folders if (folder / "nvtx3" / "nvToolsExt.h").exists()), None)


@pytest.mark.skipif(ops.is_stub_build(), reason="a build without CUDA has no ranges")
@pytest.mark.skipif(nvtx_headers() is None, reason="the recorder needs the headers of a CUDA toolkit")
def test_each_call_is_a_range_of_its_own_name_that_also_ends_after_an_error(tmp_path: Path) -> None:
    recorder, record = tmp_path / "recorder.so", tmp_path / "ranges"
    source = Path(__file__).with_name("nvtx_recorder.cc")
    compiler = os.environ.get("CXX", "g++").split()
    subprocess.run(
        [*compiler, "-std=c++17", "-shared", "-fPIC", f"-I{nvtx_headers()}", str(source), "-o", str(recorder)],
        check=True,
    )
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(recorder), "NVTX_RECORD": str(record)}
    subprocess.run([sys.executable, "-c", CALLS], check=True, env=environment)
    lines = record.read_text().splitlines()
    expected = []
    for name in ("copy_blocks", "copy_blocks", "universal_from_cache"):
        expected += [f"paddle_kv push {name}", "paddle_kv pop"]
    assert [line for line in lines if line.startswith("paddle_kv")] == expected
