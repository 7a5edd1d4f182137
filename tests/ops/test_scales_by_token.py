"""gather_cache with the scales that reshape_and_cache_dynamic keeps: one for each token and head."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import Machine
from tests.ops.cache_conformance import LAYOUTS, Cache, Sequences, check_rows, sequences
from tests.reference import cache_convert as reference
from tests.reference import float_formats
from tests.reference.cache_insert import placed, scales_of_rows

every_layout = pytest.mark.parametrize(("layout", "kind"), LAYOUTS)
LENGTHS = [130, 0, 1, 67, 13]
STORAGE = {"fp8_e4m3": "uint8", "fp8_e5m2": "uint8", "int8": "int8", "paddle_uint8": "uint8"}


def quantised(machine: Machine, heads: int, block_size: int, size: int, form: str, layout: str, kind: str) -> Cache:
    blocks = sum(-(-length // block_size) for length in LENGTHS) + 2
    return Cache(machine, blocks, heads, block_size, size, STORAGE[form], layout, kind)


def random_scales(cache: Cache) -> np.ndarray:
    random = np.random.default_rng(5)
    return np.exp2(random.uniform(-9, 3, (cache.blocks, cache.heads, cache.block_size))).astype(np.float32)


def gather(cache: Cache, used: Sequences, scales: Any, form: str, **options: Any) -> paddle.Tensor:
    layout = "HND" if cache.layout == "latent" else cache.layout
    by = paddle.to_tensor(scales, place=cache.machine.place)
    return ops.gather_cache(
        cache.tensor, *used.tensors(cache.machine), total_tokens=used.tokens, layout=layout, kv_cache_dtype=form,
        scale=by, **options,
    )  # fmt: skip


ORDERS = ["HND", "NHD", "HND, seen as NHD", "NHD, seen as HND"]


def in_order(machine: Machine, scales: np.ndarray, order: str) -> tuple[paddle.Tensor, dict[str, Any]]:
    """Scales of [blocks, heads, block size] as a tensor in one of the orders, and the name of what that shows."""
    lies, _, shown = order.partition(", seen as ")
    turned = scales if lies == "HND" else np.ascontiguousarray(scales.transpose(0, 2, 1))
    tensor = paddle.to_tensor(turned, place=machine.place)
    return tensor.transpose([0, 2, 1]) if shown else tensor, {"scale_layout": shown or lies}


def expected(cache: Cache, used: Sequences, scales: np.ndarray, form: str, out_dtype: str) -> np.ndarray:
    codes = reference.gathered(cache.hnd, used.table, used.lengths, used.tokens).view(np.uint8)
    by = reference.gathered(scales[..., None], used.table, used.lengths, used.tokens)
    return float_formats.dequantize(codes, by, form, out_dtype)


@every_layout
@pytest.mark.parametrize("form", float_formats.FORMATS)
@pytest.mark.parametrize("out_dtype", list(float_formats.PLAIN_TYPES))
@pytest.mark.parametrize(("heads", "block_size", "size"), [(3, 5, 48), (1, 1, 64), (2, 17, 128), (7, 64, 16)])
def test_every_token_and_head(
    machine: Machine, layout: str, kind: str, form: str, out_dtype: str, heads: int, block_size: int, size: int
) -> None:
    cache = quantised(machine, heads, block_size, size, form, layout, kind)
    used = sequences(LENGTHS, cache.blocks, block_size)
    scales = random_scales(cache)
    rows = gather(cache, used, scales, form, out_dtype=out_dtype)
    check_rows(machine, rows, expected(cache, used, scales, form, out_dtype), out_dtype)
    cache.check_untouched()


@every_layout
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("heads", "block_size"), [(3, 5), (4, 4), (1, 1), (1, 16)])
def test_orders_of_scales(machine: Machine, layout: str, kind: str, order: str, heads: int, block_size: int) -> None:
    """Also where the shape does not tell them apart. Odd layers of a tensor of all layers have strides of their own."""
    cache = quantised(machine, heads, block_size, 32, "fp8_e4m3", layout, kind)
    used = sequences(LENGTHS, cache.blocks, block_size)
    scales = random_scales(cache)
    values = expected(cache, used, scales, "fp8_e4m3", "bfloat16")
    tensor, named = in_order(machine, scales, order)
    lies = scales if order.startswith("HND") else scales.transpose(0, 2, 1)
    layers = paddle.to_tensor(np.stack([np.zeros_like(lies), lies], axis=1), place=machine.place)[:, 1]
    for given in (tensor, layers.transpose([0, 2, 1]) if "seen" in order else layers):
        rows = ops.gather_cache(
            cache.tensor, *used.tensors(machine), total_tokens=used.tokens, layout=layout, kv_cache_dtype="fp8_e4m3",
            scale=given, out_dtype="bfloat16", **named,
        )  # fmt: skip
        check_rows(machine, rows, values, "bfloat16")


@every_layout
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("heads", "block_size"), [(3, 5), (4, 4), (1, 1)])
def test_orders_in_which_scales_are_written(
    machine: Machine, layout: str, kind: str, order: str, heads: int, block_size: int
) -> None:
    caches = [quantised(machine, heads, block_size, 32, "int8", layout, one) for one in ("key", "value")]
    slots = np.random.default_rng(1).permutation(caches[0].blocks * block_size)[:11]
    new = np.random.default_rng(2).standard_normal((2, 11, heads, 32)).astype(np.float32)
    before = np.full((caches[0].blocks, heads, block_size), 9, np.float32)
    given = [in_order(machine, before, order) for _ in caches]
    ops.reshape_and_cache_dynamic(
        *(paddle.to_tensor(each, place=machine.place) for each in new), *(cache.tensor for cache in caches),
        *(tensor for tensor, _ in given), paddle.to_tensor(slots, place=machine.place), layout=layout,
        kv_cache_dtype="int8", **given[0][1],
    )  # fmt: skip
    machine.synchronize()
    for (tensor, named), rows in zip(given, new, strict=True):
        after = before.copy()
        for token, block, position in placed(slots, before[..., None]):
            after[block, :, position] = scales_of_rows(rows, "int8")[token]
        found = tensor.numpy() if named["scale_layout"] == "HND" else tensor.numpy().transpose(0, 2, 1)
        np.testing.assert_array_equal(found, after)


@pytest.mark.parametrize("size", [1, 3, 46])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("out_dtype", list(float_formats.PLAIN_TYPES))
def test_rows_that_are_no_whole_words(machine: Machine, size: int, layout: str, out_dtype: str) -> None:
    cache = quantised(machine, 3, 5, size, "int8", layout, "key")
    used = sequences(LENGTHS, cache.blocks, 5)
    scales = random_scales(cache)
    rows = gather(cache, used, scales, "int8", out_dtype=out_dtype)
    check_rows(machine, rows, expected(cache, used, scales, "int8", out_dtype), out_dtype)


@every_layout
@pytest.mark.parametrize("form", float_formats.FORMATS)
@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
def test_extreme_scales(machine: Machine, layout: str, kind: str, form: str, scale: float) -> None:
    """What becomes NaN is a quiet NaN with the sign of the code."""
    cache = quantised(machine, 2, 5, 32, form, layout, kind)
    used = sequences(LENGTHS, cache.blocks, 5)
    scales = random_scales(cache)
    scales[:, 1, ::2] = scale
    values = expected(cache, used, scales, form, "float32")
    plain = expected(cache, used, np.ones_like(scales), form, "float32")
    values = np.where(np.isnan(values), np.copysign(np.float32(np.nan), plain), values)
    check_rows(machine, gather(cache, used, scales, form), values, "float32")


@every_layout
@pytest.mark.parametrize("form", ["fp8_e4m3", "int8"])
def test_tokens_without_a_block_are_zero(machine: Machine, layout: str, kind: str, form: str) -> None:
    cache = Cache(machine, 6, 3, 4, 32, STORAGE[form], layout, kind)
    used = Sequences(np.array([[5, -1, 2], [6, 0, 1], [-(2**62), 2**62, 3]]), np.array([3, 14, 22, 30]))
    scales = random_scales(cache)
    rows = gather(cache, used, scales, form, out_dtype="bfloat16")
    check_rows(machine, rows, expected(cache, used, scales, form, "bfloat16"), "bfloat16")


@every_layout
@pytest.mark.parametrize("form", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_what_reshape_and_cache_dynamic_writes(machine: Machine, layout: str, kind: str, form: Any) -> None:
    """Written by slots, with the scales beside it; read by a block table: the two agree on where each is."""
    heads, size, block_size = 3, 32, 16
    caches = [quantised(machine, heads, block_size, size, form, layout, one) for one in ("key", "value")]
    which = ["key", "value"].index(kind)
    used = sequences(LENGTHS, caches[0].blocks, block_size)
    slots = [block * block_size + position for _, block, position in
             reference.slots(used.table, used.lengths, used.tokens, caches[0].blocks, block_size)]  # fmt: skip
    new = np.random.default_rng(2).standard_normal((2, used.tokens, heads, size)).astype(np.float32)
    scale_caches = [paddle.to_tensor(np.full((cache.blocks, heads, block_size), 9, np.float32), place=machine.place)
                    for cache in caches]  # fmt: skip
    ops.reshape_and_cache_dynamic(
        *(paddle.to_tensor(each, place=machine.place) for each in new), *(cache.tensor for cache in caches),
        *scale_caches, paddle.to_tensor(np.array(slots), place=machine.place), layout=layout, kv_cache_dtype=form,
    )  # fmt: skip
    rows = ops.gather_cache(
        caches[which].tensor, *used.tensors(machine), total_tokens=used.tokens, layout=layout, kv_cache_dtype=form,
        scale=scale_caches[which],
    )  # fmt: skip
    by = scales_of_rows(new[which], form)[..., None]
    values = float_formats.dequantize(float_formats.quantize(new[which], by, form), by, form, "float32")
    check_rows(machine, rows, values, "float32")


def test_a_latent_cache(machine: Machine) -> None:
    cache = quantised(machine, 1, 16, 576, "fp8_e4m3", "latent", "key")
    used = sequences(LENGTHS, cache.blocks, 16)
    scales = random_scales(cache)
    rows = gather(cache, used, scales, "fp8_e4m3", out_dtype="float16")
    check_rows(machine, rows, expected(cache, used, scales, "fp8_e4m3", "float16")[:, 0], "float16")


def test_what_does_not_fit(machine: Machine) -> None:
    cache = quantised(machine, 2, 4, 16, "int8", "HND", "key")
    used = sequences(LENGTHS, cache.blocks, 4)
    blocks = cache.blocks
    for shape in ((blocks, 4, 2), (blocks - 1, 2, 4), (blocks, 2), (blocks * 2 * 4,), (blocks, 2, 4, 1)):
        words = rf"scale has shape \[.*\]; .* heads, or \[{blocks}, 2, 4\], or \[5, 2\], is expected"
        with pytest.raises(ValueError, match=words):
            gather(cache, used, np.ones(shape, np.float32), "int8")
    memory = paddle.to_tensor(np.ones(blocks * 8 + 1, np.float32), place=machine.place)
    unaligned = memory.as_strided([blocks, 2, 4], [8, 4, 1], 2)
    assert unaligned.data_ptr() % 4 == 2
    with pytest.raises(ValueError, match=r"scale lies at address \d+; a multiple of 4, "):
        ops.gather_cache(
            cache.tensor, *used.tensors(machine), total_tokens=used.tokens, kv_cache_dtype="int8", scale=unaligned
        )
    with pytest.raises(ValueError, match='scale_layout = "" must be "HND" or "NHD"'):
        gather(cache, used, np.ones((blocks, 2, 4), np.float32), "int8", scale_layout="")
    with pytest.raises(ValueError, match="scale has dtype float64; float32 is expected"):
        gather(cache, used, np.ones((blocks, 2, 4)), "int8")
    cache.check_untouched()


@pytest.mark.parametrize(
    ("order", "strides"),
    [
        ("HND", [2, 1, 0]),  # one for each block and head, which was read as one for each head
        ("NHD", [2, 0, 1]),
        ("HND", [0, 4, 1]),
        ("HND", [4, 4, 1]),
        ("HND", [8, 4, -1]),
        ("HND", [-8, 4, 1]),
    ],
)
def test_scales_that_do_not_lie_apart_are_refused(machine: Machine, order: str, strides: list[int]) -> None:
    cache = quantised(machine, 2, 4, 32, "int8", "HND", "key")
    used = sequences(LENGTHS, cache.blocks, 4)
    shape = [cache.blocks, 2, 4] if order == "HND" else [cache.blocks, 4, 2]
    before = np.arange(64 * used.tokens + 32 * cache.blocks, dtype=np.float32)
    memory = paddle.to_tensor(before, place=machine.place)
    scales = memory.as_strided(shape, strides, 4 * 16 * cache.blocks)
    out = memory.as_strided([used.tokens, 2, 32], [64, 32, 1])  # it may share memory with such a scale
    for where in ({"total_tokens": used.tokens}, {"out": out}):
        with pytest.raises(ValueError, match=r"scale has shape .* strides .*; no two of its elements may lie in"):
            ops.gather_cache(
                cache.tensor, *used.tensors(machine), kv_cache_dtype="int8", scale=scales, scale_layout=order, **where
            )
    np.testing.assert_array_equal(memory.numpy(), before)
    cache.check_untouched()
