"""gather_cache and scatter_cache on the cache of an MLA model, [blocks, block size, width], against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import DTYPES, Machine, item_bytes, tensor_of
from tests.ops.cache_conformance import Cache, Sequences, check_rows, sequences
from tests.ops.test_scatter_cache import as_tensor, random_rows
from tests.reference import cache_convert as reference
from tests.reference import float_formats

LENGTHS = [130, 0, 1, 67, 13]
every_layout = pytest.mark.parametrize("layout", ["HND", "NHD"])  # without meaning where there are no heads


def latent(machine: Machine, block_size: int, width: int, dtype: str) -> tuple[Cache, Sequences]:
    blocks = sum(-(-length // block_size) for length in LENGTHS) + 2
    return Cache(machine, blocks, 1, block_size, width, dtype, "latent"), sequences(LENGTHS, blocks, block_size)


def gathered(cache: Cache, used: Sequences) -> np.ndarray:
    return reference.gathered(cache.hnd, used.table, used.lengths, used.tokens)[:, 0]


@every_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "width"), [(1, 576), (5, 46), (16, 1), (64, 576)])
def test_there_and_back(machine: Machine, layout: Any, dtype: str, block_size: int, width: int) -> None:
    cache, used = latent(machine, block_size, width, dtype)
    tensors = used.tensors(machine)
    rows = ops.gather_cache(cache.tensor, *tensors, total_tokens=used.tokens, layout=layout)
    check_rows(machine, rows, gathered(cache, used), dtype)
    cache.check_untouched()

    new = random_rows((used.tokens, 1, width), item_bytes(dtype))
    assert (
        ops.scatter_cache(as_tensor(machine, new[:, 0], dtype), cache.tensor, *tensors, layout=layout) is cache.tensor
    )
    cache.check(reference.scattered(new, cache.hnd, used.table, used.lengths))


@pytest.mark.parametrize("first", [0, 3])
def test_strided_tokens_are_read_where_they_lie(machine: Machine, first: int) -> None:
    cache, used = latent(machine, 5, 24, "float16")
    wide = random_rows((used.tokens, 1, 31), 2)
    tokens = as_tensor(machine, wide[:, 0], "float16")[:, first : first + 24]
    assert not tokens.is_contiguous()
    ops.scatter_cache(tokens, cache.tensor, *used.tensors(machine))
    cache.check(reference.scattered(wide[..., first : first + 24], cache.hnd, used.table, used.lengths))


@pytest.mark.parametrize("form", ["auto", "fp8_e4m3", "fp8_e5m2", "int8", "paddle_uint8"])
def test_what_concat_and_cache_mla_writes(machine: Machine, form: Any) -> None:
    """Written by slots, read by a block table: the two agree on where a token is."""
    dtype = {"auto": "bfloat16", "int8": "int8"}.get(form, "uint8")
    cache, used = latent(machine, 16, 80, dtype)
    slots = [block * 16 + position for _, block, position in
             reference.slots(used.table, used.lengths, used.tokens, cache.blocks, 16)]  # fmt: skip
    random = np.random.default_rng(2).standard_normal((used.tokens, 80), np.float32)
    new = as_tensor(machine, random.astype(ml_dtypes.bfloat16), "bfloat16")
    scale = None if form == "auto" else 0.03
    slot_mapping = paddle.to_tensor(np.array(slots), place=machine.place)
    ops.concat_and_cache_mla(new[:, :64], new[:, 64:], cache.tensor, slot_mapping, kv_cache_dtype=form, scale=scale)
    rows = ops.gather_cache(
        cache.tensor, *used.tensors(machine), total_tokens=used.tokens, kv_cache_dtype=form, scale=scale,
        out_dtype=None if form == "auto" else "float32",
    )  # fmt: skip
    if form == "auto":
        check_rows(machine, rows, new.numpy(), "bfloat16")
    else:
        exact = random.astype(ml_dtypes.bfloat16).astype(np.float32)
        codes = float_formats.quantize(exact, 0.03, form)
        check_rows(machine, rows, float_formats.dequantize(codes, 0.03, form, "float32"), "float32")


def test_no_tokens(machine: Machine) -> None:
    cache, _ = latent(machine, 4, 8, "int8")
    none = sequences([0, 0], cache.blocks, 4).tensors(machine)
    assert list(ops.gather_cache(cache.tensor, *none, total_tokens=0).shape) == [0, 8]
    ops.scatter_cache(paddle.zeros([0, 8], "int8")._copy_to(machine.place, True), cache.tensor, *none)
    cache.check_untouched()


def test_what_does_not_fit(machine: Machine) -> None:
    cache, used = latent(machine, 4, 8, "float16")
    tensors = used.tensors(machine)
    with pytest.raises(ValueError, match=r"cache has shape \[.*, 4, 8\]; .*packed values, is expected"):
        ops.gather_cache(cache.tensor, *tensors, total_tokens=used.tokens, layout="packed")
    with pytest.raises(ValueError, match='layout = "NDH" must be'):
        ops.gather_cache(cache.tensor, *tensors, total_tokens=used.tokens, layout="NDH")  # type: ignore[arg-type]
    zeros = np.zeros((used.tokens, 18), np.uint8)
    for shape, columns in (((9,), 9), ((1, 9), 9), ((1, 8), 8), ((9,), 7)):
        bits = zeros[:, : 2 * shape[-1]]
        tokens = tensor_of(bits, shape, "float16", machine.place)[..., :columns]
        with pytest.raises(ValueError, match=r"tokens has shape \[.*\]; \[tokens, 8\] is expected for this cache"):
            ops.scatter_cache(tokens, cache.tensor, *tensors)
    heads = Cache(machine, cache.blocks, 1, 4, 8, "float16")
    tokens = tensor_of(zeros[:, :16], (8,), "float16", machine.place)
    with pytest.raises(ValueError, match=r"tokens has shape \[.*, 8\]; \[tokens, 1, 8\] is expected for this cache"):
        ops.scatter_cache(tokens, heads.tensor, *tensors)
    cache.check_untouched()
    heads.check_untouched()


@pytest.mark.parametrize("full_graph", [True, False])
def test_in_a_program(machine: Machine, full_graph: bool) -> None:
    cache, used = latent(machine, 5, 16, "float16")

    def function(cache: Any, table: Any, lengths: Any, gather: Any, tokens: int) -> Any:
        return gather(cache, table, lengths, total_tokens=tokens).reshape([tokens, 16])

    traced = paddle.jit.to_static(function, full_graph=full_graph)
    with paddle.no_grad():
        rows = traced(cache.tensor, *used.tensors(machine), ops.gather_cache, used.tokens)
    check_rows(machine, rows, gathered(cache, used), "float16")
