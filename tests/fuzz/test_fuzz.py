"""The first calls of the fuzzer; what it may find, it finds."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_kv import ops
from tests.fuzz import one_call
from tests.fuzz.calls import FAMILIES
from tests.fuzz.ground import Ground

ROOT = Path(__file__).resolve().parents[2]
COUNT = 1500


def verdicts(count: int, seed: int = 0) -> collections.Counter[str]:
    return collections.Counter(one_call.run(seed, index).kind for index in range(count))


def fuzz(path: Path, count: int, python_path: str) -> tuple[int, dict]:
    """tools/fuzz_ops.py: its exit code and its report."""
    report = path / "report.json"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tools/fuzz_ops.py"), "--count", str(count), "--json", str(report)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "PYTHONPATH": python_path},
    )
    assert report.exists(), ran.stdout + ran.stderr
    return ran.returncode, json.loads(report.read_text())


def test_the_first_calls_find_nothing(tmp_path):
    code, told = fuzz(tmp_path, COUNT, str(ROOT))
    assert told["findings"] == []
    assert code == 0
    assert min(told["kinds"]["exact"], told["kinds"]["refused"]) > COUNT // 4
    assert sum(told["kinds"].values()) == COUNT


def test_every_public_operator_is_called():
    random = np.random.default_rng(0)
    called = {family(Ground(random)).op for family in FAMILIES for _ in range(60)}
    questions = {"build_info", "has_memcpy_batch_async", "is_stub_build"}  # without arguments
    assert called == set(ops.__all__) - questions


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda op, given: None, "wrong memory"),
        (lambda op, given: (_ for _ in ()).throw(RuntimeError("x")), "untyped error"),
        (lambda op, given: (_ for _ in ()).throw(ValueError("x")), "refused a sound call"),
        (lambda op, given: (_ for _ in ()).throw(ValueError("x")), "refused without naming an argument"),
        (lambda op, given: (op(*given), (_ for _ in ()).throw(IndexError("x"))), "moved before it was refused"),
    ],
)
def test_an_operator_that_is_wrong_is_told(monkeypatch, fault, kind):
    real = ops.copy_blocks
    monkeypatch.setattr(ops, "copy_blocks", lambda *given: fault(real, given))
    assert verdicts(600)[kind] > 0


def test_a_crash_is_a_finding(tmp_path):
    """Also in the middle of a run, which goes on."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import os, zlib\n"
        "import tests.fuzz.one_call as one_call\n"
        "run = one_call.run\n"
        "one_call.run = lambda seed, index: os.abort() if index == 7 else run(seed, index)\n"
    )
    code, told = fuzz(tmp_path, 12, f"{tmp_path}:{ROOT}")
    assert code == 1
    assert [finding["index"] for finding in told["findings"]] == [7]
    assert "exit code -6" in told["findings"][0]["call"]
    assert sum(told["kinds"].values()) == 12


def test_one_call_again_says_what_it_was_before_it_is_made():
    tool = [str(ROOT / "tools/fuzz_ops.py"), "--only", "4"]
    ending = (
        "import os, runpy, sys, zlib\nfrom paddle_kv import ops\n"
        "for name in ops.__all__:\n    setattr(ops, name, lambda *given, **options: os._exit(77))\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    outputs = []
    for command in (tool, ["-c", ending, *tool]):
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        outputs.append((ran.returncode, ran.stdout.splitlines()))
    (code, whole), (crashed, cut) = outputs
    verdict = one_call.run(0, 4)
    assert (code, crashed) == (0, 77)
    assert whole == [cut[0], f"{verdict.kind} {verdict.text}"]
    assert cut[0].startswith(f"{verdict.op}(")
