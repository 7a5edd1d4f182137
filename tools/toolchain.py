"""Finds what the operators are compiled with: Paddle, a C++ compiler, nvcc, and the GPU architectures to compile for.

Whatever is missing or does not fit ends as a BuildError, whose text is one sentence for the person who builds.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from dataclasses import dataclass
from pathlib import Path

OLDEST_PADDLE = (2, 6)
OLDEST_SETUPTOOLS = 77  # the first that reads pyproject.toml's licence expression
DEFAULT_ARCHITECTURES = (80, 86, 89, 90, 100, 120)


class BuildError(Exception):
    """The operators cannot be built here; the text says what to change."""


@dataclass(frozen=True)
class Toolchain:
    """What the library is built for and with. Without CUDA, ``cuda_home`` is None and ``architectures`` empty."""

    paddle: str
    compiler: str
    cuda_home: Path | None
    architectures: tuple[int, ...]
    versions: str

    @property
    def paddle_major(self) -> int:
        return int(self.paddle.split(".")[0]) or 3  # nightly wheels call themselves 0.0.0

    @property
    def cudart_directories(self) -> list[str]:
        """Where libcudart_static.a is; empty if it is among the linker's own directories."""
        assert self.cuda_home is not None
        candidates = [self.cuda_home / part for part in ("lib64", "targets/x86_64-linux/lib", "lib")]
        return [str(path) for path in candidates if (path / "libcudart_static.a").exists()][:1]


def find() -> Toolchain:
    """The toolchain for the Paddle that this Python imports.

    Raises:
        BuildError: something is missing or does not fit.
    """
    cuda_home = _cuda_home()
    if cuda_home is not None:
        os.environ["CUDA_HOME"] = str(cuda_home)  # Paddle reads it while it is imported
    paddle = _import_paddle()
    compiler = _compiler()
    required = os.environ.get("PADDLE_KV_REQUIRE_CUDA") == "1"
    if not required and not paddle.is_compiled_with_cuda():
        return Toolchain(paddle.__version__, compiler, None, (), _first_line([*shlex.split(compiler), "--version"]))
    if cuda_home is None:
        if required:
            raise BuildError(f"PADDLE_KV_REQUIRE_CUDA=1, but {_no_nvcc()}")
        print(
            f"paddle_kv: Paddle {paddle.__version__} has CUDA, but {_no_nvcc()}; "
            "building for CPU tensors only, GPU tensors will be refused (PADDLE_KV_REQUIRE_CUDA=1 makes this an error)",
            flush=True,
        )
        return Toolchain(paddle.__version__, compiler, None, (), _first_line([*shlex.split(compiler), "--version"]))
    nvcc = cuda_home / "bin" / "nvcc"
    architectures = choose_architectures(
        os.environ.get("PADDLE_KV_CUDA_ARCHS", ""), _known_to(nvcc), _seen(paddle), str(nvcc)
    )
    versions = _first_line([*shlex.split(compiler), "--version"]) + _output([str(nvcc), "--version"])
    made = Toolchain(paddle.__version__, compiler, cuda_home, architectures, versions)
    _check_nvcc(nvcc)
    _check_cudart(made)
    return made


def choose_architectures(asked: str, known: set[int], seen: set[int], nvcc: str) -> tuple[int, ...]:
    """The architectures to compile for, ascending: those asked for, else of the GPUs seen, else the usual ones."""
    legal = ";".join(map(str, sorted(known)))
    if asked.strip():
        words = [word for word in re.split(r"[;,\s]+", asked.strip()) if word]
        wrong = [word for word in words if not re.fullmatch(r"\d{2,3}|\d{1,2}\.\d", word)]
        if wrong or not words:
            raise BuildError(
                f'PADDLE_KV_CUDA_ARCHS is "{asked}", where {wrong or "nothing"} is no architecture; '
                f'a list such as "80;90" out of {legal} is expected'
            )
        chosen = {int(word.replace(".", "")) for word in words}
        if chosen - known:
            raise BuildError(
                f'PADDLE_KV_CUDA_ARCHS is "{asked}", but {nvcc} knows no {sorted(chosen - known)}, only {legal}'
            )
    elif seen:
        chosen = seen
        if chosen - known:
            raise BuildError(
                f"a GPU here has architecture {sorted(chosen - known)}, but {nvcc} knows {legal} only; install a CUDA "
                "toolkit for this GPU or name the architectures to build for in PADDLE_KV_CUDA_ARCHS"
            )
    else:
        chosen = set(DEFAULT_ARCHITECTURES) & known
        if not chosen:
            raise BuildError(f"{nvcc} knows none of {list(DEFAULT_ARCHITECTURES)}, only {legal}")
    return tuple(sorted(chosen))


