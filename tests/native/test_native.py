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
COMMON = ROOT / "custom_ops/kernels/common/cuda"
TRANSFER = ROOT / "custom_ops/transfer"
FAKE = HERE / "fake_cuda"
PLAN = TRANSFER / "transfer_plan.cc"
CPU_COPIES = [PLAN, SWAP / "transfer_blocks_cpu.cc", SWAP / "transfer_layers_cpu.cc"]
QUEUE = [
    FAKE / "fake_cuda.cc",
    TRANSFER / "engine_choice.cc",
    TRANSFER / "host_rows.cc",
    TRANSFER / "thread_cores.cc",
    *(COMMON / f"{name}.cc" for name in ("missing_architecture", "pointer_facts", "cuda_device")),
    *(TRANSFER / f"cuda/{name}.cc" for name in ("c_call", "check_transfer", "completions", "device_plan")),
    *(TRANSFER / f"cuda/{name}.cc" for name in ("event_states", "gate_work", "queue_api", "queued_transfer")),
    *(TRANSFER / f"cuda/{name}.cc" for name in ("stream_feeder", "transfer_queue")),
]
SOURCES = {
    "host_threads_test": CPU_COPIES,
    "transfer_queue_test": [*CPU_COPIES, *QUEUE],
    "queue_calls_test": [*CPU_COPIES, *QUEUE],
    "queue_stress_test": [*CPU_COPIES, *QUEUE],
    "device_plan_test": [*CPU_COPIES, *QUEUE],
    "engine_choice_test": [PLAN, TRANSFER / "engine_choice.cc", TRANSFER / "host_rows.cc"],
    "engines_test": [
        PLAN,
        *QUEUE,
        *(TRANSFER / f"cuda/{name}.cc" for name in ("bulk_copies", "copy_engine", "kernel_engine", "staging_engine")),
        *(TRANSFER / f"cuda/{name}.cc" for name in ("host_copies", "row_pieces", "staging_fills")),
        FAKE / "fake_kernels.cc",
    ],
    "mapped_memory_test": [],
    "thread_cores_test": [TRANSFER / "thread_cores.cc"],
    "file_ranges_test": [ROOT / f"custom_ops/tiers/{name}.cc" for name in ("file_ranges", "queued_reads")],
    "memcpy_batch_test": [ROOT / "custom_ops/kernels/memcpy/memcpy_batch.cu", FAKE / "fake_cuda.cc"],
    "row_kernels_test": [
        *(ROOT / f"custom_ops/kernels/cache_write/{name}_rows.cu" for name in ("write", "gather")),
        FAKE / "device_code.cc",
        FAKE / "fake_cuda.cc",
    ],
    "pointer_facts_test": [
        *(COMMON / f"{name}.cc" for name in ("pointer_facts", "cuda_device", "page_locked")),
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
    objects = {}
    for source in {HERE / f"{program}.cc" for program in SOURCES}.union(*SOURCES.values()):
        objects[source] = str(folder / f"{source.stem}.o")
        subprocess.run(
            [*compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-pthread",
             f"-I{HERE}", f"-I{FAKE}", f"-I{ROOT}/custom_ops/include", '-DPADDLE_KV_BUILT_CUDA_ARCHS="80;86"',
             "-c", "-x", "c++", str(source), "-o", objects[source]],
            check=True,
        )  # fmt: skip
    for program, sources in SOURCES.items():
        linked = [objects[source] for source in (HERE / f"{program}.cc", *sources)]
        subprocess.run([*compiler, "-pthread", *linked, "-o", str(folder / program)], check=True)
    return {program: folder / program for program in SOURCES}


@pytest.mark.parametrize(("program", "name"), [(program, name) for program in SOURCES for name in names(program)])
def test_native(programs: dict[str, Path], program: str, name: str) -> None:
    ran = subprocess.run([str(programs[program]), name], check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_name_that_is_not_there_fails(programs: dict[str, Path]) -> None:
    assert subprocess.run([str(programs["host_threads_test"]), "no such test"], check=False).returncode == 1
