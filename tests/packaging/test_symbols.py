"""What the library shows to the rest of the process: another one with the same names would be mixed with it."""

import re
import shutil
import subprocess

import pytest

from paddle_kv.ops import _library

ROOT = _library.LIBRARY.resolve().parents[2]


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is missing")
def test_only_the_c_interfaces_are_exported():
    listed = subprocess.run(["nm", "-D", "--defined-only", str(_library.LIBRARY)], capture_output=True, check=True)
    exported = {line.split()[2] for line in listed.stdout.decode().splitlines()}
    declared = {
        name
        for header in (ROOT / "custom_ops/include").rglob("*.h")
        if 'extern "C"' in header.read_text()
        for name in re.findall(r"^[\w:* ]+?\*? ?(paddle_kv_\w+)\(", header.read_text(), re.M)
    }
    assert len(declared) >= 20
    assert exported <= declared
    kinds = ("id", "python", "queue", "signal", "tier")
    without_cuda = {f"paddle_kv_{kind}_functions" for kind in kinds}  # and none of the others
    assert exported in (without_cuda, declared)
