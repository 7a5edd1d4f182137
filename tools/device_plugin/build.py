#!/usr/bin/env python3
"""Builds the device plugin for the Paddle that this Python imports, and prints the folder for CUSTOM_DEVICE_ROOT.

    CUSTOM_DEVICE_ROOT=$(python tools/device_plugin/build.py) python ...
    python tools/device_plugin/build.py --guarded

With --guarded the CUDA runtime is replaced by a stand-in that needs no GPU (see guarded_cuda.cc). Needs g++, Paddle 3.2
or later and CUDA's headers (CUDA_HOME). What is built is kept under build/ until a source or Paddle changes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libpaddle_cuda_like.so"


def cuda_home() -> Path | None:
    """A folder with CUDA's headers."""
    nvcc = shutil.which("nvcc")
    found = (os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda")
    homes = (Path(home) for home in found if home)
    return next((home for home in homes if (home / "include" / "cuda_runtime_api.h").exists()), None)


def build(guarded: bool = False) -> Path:
    """The folder with the plugin.

    Raises:
        RuntimeError: what it takes is missing.
    """
    home, spec = cuda_home(), importlib.util.find_spec("paddle")  # which does not import it
    if home is None:
        raise RuntimeError("there are no headers of CUDA here; name them with CUDA_HOME")
    if spec is None or spec.origin is None:
        raise RuntimeError("this Python has no Paddle")
    paddle = Path(spec.origin).parent
    include = paddle / "include"
    sources = [HERE / "cuda_device.cc", HERE / "cuda_device_kernels.cc", *([HERE / "guarded_cuda.cc"] * guarded)]
    command = [os.environ.get("CXX", "g++"), "-O1", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += ["-DPADDLE_WITH_CUSTOM_DEVICE", "-DPADDLE_WITH_CUSTOM_KERNEL", *map(str, sources)]
    for folder in (include, include / "third_party", home / "include"):
        command += ["-I", str(folder)]
    command += ["-L", str(paddle / "libs"), "-l:libphi_core.so", "-l:libcommon.so"]
    if not guarded:
        command += [f"-L{home / part}" for part in ("lib64", "targets/x86_64-linux/lib", "lib")]
        command += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    key = hashlib.sha256(repr(command).encode() + (paddle / "version" / "__init__.py").read_bytes())
    for source in sources:
        key.update(source.read_bytes())
    kind = "guarded" if guarded else "cuda"
    folder = HERE.parents[1] / "build" / "device_plugin" / f"{kind}-{key.hexdigest()[:16]}"
    if not (folder / LIBRARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder.parent / f"{folder.name}-{os.getpid()}.so"  # beside it: Paddle loads each library in the folder
        if subprocess.run([*command, "-o", str(made)]).returncode:
            raise RuntimeError("the plugin was not compiled; the compiler's message is above")
        made.rename(folder / LIBRARY)
    return folder


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--guarded", action="store_true", help="without a GPU: a stand-in for the CUDA runtime")
    try:
        print(build(options.parse_args().guarded))
    except RuntimeError as error:
        sys.exit(f"build: {error}")


if __name__ == "__main__":
    main()
