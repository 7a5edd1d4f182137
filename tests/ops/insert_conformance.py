"""One call of reshape_and_cache and its relatives, compared byte by byte with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import paddle

from paddle_kv import ops
from tests.machine import GuardedCache, Machine
from tests.reference.cache_convert import from_layout, to_layout
from tests.reference.cache_insert import inserted, placed, scales_of_rows
from tests.reference.float_formats import PLAIN_TYPES, quantize

# How a tensor's NumPy type and Paddle dtype are called for what a cache holds.
CACHE_DTYPES = {"fp8_e4m3": "uint8", "fp8_e5m2": "uint8", "int8": "int8", "paddle_uint8": "uint8"}


def random_rows(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Values of all magnitudes, with a few zeros, infinities and NaNs where the dtype's bits make them."""
    random = np.random.default_rng(seed)
    values = (random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)).astype(np.float32)
    special = random.random(shape)
    for bound, value in ((0.01, 0.0), (0.02, np.inf), (0.03, -np.inf), (0.04, np.nan), (0.05, -0.0)):
        values[(special < bound) & (special >= bound - 0.01)] = value
    return values.astype(PLAIN_TYPES[dtype])


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Every bit pattern: what is copied as it is."""
    kind = PLAIN_TYPES[dtype]
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(kind).reshape(shape)


def tensor(array: np.ndarray, machine: Machine) -> paddle.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        array = array.view(np.uint16)  # which is bfloat16 to Paddle
    return paddle.to_tensor(np.ascontiguousarray(array), place=machine.place)


def slot_tensor(slots: Any, machine: Machine, dtype: str = "int64") -> paddle.Tensor:
    return paddle.to_tensor(np.asarray(slots, dtype), place=machine.place)


def make_cache(machine: Machine, hnd: np.ndarray, layout: str, kind: str, dtype: str) -> GuardedCache:
    shaped = to_layout(hnd, layout, kind)
    bits = shaped.view(np.uint8).reshape(len(shaped), -1)
    return GuardedCache(machine, bits, shaped.shape[1:], dtype)


@dataclass
class Case:
    """Caches with random content, and tokens for them."""

    machine: Machine
    tokens: int = 11
    heads: int = 3
    head_size: int = 32
    value_head_size: int | None = None
    blocks: int = 5
    block_size: int = 4
    dtype: str = "float16"
    kv_cache_dtype: str = "auto"
    layout: str = "HND"
    seed: int = 0

    def __post_init__(self) -> None:
        self.quantised = self.kv_cache_dtype != "auto"
        make = random_rows if self.quantised else random_bits
        sizes = (self.head_size, self.value_head_size or self.head_size)
        self.rows = [make((self.tokens, self.heads, size), self.dtype, self.seed + i) for i, size in enumerate(sizes)]
        cache_dtype = CACHE_DTYPES.get(self.kv_cache_dtype, self.dtype)
        random = np.random.default_rng(self.seed + 7)
        self.hnd = []
        for size in sizes:
            shape = (self.blocks, self.heads, self.block_size, size)
            if self.quantised:
                hnd = random.integers(0, 256, shape, np.uint8)
            else:
                hnd = random_bits(shape, self.dtype, self.seed + size)
            self.hnd.append(hnd)
        self.caches = [
            make_cache(self.machine, hnd, self.layout, kind, cache_dtype)
            for hnd, kind in zip(self.hnd, ("key", "value"), strict=True)
        ]

    @property
    def cache_tensors(self) -> list[paddle.Tensor]:
        return [cache.tensor for cache in self.caches]

    def token_tensors(self) -> list[paddle.Tensor]:
        return [tensor(rows, self.machine) for rows in self.rows]

    def random_slots(self, negative: int = 2) -> np.ndarray:
        """Distinct slots in no order, some of them negative."""
        random = np.random.default_rng(self.seed + 9)
        slots = random.permutation(self.blocks * self.block_size)[: self.tokens].astype(np.int64)
        slots[random.permutation(self.tokens)[:negative]] = [-1, -(2**40)][:negative]
        return slots

    def check_bits(self, expected_hnd: list[np.ndarray]) -> None:
        self.machine.synchronize()
        for cache, hnd, kind in zip(self.caches, expected_hnd, ("key", "value"), strict=True):
            shaped = to_layout(hnd, self.layout, kind)
            cache.check(shaped.view(np.uint8).reshape(len(shaped), -1))

    def check_untouched(self) -> None:
        self.check_bits(self.hnd)

    def expected(self, slots: np.ndarray, scales: tuple[Any, Any] = (1.0, 1.0)) -> list[np.ndarray]:
        result = []
        for rows, hnd, scale in zip(self.rows, self.hnd, scales, strict=True):
            stored = rows
            if self.quantised:
                by = np.asarray(scale, np.float32)
                stored = quantize(rows, by[:, None] if by.ndim else by, self.kv_cache_dtype)
            # As integers: assignment of floats may change the bits of NaNs.
            plain = np.dtype(f"u{hnd.dtype.itemsize}")
            result.append(inserted(stored.view(plain), hnd.view(plain), slots).view(hnd.dtype))
        return result

    def insert(self, slots: np.ndarray, **options: Any) -> Any:
        key, value = options.pop("tensors", None) or self.token_tensors()
        mapping = options.pop("slot_mapping", None)
        if mapping is None:
            mapping = slot_tensor(slots, self.machine)
        return ops.reshape_and_cache(
            key, value, *self.cache_tensors, mapping, layout=self.layout, kv_cache_dtype=self.kv_cache_dtype, **options
        )

    def check_insert(self, slots: np.ndarray, scales: tuple[Any, Any] | None = None, **options: Any) -> None:
        if scales is not None:
            names = ("k_scale", "v_scale")
            for name, scale in zip(names, scales, strict=True):
                options[name] = (
                    scale if isinstance(scale, float) else tensor(np.asarray(scale, np.float32), self.machine)
                )
        result = self.insert(slots, **options)
        assert all(a is b for a, b in zip(result, self.cache_tensors, strict=True))
        self.check_bits(self.expected(slots, scales or (1.0, 1.0)))


def check_dynamic(case: Case, slots: np.ndarray, **options: Any) -> None:
    """reshape_and_cache_dynamic: codes and scales, whole caches."""
    machine = case.machine
    shape = (case.blocks, case.heads, case.block_size)
    before = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i in range(2)]
    scale_caches = [
        GuardedCache(machine, b.view(np.uint8).reshape(case.blocks, -1), shape[1:], "float32") for b in before
    ]
    ops.reshape_and_cache_dynamic(
        *(options.pop("tensors", None) or case.token_tensors()),
        *case.cache_tensors,
        *(cache.tensor for cache in scale_caches),
        slot_tensor(slots, machine),
        layout=case.layout,
        kv_cache_dtype=case.kv_cache_dtype,
        **options,
    )
    expected_codes = []
    for rows, hnd, cache, old in zip(case.rows, case.hnd, scale_caches, before, strict=True):
        scales = scales_of_rows(rows, case.kv_cache_dtype)
        expected_codes.append(inserted(quantize(rows, scales[..., None], case.kv_cache_dtype), hnd, slots))
        expected = old.copy()
        for token, block, position in placed(slots, hnd):
            expected[block, :, position] = scales[token]
        machine.synchronize()
        cache.check(expected.view(np.uint8).reshape(case.blocks, -1))
    case.check_bits(expected_codes)


__all__ = ["Case", "check_dynamic", "from_layout", "make_cache", "random_bits", "random_rows", "slot_tensor", "tensor"]