def _import_paddle():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that ccache is missing, that there is no GPU
            import paddle
            import setuptools
    except ImportError as error:
        raise BuildError(
            f"{sys.executable} cannot import Paddle ({error}); install paddlepaddle or paddlepaddle-gpu "
            "into it first, and build with pip's --no-build-isolation"
        ) from None
    if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
        raise BuildError(
            f"setuptools {setuptools.__version__} of {sys.executable} is too old; it takes {OLDEST_SETUPTOOLS} or "
            f"later: pip install 'setuptools>={OLDEST_SETUPTOOLS}'"
        )
    version = tuple(int(part) for part in re.findall(r"\d+", paddle.__version__)[:2])
    if (0, 0) < version < OLDEST_PADDLE:
        raise BuildError(f"Paddle {paddle.__version__} is too old; 2.6 or later is needed")
    return paddle


def _compiler() -> str:
    compiler = os.environ.setdefault("CXX", "g++")
    os.environ.setdefault("CC", compiler)  # older setuptools compile C++ with it
    command = shlex.split(compiler)
    if shutil.which(command[0]) is None:
        raise BuildError(f"the C++ compiler {command[0]} is not installed; install g++ or name another one in CXX")
    program = "#include <memory>\nint main() { if constexpr (true) return 0; }\n"
    tried = _try([*command, "-std=c++17", "-x", "c++", "-fsyntax-only", "-"], program)
    if tried.returncode:
        raise BuildError(f"{compiler} does not compile C++17: {_first_error(tried.stderr)}")
    return compiler


def _cuda_home() -> Path | None:
    """The toolkit named by CUDA_HOME, else that of the nvcc on PATH, in /usr/local/cuda or installed by pip."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named) if (Path(named) / "bin" / "nvcc").exists() else None
    found = [Path(path) for path in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc") if path]
    found += [nvcc for path in sys.path for nvcc in sorted(Path(path).glob("nvidia/cu[0-9]*/bin/nvcc"))]
    for nvcc in found:
        if nvcc.exists():
            # The nvcc on PATH may be a script or a link: it knows best where its toolkit is.
            told = _try([str(nvcc), "--dryrun", "-x", "cu", "-c", "/dev/null"]).stderr
            top = re.search(r"^#\$ TOP=(.*)$", told, re.M)
            return Path(top[1]).resolve() if top else nvcc.resolve().parent.parent
    return None


def _no_nvcc() -> str:
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return f"there is no nvcc in {named}/bin, the toolkit that CUDA_HOME names"
    return "no nvcc was found (CUDA_HOME, PATH, /usr/local/cuda, or pip's nvidia-cuda-nvcc)"


def _known_to(nvcc: Path) -> set[int]:
    listed = _try([str(nvcc), "--list-gpu-arch"])
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", listed.stdout)}
    if not known:
        raise BuildError(f"{nvcc} does not list its architectures; CUDA 11.8 or later is needed")
    return known


def _seen(paddle) -> set[int]:
    """The architectures of the GPUs here. Never touches a GPU place: without a GPU, Paddle 2.6 exits for that."""
    if shutil.which("nvidia-smi"):
        listed = _try(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).stdout
        seen = {int(major + minor) for major, minor in re.findall(r"^(\d+)\.(\d)\s*$", listed, re.M)}
        if seen:
            return seen
    if not paddle.is_compiled_with_cuda():
        return set()
    capabilities = (paddle.device.cuda.get_device_capability(i) for i in range(paddle.device.cuda.device_count()))
    return {10 * major + minor for major, minor in capabilities}


def _check_nvcc(nvcc: Path) -> None:
    # -ccbin cc is how Paddle calls it.
    tried = _try([str(nvcc), "-std=c++17", "-ccbin", "cc", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"])
    if tried.returncode:
        raise BuildError(f"{nvcc} does not compile C++17 here: {_first_error(tried.stderr + tried.stdout)}")


def _check_cudart(toolchain: Toolchain) -> None:
    if toolchain.cudart_directories:
        return
    library = "libcudart_static.a"
    if _output([*shlex.split(toolchain.compiler), f"-print-file-name={library}"]).strip() == library:
        raise BuildError(f"there is no {library} in {toolchain.cuda_home}; install CUDA's runtime for developers")


def _try(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error.strerror}") from None


def _output(command: list[str]) -> str:
    return _try(command).stdout


def _first_line(command: list[str]) -> str:
    return _output(command).partition("\n")[0]


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it says nothing")
