"""The C++ tests, compiled with the host compiler. tools/sanitize_threads.sh runs them under ThreadSanitizer."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SWAP = ROOT / "custom_ops/kernels/swap"
COMMON = ROOT / "custom_ops/kernels/common"
FAKE = HERE / "fake_cuda"
SHARED = [SWAP / f"transfer_{name}.cc" for name in ("blocks_cpu", "layers_cpu", "plans")]
SOURCES = {
    "host_threads_test": SHARED,
    "transfer_queue_test": [*SHARED, FAKE / "fake_cuda.cc", SWAP / "transfer_queue.cu"],
    "engines_test": [
        SWAP / "transfer_plans.cc",
        SWAP / "transfer_queue.cu",
        *(SWAP / f"{name}_engine.cu" for name in ("copy", "kernel", "staging")),
        FAKE / "fake_cuda.cc",
        FAKE / "fake_kernels.cc",
    ],
    "pointer_facts_test": [
        *(COMMON / f"{name}.cu" for name in ("pointer_facts", "cuda_device", "page_locked")),
        FAKE / "fake_cuda.cc",
    ],
}


def names(program: str) -> list[str]:
    listed = re.findall(r'^\s+\{"(\w+)",\s+\w+\},$', (HERE / f"{program}.cc").read_text(), re.MULTILINE)
    assert listed, f"{program} has no tests"
    return listed


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("native")
    compiler = os.environ.get("CXX", "g++").split()
    for program, sources in SOURCES.items():
        objects = []
        for source in [HERE / f"{program}.cc", *sources]:
            objects.append(folder / f"{program}-{source.stem}.o")
            subprocess.run(
                [*compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-pthread", f"-I{HERE}", f"-I{FAKE}",
                 f"-I{ROOT}/custom_ops/include", "-c", "-x", "c++", str(source), "-o", str(objects[-1])],
                check=True,
            )  # fmt: skip
        subprocess.run([*compiler, "-pthread", *map(str, objects), "-o", str(folder / program)], check=True)
    return {program: folder / program for program in SOURCES}


@pytest.mark.parametrize(("program", "name"), [(program, name) for program in SOURCES for name in names(program)])
def test_native(programs: dict[str, Path], program: str, name: str) -> None:
    ran = subprocess.run([str(programs[program]), name], check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_name_that_is_not_there_fails(programs: dict[str, Path]) -> None:
    assert subprocess.run([str(programs["host_threads_test"]), "no such test"], check=False).returncode == 1
