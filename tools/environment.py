"""Makes the virtual environment that the Makefile works in, builds the operators there, and runs Python in it.

    python3 tools/environment.py [--paddle auto|cpu|gpu|plugin] [--no-build] [-- arguments for Python ...]

The CPU build of Paddle lives in .venv, the GPU build in .venv-gpu; .venv-plugin holds the CPU build of Paddle 3 for a
machine with a GPU, which tools/device_plugin gives it, and operators with CUDA. What is there already is used again:
packages until the requirements change, the library until a source changes. Needs nothing but Python itself.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 12))
PADDLE = {"cpu": "paddlepaddle==3.3.1", "gpu": "paddlepaddle-gpu==2.6.2", "plugin": "paddlepaddle==3.3.1"}
ON_GPU = ("test", "cli", "plots", "metrics", "cuda")
EXTRAS = {"cpu": ("test", "dev", "cli", "plots", "metrics", "docs", "mooncake"), "gpu": ON_GPU, "plugin": ON_GPU}
WITHOUT_DEPENDENCIES = {"cpu": ("nixl>=1.5", "nixl-cu12>=1.5")}  # NIXL declares PyTorch and does not need it
VENV = {"cpu": ROOT / ".venv", "gpu": ROOT / ".venv-gpu", "plugin": ROOT / ".venv-plugin"}


class SetupError(Exception):
    """The environment cannot be made; the text says what to do."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    options.add_argument("--paddle", choices=("auto", *PADDLE), default="auto")
    options.add_argument("--no-build", action="store_true", help="the operators are not needed")
    options.usage = "environment.py [--paddle auto|cpu|gpu|plugin] [--no-build] [-- arguments for Python ...]"
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, arguments = options.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    use_a_known_python()
    try:
        kind = choose_paddle() if given.paddle == "auto" else given.paddle
        python = ready(kind)
        if kind == "plugin":
            os.environ["PADDLE_KV_REQUIRE_CUDA"] = "1"  # Paddle's own answer would be: no CUDA, and no GPU seen
            seen = subprocess_output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
            if seen:
                os.environ.setdefault("PADDLE_KV_CUDA_ARCHS", ";".join(sorted(set(seen.replace(".", "").split()))))
            os.environ["CUSTOM_DEVICE_ROOT"] = device_plugin(python)
        if not given.no_build:
            build(python, kind)
    except SetupError as error:
        sys.exit(f"paddle_kv: {error}")
    if arguments:
        os.chdir(ROOT)
        os.execv(python, [python, *arguments])


