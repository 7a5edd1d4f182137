"""Facts about this machine and this installation, for bug reports and for the head of a benchmark."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from typing import Any

from .. import __version__, ops
from ..devices import has_gpu
from ..memory.host_memory import available_bytes

PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "numpy")


def collect() -> dict[str, Any]:
    """Versions, the build, GPUs, memory. Each probe stands alone: what fails is reported as its error."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "paddle_kv": _own_version(),
        "packages": {name: _version(name) for name in PACKAGES if _version(name)},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("PADDLE_KV_")},
        "build": ops.build_info(),
        "gpus": _gpus(),
        "host_memory_available_bytes": available_bytes(),
        "locked_memory_limit_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def summary() -> dict[str, Any]:
    """The few facts that belong beside a measurement."""
    gpus = _gpus()
    return {
        "device": gpus[0]["name"] if gpus and "name" in gpus[0] else platform.processor() or platform.machine(),
        "driver": gpus[0].get("driver_version", "") if gpus else "none",
        "paddle_kv": _own_version(),
        "paddle": ops.build_info()["paddle"],
    }


def _own_version() -> str:
    return _version("paddle_kv") or f"{__version__}, in place"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> list[dict[str, Any]]:
    if not has_gpu():
        return []
    try:
        import cupy

        runtime = cupy.cuda.runtime
        driver = runtime.driverGetVersion()
        return [
            {
                "name": properties["name"].decode(),
                "architecture": f"{properties['major']}{properties['minor']}",
                "memory_bytes": properties["totalGlobalMem"],
                "driver_version": f"{driver // 1000}.{driver % 1000 // 10}",
            }
            for properties in map(runtime.getDeviceProperties, range(runtime.getDeviceCount()))
        ]
    except Exception as error:  # noqa: BLE001  a report about a broken machine must still come out
        return [{"error": f"{type(error).__name__}: {error}"}]
