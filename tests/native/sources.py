"""The C++ tests, and the sources that each is linked with: for pytest, and for tools/sanitize_threads.sh, which asks

    python3 tests/native/sources.py PROGRAM ...

for a line of each of these: the program and its files, the test's own first.
"""

from __future__ import annotations

import sys
from pathlib import Path

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
    *(TRANSFER / f"cuda/{name}.cc" for name in ("stream_feeder", "thread_signal", "transfer_by_marks")),
    *(TRANSFER / f"cuda/{name}.cc" for name in ("transfer_pairs", "transfer_queue")),
]
ENGINES = [
    PLAN,
    *QUEUE,
    *(TRANSFER / f"cuda/{name}.cc" for name in ("bulk_copies", "copy_engine", "kernel_engine", "staging_engine")),
    *(TRANSFER / f"cuda/{name}.cc" for name in ("host_copies", "piece_calls", "row_pieces", "staging_fills")),
    FAKE / "fake_kernels.cc",
]
SOURCES = {
    "host_threads_test": CPU_COPIES,
    "transfer_queue_test": [*CPU_COPIES, *QUEUE],
    "queue_calls_test": [*CPU_COPIES, *QUEUE],
    "marks_test": [*CPU_COPIES, *QUEUE],
    "queue_stress_test": [*CPU_COPIES, *QUEUE],
    "queue_preparation_test": [*CPU_COPIES, *QUEUE],
    "device_plan_test": [*CPU_COPIES, *QUEUE],
    "engine_choice_test": [PLAN, TRANSFER / "engine_choice.cc", TRANSFER / "host_rows.cc"],
    "engines_test": ENGINES,
    "engine_order_test": ENGINES,
    "engine_failures_test": ENGINES,
    "mapped_memory_test": [],
    "fork_test": [PLAN, ROOT / "custom_ops/kernels/common/mapped_memory.cc"],
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


def of(program: str) -> list[Path]:
    """The files of a program, its own first."""
    return [HERE / f"{program}.cc", *SOURCES[program]]


if __name__ == "__main__":
    for program in sys.argv[1:]:
        print(program, *(source.relative_to(ROOT) for source in of(program)))