def use_a_known_python() -> None:
    """Goes on in Python 3.11 or 3.12, for which Paddle's wheels of both kinds exist."""
    if sys.version_info[:2] in PYTHONS:
        return
    for major, minor in PYTHONS:
        other = shutil.which(f"python{major}.{minor}")
        if other and subprocess.run([other, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
            os.execv(other, [other, *sys.argv])
    sys.exit(
        "paddle_kv: Python 3.11 or 3.12 is needed, this is {}.{} and neither python3.11 nor python3.12 is on PATH; "
        "name one: make PYTHON=/path/to/python3.12 ...".format(*sys.version_info)
    )


def ready(kind: str) -> str:
    """The Python of an environment that holds Paddle and all that tests and examples need."""
    venv = VENV[kind]
    python = venv / "bin" / "python"
    wanted = requirements(kind)
    alone = WITHOUT_DEPENDENCIES.get(kind, ())
    stamp = venv / "paddle_kv-ready"
    key = "\n".join([*wanted, *alone])
    if python.exists() and stamp.exists() and stamp.read_text() == key:
        return str(python)
    if not python.exists() or not stamp.exists():
        print(f"paddle_kv: making {venv.name}", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], stdout=subprocess.PIPE, text=True)
        if made.returncode:
            shutil.rmtree(venv, ignore_errors=True)
            raise SetupError(
                f"{sys.executable} cannot make a virtual environment; install its venv module (Debian: apt-get install "
                f"python3-venv)\n{made.stdout.strip()}"
            )
    print(f"paddle_kv: installing {PADDLE[kind]} and the tools into {venv.name} (once)", flush=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--prefer-binary"]
    for arguments in (["--quiet", "--upgrade", "pip", "setuptools"], wanted, ["--quiet", "--no-deps", *alone]):
        if arguments[-1] != "--no-deps" and subprocess.run([*pip, *arguments]).returncode:
            raise SetupError(f"pip could not install {', '.join(wanted)}; its message is above")
    stamp.write_text(key)
    return str(python)


def requirements(kind: str) -> list:
    import tomllib  # not in the Pythons that use_a_known_python() has to turn away

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    return [
        PADDLE[kind],
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(requirement for extra in EXTRAS[kind] for requirement in extras[extra]),
    ]


def build(python: str, kind: str) -> None:
    """Runs setup_ops.py unless nothing has changed since it last ran (itself it would first import Paddle)."""
    digest = hashlib.sha256()
    files = [path for path in (ROOT / "custom_ops").rglob("*") if path.is_file()]
    for path in sorted([*files, ROOT / "setup_ops.py", ROOT / "tools" / "toolchain.py"]):
        digest.update(str(path).encode() + path.read_bytes())
    names = ("CUDA_HOME", "CXX", "PADDLE_KV_CUDA_ARCHS", "PADDLE_KV_REQUIRE_CUDA", "PADDLE_KV_WERROR")
    digest.update(repr([os.environ.get(name) for name in names]).encode())
    stamp = VENV[kind] / "paddle_kv-built"
    library = ROOT / "paddle_kv" / "_lib" / f"paddle_kv_ops-paddle{PADDLE[kind].partition('==')[2]}.so"
    key = f"{digest.hexdigest()} {library.stat().st_mtime_ns if library.exists() else ''}"
    if library.exists() and stamp.exists() and stamp.read_text() == key:
        return
    if subprocess.run([python, str(ROOT / "setup_ops.py"), "build"]).returncode:
        raise SetupError("the operators were not built; the reason is above")
    # An activated environment finds the package and its command too.
    if not (VENV[kind] / "bin" / "paddle-kv").exists():
        pip = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--editable", str(ROOT)]
        installed = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if installed.returncode:
            raise SetupError(f"pip could not install paddle_kv:\n{installed.stdout}")
    stamp.write_text(f"{digest.hexdigest()} {library.stat().st_mtime_ns}")


def device_plugin(python: str) -> str:
    """The folder with the plugin, built for the Paddle of that Python."""
    command = [python, str(ROOT / "tools" / "device_plugin" / "build.py")]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        raise SetupError("the device plugin was not built; the reason is above")
    return built.stdout.strip()


def choose_paddle() -> str:
    """gpu where there is an NVIDIA GPU on which the GPU build of Paddle computes rightly, else cpu.

    The answer is kept in .venv-gpu: asking costs the download of that build.
    """
    gpu = subprocess_output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    if not gpu:
        return "cpu"
    if not (os.environ.get("CUDA_HOME") or shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        print("paddle_kv: there is a GPU, but no nvcc: using the CPU build of Paddle (PADDLE=gpu insists)", flush=True)
        return "cpu"
    answer = VENV["gpu"] / "paddle_kv-gpu-answer"
    question = f"{gpu}\n{PADDLE['gpu']}\n"
    if not answer.exists() or not answer.read_text().startswith(question):
        try:
            python = ready("gpu")
        except SetupError as error:
            print(f"paddle_kv: {error}; using the CPU build of Paddle", flush=True)
            return "cpu"
        wrong = subprocess.run([python, str(ROOT / "tools" / "check_paddle_gpu.py")]).returncode
        answer.write_text(question + ("cpu" if wrong else "gpu"))
    chosen = answer.read_text()[len(question) :]
    if chosen == "cpu":
        print(
            f"paddle_kv: {PADDLE['gpu']} gives wrong answers on {gpu.splitlines()[0].split(',')[0]}: "
            "using the CPU build of Paddle (PADDLE=gpu insists)",
            flush=True,
        )
    return chosen


def subprocess_output(command: list) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    main()
