"""gather_cache with a scale for each sequence and head, as a server computes them from a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import Machine
from tests.ops.cache_conformance import LAYOUTS, Cache, Sequences, check_rows, sequences
from tests.ops.test_scales_by_token import LENGTHS, quantised
from tests.reference import cache_convert as reference
from tests.reference import float_formats

every_layout = pytest.mark.parametrize(("layout", "kind"), LAYOUTS)


def random_scales(cache: Cache, used: Sequences) -> np.ndarray:
    random = np.random.default_rng(6)
    return np.exp2(random.uniform(-9, 3, (len(used.table), cache.heads))).astype(np.float32)


def expected(
    cache: Cache, used: Sequences, scales: np.ndarray, form: str, out_dtype: str, tokens: int, starts: Any = None
) -> np.ndarray:
    """Tokens without a slot are zeros, whatever the scale."""
    codes = reference.gathered(cache.hnd, used.table, used.lengths, tokens, starts).view(np.uint8)
    sequence = np.clip(np.searchsorted(used.lengths, np.arange(tokens), "right") - 1, 0, len(used.table) - 1)
    values = float_formats.dequantize(codes, scales[sequence][..., None], form, out_dtype)
    held = [slot[0] for slot in reference.slots(used.table, used.lengths, tokens, *cache.hnd.shape[:3:2], starts)]
    values[np.setdiff1d(np.arange(tokens), held)] = 0
    return values


def gather(cache: Cache, used: Sequences, scales: Any, form: str, **options: Any) -> paddle.Tensor:
    place = cache.machine.place
    scale = scales if isinstance(scales, paddle.Tensor) else paddle.to_tensor(scales, place=place)
    options = {"total_tokens": used.tokens, "layout": cache.layout, **options}
    return ops.gather_cache(cache.tensor, *used.tensors(cache.machine), kv_cache_dtype=form, scale=scale, **options)


@every_layout
@pytest.mark.parametrize("form", float_formats.FORMATS)
@pytest.mark.parametrize("out_dtype", list(float_formats.PLAIN_TYPES))
@pytest.mark.parametrize(("heads", "block_size", "size"), [(3, 5, 48), (1, 1, 64), (2, 17, 128), (7, 64, 16)])
def test_every_sequence_and_head(
    machine: Machine, layout: str, kind: str, form: str, out_dtype: str, heads: int, block_size: int, size: int
) -> None:
    cache = quantised(machine, heads, block_size, size, form, layout, kind)
    used = sequences(LENGTHS, cache.blocks, block_size)
    scales = random_scales(cache, used)
    rows = gather(cache, used, scales, form, out_dtype=out_dtype)
    check_rows(machine, rows, expected(cache, used, scales, form, out_dtype, used.tokens), out_dtype)
    cache.check_untouched()


@every_layout
def test_tokens_of_no_sequence(machine: Machine, layout: str, kind: str) -> None:
    """Before the first, behind the last and without a block: they have no scale either. Into a tensor of the caller."""
    cache = quantised(machine, 2, 4, 32, "paddle_uint8", layout, kind)
    used = sequences([9, 3, 6], cache.blocks, 4)
    used.lengths += 5
    used.table[1, 0] = -1
    tokens, starts = used.tokens + 9, np.array([2, 0, 4])
    scales = random_scales(cache, used)
    out = paddle.to_tensor(np.full((tokens, 2, 32), 7, np.float32), place=machine.place)
    where = {"total_tokens": None, "out": out, "starts": paddle.to_tensor(starts, place=machine.place)}
    rows = gather(cache, used, scales, "paddle_uint8", **where)
    check_rows(machine, rows, expected(cache, used, scales, "paddle_uint8", "float32", tokens, starts), "float32")


def test_scales_with_strides(machine: Machine) -> None:
    cache = quantised(machine, 3, 4, 32, "int8", "HND", "key")
    used = sequences(LENGTHS, cache.blocks, 4)
    scales = random_scales(cache, used)
    values = expected(cache, used, scales, "int8", "bfloat16", used.tokens)
    turned = paddle.to_tensor(np.ascontiguousarray(scales.T), place=machine.place).transpose([1, 0])
    of_layers = paddle.to_tensor(np.stack([scales * 3, scales], axis=1), place=machine.place)[:, 1]
    for given in (turned, of_layers):
        assert not given.is_contiguous()
        check_rows(machine, gather(cache, used, given, "int8", out_dtype="bfloat16"), values, "bfloat16")


def test_one_sequence_has_a_scale_for_each_head(machine: Machine) -> None:
    cache = quantised(machine, 3, 4, 32, "int8", "HND", "key")
    used = sequences([21], cache.blocks, 4)
    scales = random_scales(cache, used)
    rows = [gather(cache, used, each, "int8").numpy() for each in (scales, scales[0])]
    np.testing.assert_array_equal(*rows)


def test_a_latent_cache(machine: Machine) -> None:
    cache = quantised(machine, 1, 16, 576, "fp8_e4m3", "latent", "key")
    used = sequences(LENGTHS, cache.blocks, 16)
    scales = random_scales(cache, used)
    rows = gather(cache, used, scales, "fp8_e4m3", out_dtype="float16", layout="HND")
    check_rows(machine, rows, expected(cache, used, scales, "fp8_e4m3", "float16", used.tokens)[:, 0], "float16")


def test_what_does_not_fit(machine: Machine) -> None:
    cache = quantised(machine, 2, 4, 16, "int8", "HND", "key")
    used = sequences(LENGTHS, cache.blocks, 4)
    count = len(used.table)
    for shape in ((count, 3), (count + 1, 2), (2, count), (count,), (count, 2, 1)):
        with pytest.raises(ValueError, match=rf"scale has shape \[.*\]; .* heads, .*, or \[{count}, 2\], is expected"):
            gather(cache, used, np.ones(shape, np.float32), "int8")
    memory = paddle.to_tensor(np.ones(2 * count, np.float32), place=machine.place)
    for strides in ([0, 1], [1, 1], [1, -1]):
        with pytest.raises(ValueError, match=r"scale has shape .* strides .*; no two of its elements may lie in"):
            gather(cache, used, memory.as_strided([count, 2], strides, 4), "int8")
    cache.check_untouched()
