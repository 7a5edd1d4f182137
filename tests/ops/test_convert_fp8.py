"""convert_fp8 against NumPy and ml_dtypes, on all bit patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import Machine
from tests.reference import float_formats as reference

FORMATS = ["e4m3", "e5m2"]
PLAIN = list(reference.PLAIN_TYPES)
FP8_DTYPE = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
HAS_FP8 = hasattr(paddle, "float8_e4m3fn")

every_format = pytest.mark.parametrize("fp8_format", FORMATS)
every_plain = pytest.mark.parametrize("dtype", PLAIN)


def tensor(machine: Machine, array: np.ndarray) -> paddle.Tensor:
    """Paddle takes bfloat16 as uint16."""
    bits = array.view(np.uint16) if array.dtype == reference.PLAIN_TYPES["bfloat16"] else array
    return paddle.to_tensor(np.ascontiguousarray(bits), place=machine.place)


def bits(result: paddle.Tensor, dtype: Any) -> np.ndarray:
    return np.asarray(result.numpy()).view(dtype)


def every_value(dtype: str) -> np.ndarray:
    if dtype == "float32":
        return reference.edge_floats()
    return np.arange(65536, dtype=np.uint16).view(reference.PLAIN_TYPES[dtype])


@every_format
@every_plain
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0, 64.0, 1e-30, 1e30])
def test_every_value_to_fp8(machine: Machine, dtype: str, fp8_format: str, scale: float) -> None:
    values = every_value(dtype)
    result = ops.convert_fp8(tensor(machine, values), to="fp8", fp8_format=fp8_format, scale=scale)
    assert str(result.dtype) == f"paddle.{FP8_DTYPE[fp8_format] if HAS_FP8 else 'uint8'}"
    np.testing.assert_array_equal(bits(result, np.uint8), reference.quantize(values, scale, f"fp8_{fp8_format}"))


@every_format
@every_plain
def test_many_values_to_fp8(machine: Machine, dtype: str, fp8_format: str) -> None:
    """Enough for several threads, and for the table of a 16-bit format."""
    values = np.resize(every_value(dtype), 5 * 65536 * 3 + 7)
    result = ops.convert_fp8(tensor(machine, values), to="fp8", fp8_format=fp8_format, scale=0.3)
    np.testing.assert_array_equal(bits(result, np.uint8), reference.quantize(values, 0.3, f"fp8_{fp8_format}"))


@every_format
@every_plain
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0, 1e-30, 1e-44, 3e38])
@pytest.mark.parametrize("repeats", [1, 4099])
def test_every_code_from_fp8(machine: Machine, dtype: str, fp8_format: str, scale: float, repeats: int) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), repeats)
    result = ops.convert_fp8(tensor(machine, codes), to=dtype, fp8_format=fp8_format, scale=scale)
    expected = reference.dequantize(codes, scale, f"fp8_{fp8_format}", dtype)
    assert str(result.dtype) == f"paddle.{dtype}"
    np.testing.assert_array_equal(bits(result, reference.bits_type(dtype)), expected.view(reference.bits_type(dtype)))


@every_format
@pytest.mark.skipif(not HAS_FP8, reason="Paddle 2.6 has no fp8 dtypes")
def test_from_paddles_own_dtype(machine: Machine, fp8_format: str) -> None:
    codes = tensor(machine, np.arange(256, dtype=np.uint8))
    typed = codes.view(FP8_DTYPE[fp8_format])
    for to in PLAIN:
        expected = ops.convert_fp8(codes, to=to, fp8_format=fp8_format)
        result = ops.convert_fp8(typed, to=to, fp8_format=fp8_format)
        kind = reference.bits_type(to)
        np.testing.assert_array_equal(bits(result, kind), bits(expected, kind))
    other = FORMATS[1 - FORMATS.index(fp8_format)]
    with pytest.raises(ValueError, match=r"source has dtype float8_.*; uint8 or float8_"):
        ops.convert_fp8(typed, to="float32", fp8_format=other)


@every_format
@pytest.mark.parametrize("shape", [(1,), (3,), (15,), (16,), (17,), (5, 7), (2, 3, 5, 7), (1, 1, 1, 1, 1, 33)])
def test_any_shape(machine: Machine, fp8_format: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(0, 100, shape).astype(np.float16)
    codes = ops.convert_fp8(tensor(machine, values), to="fp8", fp8_format=fp8_format)
    expected = reference.quantize(values, 1.0, f"fp8_{fp8_format}")
    assert list(codes.shape) == list(shape)
    np.testing.assert_array_equal(bits(codes, np.uint8), expected)
    back = ops.convert_fp8(codes, to="float32", fp8_format=fp8_format)
    assert list(back.shape) == list(shape)
    np.testing.assert_array_equal(back.numpy(), reference.dequantize(expected, 1.0, f"fp8_{fp8_format}", "float32"))


@every_plain
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_addresses_that_are_no_multiple_of_a_word(machine: Machine, dtype: str, rows: int) -> None:
    """A slice of rows of 3 elements begins anywhere."""
    values = np.random.default_rng(1).normal(0, 10, (rows + 50, 3)).astype(reference.PLAIN_TYPES[dtype])
    whole = tensor(machine, values)
    codes = ops.convert_fp8(whole[rows:], to="fp8", scale=0.7)
    expected = reference.quantize(values[rows:], 0.7, "fp8_e4m3")
    np.testing.assert_array_equal(bits(codes, np.uint8), expected)
    all_codes = tensor(machine, np.tile(expected, (2, 1)))
    back = ops.convert_fp8(all_codes[rows:], to=dtype, scale=0.7)
    kind = reference.bits_type(dtype)
    by_reference = reference.dequantize(np.tile(expected, (2, 1))[rows:], 0.7, "fp8_e4m3", dtype)
    np.testing.assert_array_equal(bits(back, kind), by_reference.view(kind))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
@pytest.mark.parametrize("to", ["fp8", "float16"])
def test_no_elements(machine: Machine, shape: tuple[int, ...], to: str) -> None:
    source = tensor(machine, np.zeros(shape, np.float32 if to == "fp8" else np.uint8))
    result = ops.convert_fp8(source, to=to)
    expected = to if to != "fp8" else FP8_DTYPE["e4m3"] if HAS_FP8 else "uint8"
    assert (list(result.shape), str(result.dtype)) == (list(shape), f"paddle.{expected}")
    with pytest.raises(ValueError, match="source has dtype"):
        ops.convert_fp8(tensor(machine, np.zeros(shape, np.int32)), to=to)


def test_scale_in_a_tensor(machine: Machine) -> None:
    values = np.random.default_rng(2).normal(0, 10, (7, 9)).astype(np.float32)
    scale = paddle.to_tensor(np.array([0.3], np.float32), place=machine.place)
    codes = ops.convert_fp8(tensor(machine, values), to="fp8", scale=scale)
    np.testing.assert_array_equal(bits(codes, np.uint8), reference.quantize(values, 0.3, "fp8_e4m3"))
    back = ops.convert_fp8(codes, to="float32", scale=scale)
    np.testing.assert_array_equal(back.numpy(), reference.dequantize(bits(codes, np.uint8), 0.3, "fp8_e4m3", "float32"))


@pytest.mark.parametrize("scale", [0.0, -1.0, -0.5, np.inf, np.nan])
def test_extreme_scales_in_a_tensor(machine: Machine, scale: float) -> None:
    """A tensor may hold anything; NaN then has the sign of the value, whatever the processor makes of 0 / 0."""
    values = np.array([1.0, -1.0, 0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-40, 3e38], np.float32)
    by = paddle.to_tensor(np.array([scale], np.float32), place=machine.place)
    codes = bits(ops.convert_fp8(tensor(machine, values), to="fp8", scale=by), np.uint8)
    with np.errstate(all="ignore"):
        quotient = values / np.float32(scale)
    is_nan = np.isnan(quotient)
    np.testing.assert_array_equal(codes[is_nan], np.where(np.signbit(values[is_nan]), 0xFF, 0x7F))
    np.testing.assert_array_equal(codes[~is_nan], reference.quantize(values, scale, "fp8_e4m3")[~is_nan])


def test_the_source_stays_as_it_is(machine: Machine) -> None:
    values = every_value("float16")
    source = tensor(machine, values)
    ops.convert_fp8(source, to="fp8", scale=0.5)
    np.testing.assert_array_equal(bits(source, np.uint16), values.view(np.uint16))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"to": "fp4"}, ValueError, 'to = "fp4" must be "fp8", "float16", "bfloat16" or "float32"'),
        ({"to": 8}, TypeError, "to is 8; a string is expected"),
        ({"fp8_format": "e3m4"}, ValueError, 'fp8_format = "e3m4" must be "e4m3" or "e5m2"'),
        ({"to": "float16"}, ValueError, "dtype float32; uint8"),
        ({"scale": 0.0}, ValueError, "scale = 0.0 must be positive and finite in float32"),
        ({"scale": -1}, ValueError, "scale = -1 must be positive"),
        ({"scale": float("nan")}, ValueError, "must be positive and finite"),
        ({"scale": 1e39}, ValueError, "must be positive and finite"),
        ({"scale": "1"}, TypeError, "scale is str; a number or a float32 tensor is expected"),
        ({"scale": None}, TypeError, "scale is NoneType"),
        ({"source": np.zeros(3, np.float32)}, TypeError, "source is ndarray; a paddle.Tensor is expected"),
    ],
)  # fmt: skip
def test_errors(machine: Machine, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    source = tensor(machine, np.ones(3, np.float32))
    arguments: dict[str, Any] = {"source": source, "to": "fp8"} | changed
    with pytest.raises(error, match=message):
        ops.convert_fp8(arguments.pop("source"), **arguments)
    np.testing.assert_array_equal(bits(ops.convert_fp8(source, to="fp8"), np.uint8), [0x38] * 3)


def test_tensors_that_do_not_fit(machine: Machine) -> None:
    source = tensor(machine, np.ones((3, 4), np.float32))
    with pytest.raises(ValueError, match="source is not contiguous"):
        ops.convert_fp8(source.transpose([1, 0]), to="fp8")
    with pytest.raises(ValueError, match="source has dtype int32; float16, bfloat16 or float32"):
        ops.convert_fp8(tensor(machine, np.ones(3, np.int32)), to="fp8")
    with pytest.raises(ValueError, match=r"scale has shape \[2\]; one value is expected"):
        ops.convert_fp8(source, to="fp8", scale=tensor(machine, np.ones(2, np.float32)))
    with pytest.raises(ValueError, match="scale has dtype float64; float32 is expected"):
        ops.convert_fp8(source, to="fp8", scale=tensor(machine, np.ones(1)))


@pytest.mark.parametrize("full_graph", [True, False])
def test_in_a_traced_program(machine: Machine, full_graph: bool) -> None:
    values = np.random.default_rng(3).normal(0, 100, (5, 7)).astype(np.float32)
    scale = tensor(machine, np.array([0.5], np.float32))

    def there_and_back(source: paddle.Tensor, by: paddle.Tensor) -> paddle.Tensor:
        codes = ops.convert_fp8(source, to="fp8", scale=by)
        numbers = ops.convert_fp8(codes, to="float16", scale=0.25)
        return numbers.reshape([5, 7])  # 2.6 asks the last operator for a gradient

    traced = paddle.jit.to_static(there_and_back, full_graph=full_graph)
    with paddle.no_grad():
        for _ in range(2):
            result = traced(tensor(machine, values), scale)
            codes = reference.quantize(values, 0.5, "fp8_e4m3")
            expected = reference.dequantize(codes, 0.25, "fp8_e4m3", "float16")
            assert str(result.dtype) == "paddle.float16"
            np.testing.assert_array_equal(bits(result, np.uint16), expected.view(np.uint16))


def test_the_target_may_be_a_dtype_of_paddle() -> None:
    codes = paddle.to_tensor(np.arange(256, dtype="uint8"), place=paddle.CPUPlace())
    for dtype in (paddle.float16, paddle.bfloat16, paddle.float32):
        found = ops.convert_fp8(codes, to=dtype)
        expected = ops.convert_fp8(codes, to=str(dtype).removeprefix("paddle."))
        assert found.dtype == expected.dtype == dtype
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    with pytest.raises(ValueError, match='to = "int8" must be "fp8", "float16", "bfloat16" or "float32"'):
        ops.convert_fp8(codes, to=paddle.int8)
    with pytest.raises(TypeError, match="to is None"):
        ops.convert_fp8(codes, to=None)
