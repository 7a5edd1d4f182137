"""The example's own check of all bytes, on sizes that take a second."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--layers=3", "--kv-heads=3", "--head-dim=40", "--block-size=16", "--prefix=1120", "--tokens=176"]
PRODUCTS = ["--hidden=512", "--ffn=1024", "--repetitions=2"]


def test_bytes_and_record(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "gpu_pipeline.py"), *SIZES, *PRODUCTS, f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu_pipeline.json").read_text())
    assert record["differences"] == []
    assert [result["way"] for result in record["results"]] == [
        "computing alone",
        "onload alone",
        "offload alone",
        "all at once",
        "layer by layer",
    ]
    trace = json.loads((tmp_path / "gpu_layer_by_layer.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == 3 * 3  # layers x lanes
