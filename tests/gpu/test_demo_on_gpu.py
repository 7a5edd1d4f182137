"""The demo with its model, its caches and its transfers on the GPU: every token and every cached byte is what it
computes again without moving anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_kv import devices

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--layers=3", "--conversations=3", "--turns=3", "--first-prompt=37", "--next-prompts=9", "--answer=4"]


@pytest.mark.skipif(
    devices.plugin() is None, reason="the GPU kernels of Paddle 2.6 compute wrongly on newer GPUs; a plugin has none"
)
def test_every_token(tmp_path: Path) -> None:
    files = [f"--out={tmp_path}", f"--json={tmp_path / 'turns.json'}"]
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "demo.py"), "--device=gpu", *SMALL, *files]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "All 36 generated tokens and the keys and values of all 198 cached tokens are identical." in ran.stdout
    record = json.loads((tmp_path / "turns.json").read_text())
    assert record["identical"]
    assert record["device"] == devices.name_of(0)
