"""Builds the operators of paddle_kv into ``paddle_kv/_lib/``, one library per Paddle version.

    python setup_ops.py build        build in place, for the Paddle that this Python imports

With a Paddle that has CUDA (or with PADDLE_KV_REQUIRE_CUDA=1) the CUDA kernels are built too. PADDLE_KV_CUDA_ARCHS
("80;90") names the GPU architectures; MAX_JOBS the compilers that run at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
import paddle  # noqa: E402
from paddle.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402
from setuptools import setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

WITH_CUDA = paddle.is_compiled_with_cuda() or os.environ.get("PADDLE_KV_REQUIRE_CUDA") == "1"
LIBRARY = f"paddle_kv_ops-paddle{paddle.__version__}.so"


def sources():
    suffixes = (".cc", ".cu") if WITH_CUDA else (".cc",)
    found = [p for p in (ROOT / "custom_ops").rglob("*") if p.suffix in suffixes]
    return sorted(str(p.relative_to(ROOT)) for p in found)


def architectures():
    return os.environ.get("PADDLE_KV_CUDA_ARCHS", "90").split(";")


def commit():
    """The last commit that changed the operators: any other would make the library look out of date."""
    command = ["git", "log", "-1", "--format=%h", "--", "custom_ops"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def extension():
    archs = architectures()
    gencode = [f for a in archs for f in ("-gencode", f"arch=compute_{a},code=sm_{a}")]
    gencode += ["-gencode", f"arch=compute_{archs[-1]},code=compute_{archs[-1]}"]
    macros = [f"-DPADDLE_KV_PADDLE_MAJOR={paddle.__version__.split('.')[0]}"]
    macros += [f'-DPADDLE_KV_BUILT_COMMIT="{commit()}"']
    if WITH_CUDA:
        macros += ["-DPADDLE_KV_WITH_CUDA", f'-DPADDLE_KV_BUILT_CUDA_ARCHS="{";".join(archs)}"']
    made = (CUDAExtension if WITH_CUDA else CppExtension)(
        sources=sources(),
        include_dirs=[str(ROOT / "custom_ops" / "include")],
        extra_compile_args={
            "cxx": ["-O2", "-g0", "-std=c++17", "-w", "-DPADDLE_WITH_CUSTOM_KERNEL", *macros],
            "nvcc": ["-O3", "-std=c++17", "-w", *gencode],
        },
        extra_link_args=["-Wl,-z,now"],
    )
    made.name = "paddle_kv_ops"  # 2.6 does not take the name as an argument
    made.runtime_library_dirs = []
    if "-lcudart" in made.extra_link_args:
        made.extra_link_args.remove("-lcudart")
        made.extra_link_args += ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return made


class Build(BuildExtension):
    def finalize_options(self):
        super().finalize_options()
        self.inplace = False
        self.build_lib = str(ROOT / "build" / LIBRARY.removesuffix(".so"))

    def run(self):
        build_ext.run(self)
        target = ROOT / "paddle_kv" / "_lib"
        target.mkdir(exist_ok=True)
        built = target / (LIBRARY + ".tmp")
        shutil.copy(self.get_ext_fullpath("paddle_kv_ops"), built)
        built.rename(target / LIBRARY)
        print(f"built {target / LIBRARY}")


setup(name="paddle_kv", version="0.1.0", packages=[], ext_modules=[extension()], cmdclass={"build_ext": Build})
