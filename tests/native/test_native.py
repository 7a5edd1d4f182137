"""The C++ tests, compiled with the host compiler. tools/sanitize_threads.sh runs them under ThreadSanitizer."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .sources import FAKE, HERE, ROOT, SOURCES, of


def names(program: str) -> list[str]:
    listed = re.findall(r'^\s+\{"(\w+)",\s+\w+\},$', (HERE / f"{program}.cc").read_text(), re.MULTILINE)
    assert listed, f"{program} has no tests"
    return listed


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("native")
    compiler = os.environ.get("CXX", "g++").split()
    objects = {}
    for source in set().union(*map(of, SOURCES)):
        objects[source] = str(folder / f"{source.stem}.o")
        subprocess.run(
            [*compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-pthread",
             f"-I{HERE}", f"-I{FAKE}", f"-I{ROOT}/custom_ops/include", '-DPADDLE_KV_BUILT_CUDA_ARCHS="80;86"',
             "-c", "-x", "c++", str(source), "-o", objects[source]],
            check=True,
        )  # fmt: skip
    for program in SOURCES:
        linked = [objects[source] for source in of(program)]
        subprocess.run([*compiler, "-pthread", *linked, "-o", str(folder / program)], check=True)
    return {program: folder / program for program in SOURCES}


@pytest.mark.parametrize(("program", "name"), [(program, name) for program in SOURCES for name in names(program)])
def test_native(programs: dict[str, Path], program: str, name: str) -> None:
    ran = subprocess.run([str(programs[program]), name], check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_name_that_is_not_there_fails(programs: dict[str, Path]) -> None:
    assert subprocess.run([str(programs["host_threads_test"]), "no such test"], check=False).returncode == 1
