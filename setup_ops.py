"""Builds the operators of paddle_kv, one library per Paddle version, named after it.

    python setup_ops.py build        build in place, into paddle_kv/_lib/, for the Paddle that this Python imports
    pip install --no-build-isolation .        one wheel with the package and that library

With a Paddle that has CUDA the CUDA kernels are built too. The environment:

    PADDLE_KV_CUDA_ARCHS      GPU architectures, "80;90"; default: the GPU seen, else 80, 86, 89, 90, 100 and 120
    PADDLE_KV_REQUIRE_CUDA    1: build the CUDA kernels with any Paddle, and fail without nvcc
    CUDA_HOME, CXX            the CUDA toolkit and the C++ compiler to use
    MAX_JOBS                  compilers that run at once; default: one for each core
    PADDLE_KV_WERROR          1: a warning of a compiler is an error
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402  The first import of Paddle happens in there

try:
    TOOLS = toolchain.find()
except toolchain.BuildError as error:
    sys.exit(f"paddle_kv: {error}")

from paddle.sysconfig import get_include as paddle_include  # noqa: E402
from paddle.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402
from setuptools import setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

NAME = "paddle_kv_ops"
LIBRARY = f"{NAME}-paddle{TOOLS.paddle}.so"
WITH_CUDA = TOOLS.cuda_home is not None
# Warnings are about our own files: the headers of others are the system's, though setuptools names them with -I too.
OTHERS = [paddle_include(), f"{paddle_include()}/third_party", *([f"{TOOLS.cuda_home}/include"] if WITH_CUDA else [])]
WARNINGS = {
    "cxx": ["-Wall", "-Wextra", *(f"-isystem{folder}" for folder in OTHERS)],
    "nvcc": ["-Xcompiler", "-Wall,-Wextra", *(word for folder in OTHERS for word in ("-isystem", folder))],
}
if os.environ.get("PADDLE_KV_WERROR") == "1":
    WARNINGS["cxx"] += ["-Werror"]
    WARNINGS["nvcc"] += ["-Werror", "all-warnings", "-Xcompiler", "-Werror"]
WORK = ROOT / "build" / f"{NAME}-paddle{TOOLS.paddle}-{'cuda' if WITH_CUDA else 'cpu'}"


def sources() -> list[str]:
    """C++ of folders called "cuda" calls CUDA; only files with code for a GPU are left to nvcc."""
    found = [path for path in (ROOT / "custom_ops").rglob("*") if path.suffix in (".cc", ".cu")]
    if not WITH_CUDA:
        found = [path for path in found if path.suffix == ".cc" and path.parent.name != "cuda"]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def commit() -> str:
    """The last commit that changed the operators (any other would make the library look out of date), and whether what
    is built is something else."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", "custom_ops"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        last = git("log", "-1", "--format=%h")
        return f"{last}-modified" if last and git("status", "--porcelain") else last
    except (OSError, subprocess.CalledProcessError):
        return ""


