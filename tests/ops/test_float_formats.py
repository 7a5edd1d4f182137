"""The conversions in the C++ header, compiled alone with the host compiler, against NumPy and ml_dtypes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference import float_formats as reference

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32"}
QUANTIZED = {"fp8_e4m3": "Fp8E4m3", "fp8_e5m2": "Fp8E5m2", "int8": "Int8", "paddle_uint8": "PaddleUint8"}
SCALES = [1.0, 0.5, 0.1, 3.0, 0.037, 448.0, 1e-30, 1e30]


# -O3 with every instruction of this machine: what is rounded twice must not become one fused step there.
@pytest.fixture(scope="module", params=["-O2", "-O3 -march=native"])
def header(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    subprocess.run(
        [*os.environ.get("CXX", "g++").split(), "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror",
         *request.param.split(),
         f"-I{ROOT}/custom_ops/include", str(Path(__file__).with_name("float_formats_probe.cc")), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def run(header: ctypes.CDLL, name: str, source: np.ndarray, dtype: Any, *scale: float) -> np.ndarray:
    result = np.empty(source.size, dtype)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (source, result)]
    getattr(header, name)(*pointers, ctypes.c_int64(source.size), *[ctypes.c_float(s) for s in scale])
    return result


@pytest.mark.parametrize("dtype", PLAIN)
def test_widening_is_exact(header: ctypes.CDLL, dtype: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    bits = reference.edge_floats().view(np.uint32) if dtype == "float32" else patterns
    with np.errstate(all="ignore"):
        expected = bits.view(reference.PLAIN_TYPES[dtype]).astype(np.float32)
    result = run(header, f"widen_{PLAIN[dtype]}", bits, np.float32)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(result[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    np.testing.assert_array_equal(np.isnan(result), ~numbers)
    np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))


@pytest.mark.parametrize("dtype", PLAIN)
def test_narrowing_rounds_to_nearest_even(header: ctypes.CDLL, dtype: str) -> None:
    values = reference.edge_floats()
    with np.errstate(all="ignore"):
        expected = values.astype(reference.PLAIN_TYPES[dtype])
    result = run(header, f"narrow_{PLAIN[dtype]}", values, reference.bits_type(dtype))
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(result[numbers], expected.view(result.dtype)[numbers])
    nans = result[~numbers].view(reference.PLAIN_TYPES[dtype]).astype(np.float32)
    assert np.isnan(nans).all()
    np.testing.assert_array_equal(np.signbit(nans), np.signbit(values[~numbers]))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", QUANTIZED)
def test_quantizing(header: ctypes.CDLL, form: str, scale: float) -> None:
    values = reference.edge_floats()
    result = run(header, f"quantize_{QUANTIZED[form]}", values, np.uint8, scale)
    np.testing.assert_array_equal(result, reference.quantize(values, scale, form))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", QUANTIZED)
def test_every_code_is_decoded_exactly(header: ctypes.CDLL, form: str, scale: float) -> None:
    codes = np.arange(256, dtype=np.uint8)
    result = run(header, f"dequantize_{QUANTIZED[form]}", codes, np.float32, scale)
    expected = reference.dequantize(codes, scale, form, "float32")
    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("form", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_survives_decoding_and_encoding(header: ctypes.CDLL, form: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = run(header, f"dequantize_{QUANTIZED[form]}", codes, np.float32, 1.0)
    again = run(header, f"quantize_{QUANTIZED[form]}", values, np.uint8, 1.0)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(again[finite], codes[finite])


@pytest.mark.parametrize("form", QUANTIZED)
def test_a_scale_that_makes_nan_gives_the_sign_of_the_value(header: ctypes.CDLL, form: str) -> None:
    """0 / 0 and infinity / infinity have a sign of their own on each processor."""
    values = np.array([0.0, -0.0, np.inf, -np.inf], np.float32)
    scales = [0.0, 0.0, np.inf, np.inf] if form != "paddle_uint8" else [np.inf, np.inf, 0.0, 0.0]
    results = [
        int(run(header, f"quantize_{QUANTIZED[form]}", values[i : i + 1], np.uint8, s)[0]) for i, s in enumerate(scales)
    ]
    expected = {"fp8_e4m3": [0x7F, 0xFF] * 2, "fp8_e5m2": [0x7E, 0xFE] * 2, "int8": [0] * 4, "paddle_uint8": [128] * 4}
    assert results == expected[form]
