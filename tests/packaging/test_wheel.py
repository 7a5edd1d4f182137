"""The wheel, installed into another environment with the same Paddle."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import paddle
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = f"paddle_kv/_lib/paddle_kv_ops-paddle{paddle.__version__}.so"

TRANSFER = """
import zlib, numpy, paddle, paddle_kv
from paddle_kv import ops
source = paddle.to_tensor(numpy.arange(6, dtype="int64").reshape(3, 1, 2), place=paddle.CPUPlace())
target = paddle.to_tensor(numpy.zeros((2, 1, 2), "int64"), place=paddle.CPUPlace())
print(paddle_kv.__file__)
print(ops.transfer_blocks(source, target, {2: 0}).numpy().ravel().tolist())
"""


def run(*command: object) -> str:
    # Without the checkout, in which a build leaves what pip takes for an installed package.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", made, ROOT)
    (found,) = made.iterdir()
    return found


def test_the_wheel_holds_the_package_and_one_library(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "paddle_kv").rglob("*.py")}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == package | {"paddle_kv/py.typed", LIBRARY}
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    assert "\nRequires-Dist: setuptools" in zipfile.ZipFile(wheel).read(metadata).decode()


def test_the_wheel_is_tagged_as_binary(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.stem.split("-")[2:] == [python, python, platform]


def test_the_wheel_runs_in_another_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    version = wheel.name.split("-")[1]
    assert {path.name for path in site.iterdir()} == {"paddle_kv", f"paddle_kv-{version}.dist-info"}

    # Paddle comes from this environment, behind the new one's own packages.
    (site / "paddle.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    imported_from, moved = run(python, "-I", "-W", "ignore", "-c", TRANSFER).splitlines()
    assert Path(imported_from) == site / "paddle_kv" / "__init__.py"
    assert moved == "[4, 5, 0, 0]"