def extension():
    archs = [str(number) for number in TOOLS.architectures]
    gencode = [flag for arch in archs for flag in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    macros = ["-DPADDLE_WITH_CUSTOM_KERNEL", f"-DPADDLE_KV_PADDLE_MAJOR={TOOLS.paddle_major}"]
    if WITH_CUDA:
        gencode += ["-gencode", f"arch=compute_{archs[-1]},code=compute_{archs[-1]}"]
        macros += ["-DPADDLE_KV_WITH_CUDA", f'-DPADDLE_KV_BUILT_CUDA_ARCHS="{";".join(archs)}"']
    made = (CUDAExtension if WITH_CUDA else CppExtension)(
        sources=sources(),
        include_dirs=[str(ROOT / "custom_ops" / "include"), str(WORK)],
        library_dirs=TOOLS.cudart_directories if WITH_CUDA else [],
        extra_compile_args={
            "cxx": ["-O2", "-g0", "-std=c++17", *WARNINGS["cxx"], *macros],
            "nvcc": ["-O3", "-std=c++17", *WARNINGS["nvcc"], *gencode],
        },
        # A symbol that this Paddle lacks has to show when the library is loaded, not end the process at the first call.
        extra_link_args=["-Wl,-z,now", f"-Wl,--version-script={ROOT / 'custom_ops' / 'exports.map'}"],
    )
    for flags in made.extra_compile_args.values():  # Paddle turns all warnings off
        flags[:] = [flag for flag in flags if flag != "-w"]
    made.name = NAME  # Paddle 2.6 does not take the name as an argument
    made.runtime_library_dirs = []  # Paddle is loaded before the library: no path into this machine is needed
    if WITH_CUDA:
        made.extra_link_args.remove("-lcudart")
        made.extra_link_args += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return made


class Build(BuildExtension):
    """Paddle's build into build/, from where the library alone is copied into the package or into the wheel."""

    def finalize_options(self):
        super().finalize_options()
        self.destination = (ROOT if self.inplace else Path(self.build_lib)) / "paddle_kv" / "_lib"
        self.key = self._key()  # taken here because Paddle adds to the flags while it builds
        self.inplace = False
        self.force = True
        self.build_lib = str(WORK)
        self.build_temp = "objects"

    def run(self):
        library, key_file = WORK / f"{NAME}.so", WORK / "key"
        if library.exists() and key_file.exists() and key_file.read_text() == self.key:
            print(f"paddle_kv: {LIBRARY} is up to date")
        else:
            # Paddle 3 drops compile errors; an object file left from an earlier build would then be linked.
            shutil.rmtree(WORK, ignore_errors=True)
            WORK.mkdir(parents=True)
            # A macro would go to every compiler call, and a cache of compiled files would miss after each commit.
            (WORK / "paddle_kv_commit.h").write_text(f'#define PADDLE_KV_BUILT_COMMIT "{commit()}"\n')
            build_ext.run(self)
            key_file.write_text(self.key)
            print(f"paddle_kv: built {LIBRARY}")
        self.destination.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, self.destination / (LIBRARY + ".tmp"))
        (self.destination / (LIBRARY + ".tmp")).rename(self.destination / LIBRARY)

    def _key(self) -> str:
        """Changes with everything that the library is made from."""
        digest = hashlib.sha256(TOOLS.versions.encode())
        made = self.distribution.ext_modules[0]
        digest.update(repr((made.extra_compile_args, made.extra_link_args, made.include_dirs, commit())).encode())
        for path in sorted(path for path in (ROOT / "custom_ops").rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
        return digest.hexdigest()

    def build_extensions(self):
        run_name = "call" if hasattr(self.compiler, "call") else "spawn"  # renamed by setuptools 84
        run, failed, position = getattr(self.compiler, run_name), [], itertools.count(1)
        total = len(self.extensions[0].sources)
        jobs = int(os.environ.get("MAX_JOBS", str(os.cpu_count())))
        put_off = []  # commands of Paddle 2, which would run one compiler at a time

        def run_or_put_off(command, **options):
            source = next((word for word in command if word.endswith((".cc", ".cu"))), None)
            if source and TOOLS.paddle_major == 2:
                put_off.append(functools.partial(run_and_tell, source, list(command), **options))
                return
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                list(pool.map(lambda one: None if failed else one(), put_off))  # raises what one of them does
            put_off.clear()
            run_and_tell(source, command, **options)

        def run_and_tell(source, command, **options):
            started = time.monotonic()
            try:
                run(command, **options)
            except Exception:
                failed.append(os.path.relpath(source, ROOT) if source else "the library (linking)")
                raise
            step = f"[{next(position)}/{total}] {os.path.relpath(source, ROOT)}" if source else "linked"
            print(f"  {step}  {time.monotonic() - started:.1f} s", file=out, flush=True)

        out = sys.stdout
        cuda = f"CUDA for {';'.join(map(str, TOOLS.architectures))}" if WITH_CUDA else "CPU only"
        print(f"paddle_kv: compiling {total} files for Paddle {TOOLS.paddle}, {cuda}", flush=True)
        setattr(self.compiler, run_name, run_or_put_off)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # Paddle repeats each path and hint
                super().build_extensions()
        except Exception:
            if not failed:
                raise
        if failed:
            raise toolchain.BuildError(f"not compiled: {failed[0]} (the compiler's message is above)")


os.chdir(ROOT)  # setuptools looks for pyproject.toml and the sources where it runs
if len(sys.argv) < 2:
    sys.exit(__doc__)
WHEEL_FILES = ROOT / "build" / "wheel"
shutil.rmtree(WHEEL_FILES, ignore_errors=True)  # a file that has left the package must not stay in the wheel
# "build" means in place: nothing but the library is of use outside a wheel.
arguments = ["-q", "build_ext", "--inplace"] if sys.argv[1:] == ["build"] else sys.argv[1:]
try:
    setup(
        script_args=arguments,
        ext_modules=[extension()],
        cmdclass={"build_ext": Build},
        options={"build": {"build_base": str(WHEEL_FILES)}},
    )
except toolchain.BuildError as error:
    sys.exit(f"paddle_kv: {error}")
