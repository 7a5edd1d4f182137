"""Names that Paddle does not promise to keep: one file looks them up, and says which one is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_kv._paddle import private

ROOT = Path(__file__).resolve().parents[2]


def test_a_name_that_this_paddle_lacks() -> None:
    with pytest.raises(ImportError, match=r"^Paddle \S+ has no paddle.base.core.gone, which paddle_kv needs; "):
        private("base.core", "gone")
    with pytest.raises(ImportError, match=r"has no paddle.gone.psdb, which"):
        private("gone", "psdb")


@pytest.mark.parametrize("name", ["jit.sot.psdb", "base.core.eager", "base.layer_helper.LayerHelper", "_C_ops.empty"])
def test_the_package_names_it_when_it_is_imported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    program = (
        "import zlib, importlib, paddle\n"
        f"delattr(importlib.import_module('paddle.{module}'), {attribute!r})\n"
        "import paddle_kv.ops\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert f"has no paddle.{name}, which paddle_kv needs" in ran.stderr.splitlines()[-1], ran.stderr


def test_nothing_else_looks_them_up() -> None:
    private_import = re.compile(
        r"^\s*(from|import) paddle\.(base|jit|utils|framework)|paddle\.base\.|core\.eager", re.M
    )
    found = [path for path in (ROOT / "paddle_kv").rglob("*.py") if private_import.search(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("folder", "own", "asking"),
    [
        ("paddle_kv", "devices.py", r"is_gpu_place|is_custom_place|gpu_device_id|CUDAPlace\(|is_compiled_with_cuda"),
        ("custom_ops/ops", "device_of.cc", r"\.is_(gpu|cpu|gpu_pinned|custom_device)\(|GetDeviceId|AllocationType::"),
    ],
)
def test_one_file_says_where_a_tensor_lies(folder: str, own: str, asking: str) -> None:
    """Whatever asks Paddle itself takes a plugin's memory for the host's."""
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cc", ".h")]
    assert [path.name for path in paths if re.search(asking, path.read_text())] == [own]
