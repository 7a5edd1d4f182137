"""The conversions as they are compiled for GPUs without instructions for fp8, which this GPU can run too."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import float_formats

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"fp8_e4m3": "Fp8E4m3", "fp8_e5m2": "Fp8E5m2", "int8": "Int8", "paddle_uint8": "PaddleUint8"}
PLAIN_NAMES = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32"}


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which(f"{home}/bin/nvcc" if home else "nvcc")


@pytest.fixture(scope="module", params=["75", "80", "89"])
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import cupy

    compiler = nvcc()
    if compiler is None:
        pytest.skip("needs nvcc")
    ptx = tmp_path_factory.mktemp("ptx") / "quantize_probe.ptx"
    source = Path(__file__).parent / "quantize_probe.cu"
    subprocess.run(
        [compiler, "-ptx", "-O3", "-std=c++17", "-w", f"-arch=compute_{request.param}",
         f"-I{ROOT / 'custom_ops' / 'include'}", str(source), "-o", str(ptx)],
        check=True, timeout=300,
    )  # fmt: skip
    return cupy.RawModule(path=str(ptx))


def plain_values(dtype: str) -> np.ndarray:
    """All patterns of 16 bits, or as many random ones of 32 with those that are special."""
    kind = float_formats.PLAIN_TYPES[dtype]
    if np.dtype(kind).itemsize == 2:
        return np.arange(65536, dtype=np.uint16).view(kind)
    bits = np.random.default_rng(0).integers(0, 2**32, 65536, np.uint32)
    bits[:8] = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 1, 0x7F7FFFFF]
    return bits.view(np.float32)


def run(module: Any, name: str, source: np.ndarray, result_dtype: Any, words: int, scale: float) -> np.ndarray:
    import cupy

    given = cupy.asarray(source.view(np.uint8))
    size = np.dtype(result_dtype).itemsize * len(source)
    result = cupy.full(size, 0xDE, np.uint8)
    arguments = (given, result, np.int32(words), np.float32(scale))
    module.get_function(name)((-(-words // 256),), (256,), arguments)
    return cupy.asnumpy(result)


@pytest.mark.parametrize("scale", [1.0, 0.37, 250.0, 1e-30, 1e38])
@pytest.mark.parametrize("dtype", list(PLAIN_NAMES))
@pytest.mark.parametrize("form", list(NAMES))
def test_quantising(module: Any, dtype: str, form: str, scale: float) -> None:
    values = plain_values(dtype)
    words = values.nbytes // 16
    codes = run(module, f"encode_{PLAIN_NAMES[dtype]}_{NAMES[form]}", values, np.uint8, words, scale)
    np.testing.assert_array_equal(codes, float_formats.quantize(values, scale, form))


@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-30])
@pytest.mark.parametrize("dtype", list(PLAIN_NAMES))
@pytest.mark.parametrize("form", list(NAMES))
def test_dequantising(module: Any, dtype: str, form: str, scale: float) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 4)
    kind = float_formats.PLAIN_TYPES[dtype]
    words = len(codes) * np.dtype(kind).itemsize // 16
    bits = run(module, f"decode_{PLAIN_NAMES[dtype]}_{NAMES[form]}", codes, kind, words, scale)
    expected = np.asarray(float_formats.dequantize(codes, scale, form, dtype))
    np.testing.assert_array_equal(bits, expected.view(np.uint8))
