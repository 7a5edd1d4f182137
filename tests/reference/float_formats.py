"""The number formats in NumPy: clip to the largest number, keep NaN, then the rounding of NumPy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

PLAIN_TYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FP8_TYPES: dict[str, Any] = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "paddle_uint8": 127.0}
FORMATS = list(LARGEST)


def bits_type(dtype: str) -> Any:
    return np.uint32 if dtype == "float32" else np.uint16


def quantize(values: np.ndarray, scale: Any, form: str) -> np.ndarray:
    """Codes, uint8, of values of a plain type; ``scale`` broadcasts."""
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32)
        by = np.asarray(scale, np.float32)
        scaled = wide * by * np.float32(127) if form == "paddle_uint8" else wide / by
        largest = np.float32(LARGEST[form])
        clipped = np.clip(scaled, -largest, largest)
        if form in FP8_TYPES:
            return clipped.astype(FP8_TYPES[form]).view(np.uint8)
        whole = np.where(np.isnan(clipped), 0, np.rint(clipped)).astype(np.int32)
    return (
        (whole + 128 if form == "paddle_uint8" else whole)
        .astype(np.int8 if form == "int8" else np.uint8)
        .view(np.uint8)
    )


def dequantize(codes: np.ndarray, scale: Any, form: str, dtype: str) -> np.ndarray:
    """Values of the plain type ``dtype`` of uint8 codes."""
    with np.errstate(all="ignore"):
        by = np.asarray(scale, np.float32)
        if form == "paddle_uint8":
            wide = (codes.astype(np.float32) - np.float32(128)) / (by * np.float32(127))
        else:
            wide = codes.view(np.int8 if form == "int8" else FP8_TYPES[form]).astype(np.float32) * by
        return wide.astype(PLAIN_TYPES[dtype])


def edge_floats() -> np.ndarray:
    """float32: a dense sample of all bit patterns, and the neighbourhood of every half and bfloat16."""
    dense = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)
    halves = np.arange(65536, dtype=np.uint16)
    exact = np.concatenate([halves.view(t).astype(np.float32) for t in (np.float16, ml_dtypes.bfloat16)]).view(
        np.uint32
    )
    near = [exact + np.uint32(step) for step in (0, 1, 0xFFFFFFFF, 0x1000, 0x8000)]
    middles = []
    for fp8, largest in ((ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)):
        codes = np.arange(256, dtype=np.uint8).view(fp8).astype(np.float32)
        codes = np.sort(codes[np.isfinite(codes)])
        between = (codes[1:] + codes[:-1]) / 2
        ends = np.array([largest, -largest, 464, 480, 61440, 65536], np.float32)
        for tie in (between, ends):
            bits = tie.view(np.uint32)
            middles += [bits, bits + np.uint32(1), bits - np.uint32(1)]
    return np.concatenate([dense, *near, *middles]).view(np.float32)
