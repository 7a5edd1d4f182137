"""Nothing that the first transfers of a process set up waits for a replay that waits for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
@pytest.mark.parametrize("block_kib", [4, 128])
def test_the_first_transfers_beside_a_closed_gate(layout: str, block_kib: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.first_transfers", "--layout", layout]
    command += ["--block-kib", str(block_kib)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(layout, block_kib, found)
    assert found["was_closed"] and found["right"]
    assert found["took_ms"] < 5000, "they came when the gate had given up"
