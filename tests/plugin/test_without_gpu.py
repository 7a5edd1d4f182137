"""Tensors of a device plugin, on a machine without a GPU: what the CPU touches of their memory ends the process.

The plugin is tools/device_plugin with a stand-in for the CUDA runtime. Whether the kernels work is for tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import paddle
import pytest

from paddle_kv import ops
from tools.device_plugin.build import build, cuda_home

ROOT = Path(__file__).resolve().parents[2]
VERSION = tuple(map(int, paddle.__version__.split(".")[:2]))
COUNT = "40"  # of each family of operators
QUESTIONS = {"build_info", "has_memcpy_batch_async", "is_stub_build"}
BY_ADDRESS = {"memcpy_batch", "vectorized_copy"}  # no tensors

pytestmark = [
    pytest.mark.skipif(VERSION < (3, 2), reason="the plugin is written for the devices of Paddle 3.2 and later"),
    pytest.mark.skipif(cuda_home() is None, reason="there are no headers of CUDA to build the plugin with"),
]


@pytest.fixture(scope="session")
def plugin() -> str:
    """The folder with the plugin."""
    return str(build(guarded=True))


def python(plugin: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUSTOM_DEVICE_ROOT": plugin, "GLOG_minloglevel": "2", **variables},
    )


def outcomes(plugin: str, *arguments: str, **variables: str) -> dict[str, int]:
    """How often each outcome was seen over all operators."""
    ran = python(plugin, "-m", "tests.plugin.operators", *arguments, **variables)
    assert ran.returncode == 0, f"ended with {ran.returncode} in {ran.stdout[-500:]} {ran.stderr[-2000:]}"
    told = json.loads(ran.stdout.splitlines()[-1])
    assert set(told["operators"]) == set(ops.__all__) - QUESTIONS - BY_ADDRESS
    return told["outcomes"]


def test_every_operator_says_that_it_cannot(plugin: str) -> None:
    seen = outcomes(plugin, COUNT)
    refused = "NotImplementedError" if ops.is_stub_build() else "cudaErrorInsufficientDriver"
    other_device = seen.pop("ValueError")
    assert set(seen) <= {refused, "done"}
    assert seen[refused] > other_device / 2 > 100
    assert seen["done"] < seen[refused]


def test_a_device_that_is_not_cudas_is_refused(plugin: str) -> None:
    """With CUDA's operators too: what is not a GPU is not host memory either."""
    seen = outcomes(plugin, COUNT, "npu_like", CUDA_LIKE_NAME="npu_like")
    assert set(seen) <= {"NotImplementedError", "ValueError", "done"}  # ValueError: not where the others are
    assert seen["NotImplementedError"] > 5 * (seen["done"] + seen["ValueError"])


def test_more_devices_can_be_named(plugin: str) -> None:
    seen = outcomes(plugin, COUNT, "new_gpu", CUDA_LIKE_NAME="new_gpu", PADDLE_KV_CUDA_DEVICES="old_gpu,new_gpu")
    assert ops.is_stub_build() or seen["cudaErrorInsufficientDriver"] > 50


HEAD = """
import warnings, zlib, paddle, numpy as np
from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, devices, ops, streams
spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
def error_of(what):
    try:
        return repr(what())
    except (ValueError, NotImplementedError, MemoryError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.fixture
def told(plugin: str, tmp_path: Path) -> Callable[..., list[str]]:
    """What a program prints."""

    def run(program: str, **variables: str) -> list[str]:
        path = tmp_path / "program.py"  # a tracer wants to read the source
        path.write_text(HEAD + program)
        ran = python(plugin, str(path), **variables)
        assert ran.returncode == 0, f"ended with {ran.returncode} {ran.stdout} {ran.stderr[-2000:]}"
        return ran.stdout.splitlines()

    return run


def test_names_of_the_gpu(told: Callable[..., list[str]]) -> None:
    program = """
print(devices.plugin(), devices.gpu_count(), devices.has_gpu(), devices.name_of(0), devices.place_of(0))
for name in (None, "gpu", "gpu:0", "cuda_like", "cuda_like:0"):
    cache = DeviceCache(spec, 5, name)
    print(cache.device_id, cache.tensor("key", 1).place, float(cache.tensor("key", 1).numpy().sum()))
print(error_of(lambda: DeviceCache(spec, 5, "gpu:1")))
warnings.simplefilter("error")  # a deprecated call of Paddle's
stream = paddle.device.current_stream("cuda_like:0").stream_base
print(stream.raw_stream == streams.paddle_stream(0) != 0)
"""
    first, *rest = told(program)
    assert first == "cuda_like 1 True cuda_like:0 Place(cuda_like:0)"
    assert rest[:5] == ["0 Place(cuda_like:0) 0.0"] * 5
    assert rest[5] == "ValueError: device = 'gpu:1' must name one of the 1 GPUs"
    assert rest[6] == "True"


def test_a_cache_elsewhere_is_refused(told: Callable[..., list[str]]) -> None:
    program = """
print(devices.plugin(), devices.has_gpu())
tensors = {name: [paddle.to_tensor(np.zeros((5, 1, 3, 4), "float32"), place=paddle.CustomPlace("npu_like", 0))
           for _ in range(2)] for name in ("key", "value")}
print(error_of(lambda: DeviceCache.adopt(spec, tensors)))
"""
    first, second = told(program, CUDA_LIKE_NAME="npu_like")
    assert first == "None False"
    assert second.startswith("NotImplementedError: a tensor is on npu_like:0, whose memory is not known to be CUDA's")


def test_the_scheduler(told: Callable[..., list[str]]) -> None:
    """The CPU's backend refuses the cache; the GPU's needs CuPy, a driver and operators with CUDA."""
    program = """
cache = DeviceCache(spec, 5, "gpu:0")
memory = {name: [np.zeros((8, *spec.block_shape(name)), "float32") for _ in range(2)] for name in spec.tensor_names}
pool = HostPool.adopt(spec, {name: [array.ctypes.data for array in layers] for name, layers in memory.items()}, 8)
print(error_of(lambda: LayerwiseScheduler(cache, pool, backend="cpu")))
print(error_of(lambda: LayerwiseScheduler(cache, pool)))
print(all(not cache.tensor(name, layer).numpy().any() for name in spec.tensor_names for layer in range(2)))
"""
    on_cpu, on_gpu, untouched = told(program)
    assert on_cpu == "ValueError: the device cache is on GPU 0; the cpu backend needs it on the CPU"
    assert on_gpu.partition(":")[0] in ("NotImplementedError", "ModuleNotFoundError", "CudaError")
    assert untouched == "True"


def test_a_traced_program(told: Callable[..., list[str]]) -> None:
    program = """
cache = DeviceCache(spec, 5, "gpu:0").tensor("key", 0)
def copy(cache):
    return ops.copy_blocks(cache, None, [(0, 1)])
run = paddle.jit.to_static(copy, full_graph=True)
print(error_of(lambda: run(cache)))
"""
    said, *_ = told(program)
    assert said.startswith("NotImplementedError" if ops.is_stub_build() else ("CudaError", "OSError"))


def test_doctor_and_environment(plugin: str) -> None:
    for command, codes in (("doctor", (1,)), ("env", (0,))):
        ran = python(plugin, "-m", "paddle_kv", command)
        assert ran.returncode in codes, ran.stdout + ran.stderr
