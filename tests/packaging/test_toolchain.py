"""What setup_ops.py says when something is missing or does not fit: one sentence, exit code 1, nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest
import toolchain

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {75, 80, 86, 89, 90, 100, 120, 121}


def build(tree: Path = ROOT, *options: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Runs ``setup_ops.py build`` with some variables changed; None removes one."""
    changed = {"PADDLE_KV_CUDA_ARCHS": None, "PADDLE_KV_REQUIRE_CUDA": None, **environment}
    given = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
    command = [sys.executable, *options, str(tree / "setup_ops.py"), "build"]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def check_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("paddle_kv: ")
    for word in words:
        assert word in lines[0]


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def test_no_paddle() -> None:
    check_refused(build(ROOT, "-S", PYTHONPATH=None), "cannot import Paddle", "paddlepaddle", "--no-build-isolation")


def test_paddle_too_old(tmp_path: Path) -> None:
    (tmp_path / "paddle.py").write_text("__version__ = '2.4.2'\n")
    check_refused(build(PYTHONPATH=str(tmp_path)), "Paddle 2.4.2 is too old")


def test_setuptools_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new environment of Python 3.11. The page says what to do before the build does."""
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    newer = f"pip install 'setuptools>={toolchain.OLDEST_SETUPTOOLS}'"
    with pytest.raises(toolchain.BuildError, match=rf"setuptools 65.5.0 of .* is too old; .*: {newer}$"):
        toolchain._import_paddle()
    assert newer in (ROOT / "README.md").read_text()


def test_no_compiler(tmp_path: Path) -> None:
    for name in ("cat", "grep", "sh", "which"):  # Paddle runs them while it is imported
        (tmp_path / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
    check_refused(build(PATH=str(tmp_path), CXX=None, CC=None), "g++", "is not installed", "CXX")


def test_a_compiler_without_cxx17(tmp_path: Path) -> None:
    script(tmp_path / "old-g++", "echo \"error: unrecognized option '-std=c++17'\" >&2; exit 1\n")
    compiler = str(tmp_path / "old-g++")
    check_refused(build(CXX=compiler), compiler, "does not compile C++17", "unrecognized option")


def test_no_nvcc() -> None:
    refused = build(CUDA_HOME="/nowhere/cuda", PADDLE_KV_REQUIRE_CUDA="1")
    check_refused(refused, "PADDLE_KV_REQUIRE_CUDA=1", "no nvcc in /nowhere/cuda/bin")


def test_nvcc_too_old(tmp_path: Path) -> None:
    script(
        tmp_path / "bin" / "nvcc",
        'if [ "$1" = --list-gpu-arch ]; then echo compute_80; exit 0; fi\n'
        "echo \"nvcc fatal   : Value 'c++17' is not defined for option 'std'\" >&2; exit 1\n",
    )
    refused = build(CUDA_HOME=str(tmp_path), PADDLE_KV_REQUIRE_CUDA="1", PADDLE_KV_CUDA_ARCHS="80")
    check_refused(refused, str(tmp_path / "bin" / "nvcc"), "does not compile C++17", "is not defined")


@pytest.mark.parametrize("archs", ["sm_90", "80;;x", ";", "8.00", "-1"])
def test_a_bad_architecture_names_the_variable_and_the_legal_ones(archs: str) -> None:
    with pytest.raises(toolchain.BuildError, match=r"PADDLE_KV_CUDA_ARCHS is .*75;80;86;89;90;100;120;121"):
        toolchain.choose_architectures(archs, KNOWN, set(), "nvcc")


def test_an_architecture_that_nvcc_does_not_know() -> None:
    with pytest.raises(toolchain.BuildError, match=r"my-nvcc knows no \[30\], only 75;80"):
        toolchain.choose_architectures("30;80", KNOWN, set(), "my-nvcc")


@pytest.mark.parametrize("archs", ["90;80", "80,90", " 80  90 ", "8.0;9.0", "80;90;80;"])
def test_architectures_as_asked(archs: str) -> None:
    assert toolchain.choose_architectures(archs, KNOWN, {100}, "nvcc") == (80, 90)


def test_architectures_by_default() -> None:
    assert toolchain.choose_architectures("", KNOWN, {90}, "nvcc") == (90,)
    assert toolchain.choose_architectures("", KNOWN, set(), "nvcc") == (80, 86, 89, 90, 100, 120)
    assert toolchain.choose_architectures("", {70, 80, 90}, set(), "nvcc") == (80, 90)
    with pytest.raises(toolchain.BuildError, match=r"a GPU here has architecture \[103\]"):
        toolchain.choose_architectures("", KNOWN, {103}, "nvcc")
    with pytest.raises(toolchain.BuildError, match="knows none of"):
        toolchain.choose_architectures("", {70}, set(), "nvcc")


def test_paddle_with_cuda_but_no_nvcc_builds_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paddle = SimpleNamespace(__version__="2.6.2", is_compiled_with_cuda=lambda: True)
    monkeypatch.setattr(toolchain, "_import_paddle", lambda: paddle)
    monkeypatch.setenv("CUDA_HOME", "/nowhere/cuda")
    monkeypatch.delenv("PADDLE_KV_REQUIRE_CUDA", raising=False)
    found = toolchain.find()
    assert (found.cuda_home, found.architectures) == (None, ())
    said = capsys.readouterr().out
    assert "no nvcc in /nowhere/cuda/bin" in said
    assert "CPU tensors only" in said


NO_CUDA = {"CUDA_HOME": "/nowhere/cuda"}


def tree_with_one_source(folder: Path) -> Path:
    """A checkout that has a single function; returns its source."""
    for name in ("setup_ops.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "tools", folder / "tools")
    (folder / "paddle_kv").mkdir()
    shutil.copy(ROOT / "paddle_kv" / "__init__.py", folder / "paddle_kv")
    source = folder / "custom_ops" / "ops" / "swap" / "one.cc"
    source.parent.mkdir(parents=True)
    shutil.copy(ROOT / "custom_ops" / "exports.map", folder / "custom_ops")
    source.write_text("int One() { return 1; }\n")
    return source


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_library_knows_its_commit_and_whether_that_is_all(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        command = ["git", *who, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    def built_from() -> str:
        assert build(tmp_path, **NO_CUDA).returncode == 0
        header = next(tmp_path.glob("build/*/paddle_kv_commit.h"))
        return header.read_text().split('"')[1]

    source = tree_with_one_source(tmp_path)
    assert built_from() == ""
    git("init", "--quiet")
    git("add", "custom_ops")
    git("commit", "--quiet", "-m", "one")
    (tmp_path / "README.md").write_text("not of the operators")
    assert built_from() == git("log", "-1", "--format=%h")
    source.write_text("int One() { return 2; }\n")
    assert built_from() == git("log", "-1", "--format=%h") + "-modified"
    git("commit", "--quiet", "-a", "-m", "two")
    assert built_from() == git("log", "-1", "--format=%h")


def test_a_source_that_does_not_compile_fails_the_build(tmp_path: Path) -> None:
    """Paddle 3 prints the error, goes on, and would link what an earlier build has left."""
    source = tree_with_one_source(tmp_path)
    assert build(tmp_path, **NO_CUDA).returncode == 0
    library = next((tmp_path / "paddle_kv" / "_lib").glob("*.so"))
    before = library.read_bytes()
    source.write_text("int One() { return undeclared; }\n")
    failed = build(tmp_path, **NO_CUDA)
    assert failed.returncode == 1
    assert "undeclared" in failed.stderr
    assert failed.stderr.strip().splitlines()[-1].startswith("paddle_kv: not compiled: custom_ops/ops/swap/one.cc")
    assert library.read_bytes() == before


NVCC = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "nvcc"


def test_a_warning_fails_the_build_where_that_is_asked_for(tmp_path: Path) -> None:
    source = tree_with_one_source(tmp_path)
    source.write_text("int One() { int unused; return 1; }\n")
    failed = build(tmp_path, **NO_CUDA, PADDLE_KV_WERROR="1")
    assert failed.returncode == 1
    assert "unused variable" in failed.stderr and "not compiled: custom_ops/ops/swap/one.cc" in failed.stderr
    told = build(tmp_path, **NO_CUDA, PADDLE_KV_WERROR=None)
    assert told.returncode == 0 and "unused variable" in told.stderr


@pytest.mark.skipif(not NVCC.exists(), reason="nvcc is missing")
@pytest.mark.parametrize("code", ["__global__ void One() { int never_used; }", "void One() { int never_used; }"])
def test_a_warning_of_nvcc_fails_the_build_where_that_is_asked_for(tmp_path: Path, code: str) -> None:
    source = tree_with_one_source(tmp_path)
    source.unlink()
    source.with_suffix(".cu").write_text(code + "\n")
    cuda = {"CUDA_HOME": str(NVCC.parents[1]), "PADDLE_KV_REQUIRE_CUDA": "1", "PADDLE_KV_CUDA_ARCHS": "90"}
    failed = build(tmp_path, **cuda, PADDLE_KV_WERROR="1")
    assert failed.returncode == 1
    assert "never_used" in failed.stderr and "not compiled: custom_ops/ops/swap/one.cu" in failed.stderr


def run_without_library(
    folder: Path, *arguments: str, library: bytes | None = None
) -> subprocess.CompletedProcess[str]:
    """Python with a copy of the package that has no operators, or a file that is none."""
    shutil.copytree(ROOT / "paddle_kv", folder / "paddle_kv", ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    if library is not None:
        (folder / "paddle_kv" / "_lib").mkdir()
        (folder / "paddle_kv" / "_lib" / f"paddle_kv_ops-paddle{paddle.__version__}.so").write_bytes(library)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_without_a_library_says_how_to_build_it(tmp_path: Path) -> None:
    done = run_without_library(tmp_path, "-c", "import paddle_kv.ops")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: paddle_kv has no operators for Paddle ")
    assert "python setup_ops.py build" in last


def test_import_of_a_broken_library_says_what_the_loader_said(tmp_path: Path) -> None:
    done = run_without_library(tmp_path, "-c", "from paddle_kv import ops", library=b"no library")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert re.search(r"cannot be loaded by Paddle \S+ \(file too short\); .*: python setup_ops.py build$", last)


@pytest.mark.parametrize("command", ["-m paddle_kv doctor", "-m paddle_kv env --json", "./paddle-kv doctor"])
def test_the_command_without_a_library_says_it_in_one_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "paddle-kv").write_text("from paddle_kv.cli.main import app\n\napp()\n")  # as pip makes it
    done = run_without_library(tmp_path, *command.split())
    assert done.returncode == 1 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line and "warnings.warn" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("paddle-kv: paddle_kv has no operators for Paddle ")
    assert lines[0].endswith("python setup_ops.py build")


def test_another_program_that_is_run_as_a_module_gets_the_error(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("try:\n    import paddle_kv.ops\nexcept ImportError:\n    pass\n")
    (tmp_path / "server" / "__main__.py").write_text("print('serves without it')\n")
    done = run_without_library(tmp_path, "-m", "server")
    assert (done.returncode, done.stdout) == (0, "serves without it\n")
