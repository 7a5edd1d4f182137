"""gather_cache against the reference: layouts, formats, tables, errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, Machine, item_bytes, tensor_of
from tests.ops.cache_conformance import LAYOUTS, Cache, Sequences, check_rows, sequences
from tests.reference import cache_convert as reference
from tests.reference import float_formats

every_layout = pytest.mark.parametrize(("layout", "kind"), LAYOUTS)
STORAGE = {"fp8_e4m3": "uint8", "fp8_e5m2": "uint8", "int8": "int8", "paddle_uint8": "uint8"}
LENGTHS = [7, 0, 13, 1, 5]


def gather(cache: Cache, used: Sequences, tokens: int | None = None, **options: Any) -> paddle.Tensor:
    return ops.gather_cache(
        cache.tensor,
        *used.tensors(cache.machine),
        total_tokens=used.tokens if tokens is None else tokens,
        layout=cache.layout,
        **options,
    )


def check_gather(cache: Cache, used: Sequences, tokens: int | None = None) -> None:
    tokens = used.tokens if tokens is None else tokens
    result = gather(cache, used, tokens)
    expected = reference.gathered(cache.hnd, used.table, used.lengths, tokens)
    check_rows(cache.machine, result, expected, cache.dtype)
    cache.check_untouched()


@every_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_layouts_and_dtypes(machine: Machine, layout: str, kind: str, dtype: str, ids: str) -> None:
    cache = Cache(machine, 11, 3, 5, 48, dtype, layout, kind)
    check_gather(cache, sequences(LENGTHS, 11, 5, ids=ids))


@every_layout
@pytest.mark.parametrize("head_size", [1, 46, 64, 80, 96, 112, 120, 128, 192, 256, 576, 1030])
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_head_sizes(machine: Machine, layout: str, kind: str, head_size: int, dtype: str) -> None:
    if layout == "packed" and kind == "key" and head_size % (16 // item_bytes(dtype)):
        head_size = head_size // 16 * 16 + 16
    cache = Cache(machine, 9, 2, 4, head_size, dtype, layout, kind)
    check_gather(cache, sequences([9, 3, 12], 9, 4))


@every_layout
@pytest.mark.parametrize(("heads", "block_size"), [(1, 1), (1, 64), (7, 16), (40, 3)])
def test_heads_and_block_sizes(machine: Machine, layout: str, kind: str, heads: int, block_size: int) -> None:
    cache = Cache(machine, 13, heads, block_size, 32, "float16", layout, kind)
    check_gather(cache, sequences([2 * block_size + 1, block_size, 1, 3 * block_size], 13, block_size))


# Sequences that begin and end anywhere in a tile of 16, 32, 64 or 128 tokens.
TILE_LENGTHS = [130, 0, 1, 67, 200, 64]


@every_layout
@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 48, 64])
@pytest.mark.parametrize("head_size", [46, 64, 80, 112, 120, 128, 192, 256, 576])
def test_edges_of_tiles(machine: Machine, layout: str, kind: str, block_size: int, head_size: int) -> None:
    if (layout, kind) == ("packed", "key"):
        head_size = -(-head_size // 8) * 8
    blocks = sum(-(-length // block_size) for length in TILE_LENGTHS) + 1
    cache = Cache(machine, blocks, 2, block_size, head_size, "bfloat16", layout, kind)
    check_gather(cache, sequences(TILE_LENGTHS, blocks, block_size))


@every_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [17, 32])
def test_element_sizes_in_tiles(machine: Machine, layout: str, kind: str, dtype: str, block_size: int) -> None:
    cache = Cache(machine, 33, 3, block_size, 144, dtype, layout, kind)
    check_gather(cache, sequences(TILE_LENGTHS, 33, block_size))


@every_layout
def test_packed_keys_of_any_x(machine: Machine, layout: str, kind: str) -> None:
    """x is what the tensor says, not what it would be made with."""
    hnd = np.arange(6 * 2 * 3 * 12, dtype=np.uint16).reshape(6, 2, 3, 12)
    packed = np.ascontiguousarray(hnd.reshape(6, 2, 3, 3, 4).transpose(0, 1, 3, 2, 4))
    used = sequences([4, 8], 6, 3)
    tensor = paddle.to_tensor(packed.view(np.float16), place=machine.place)
    result = ops.gather_cache(tensor, *used.tensors(machine), total_tokens=12, layout="packed")
    check_rows(machine, result, reference.gathered(hnd, used.table, used.lengths, 12), "float16")


@every_layout
def test_more_than_65535_tokens(machine: Machine, layout: str, kind: str) -> None:
    cache = Cache(machine, 4100, 1, 17, 16, "uint8", layout, kind)
    check_gather(cache, sequences([66_000, 3_000, 1], 4100, 17))


@every_layout
def test_more_sequences_than_threads(machine: Machine, layout: str, kind: str) -> None:
    lengths = np.random.default_rng(3).integers(0, 4, 1_500).tolist()
    cache = Cache(machine, 1_600, 2, 3, 16, "float16", layout, kind)
    check_gather(cache, sequences(lengths, 1_600, 3))


class TestWholeRows:
    """Rows in one piece, in words of 16 bytes, have a kernel of their own on a GPU."""

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    @pytest.mark.parametrize("count", [1, 29, 30, 31, 32, 33, 61, 62, 63, 257])
    def test_many_short_sequences(self, machine: Machine, layout: str, count: int) -> None:
        """About as many as a warp looks through at once; several of them, and empty ones, among the tokens of a CTA."""
        lengths = np.random.default_rng(count).integers(0, 5, count).tolist()
        lengths[-1] += 2
        cache = Cache(machine, 3 * count, 2, 2, 8, "float16", layout)
        check_gather(cache, sequences(lengths, 3 * count, 2), sum(lengths) + 3)

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    @pytest.mark.parametrize(
        ("heads", "head_size"), [(1, 8), (1, 24), (1, 576), (2, 40), (8, 128), (32, 256), (33, 256), (3, 24)]
    )
    @pytest.mark.parametrize("ids", ["int32", "int64"])
    def test_lengths_of_rows(self, machine: Machine, layout: str, heads: int, head_size: int, ids: str) -> None:
        """From many tokens in a CTA to more than one CTA has threads for."""
        cache = Cache(machine, 6, heads, 16, head_size, "bfloat16", layout)
        used = sequences([33, 0, 17], 6, 16, ids=ids)
        used.table[0, 1] = -1
        used.table[2, 1] = 6
        check_gather(cache, used)

    @pytest.mark.parametrize(("of_table", "of_lengths"), [("int32", "int64"), ("int64", "int32")])
    def test_ids_of_two_dtypes(self, machine: Machine, of_table: str, of_lengths: str) -> None:
        cache = Cache(machine, 6, 1, 16, 64, "float16", "NHD")
        used = sequences([33, 0, 17], 6, 16)
        ids = (used.table.astype(of_table), used.lengths.astype(of_lengths))
        tensors = (paddle.to_tensor(array, place=machine.place) for array in ids)
        result = ops.gather_cache(cache.tensor, *tensors, total_tokens=50, layout="NHD")
        check_rows(machine, result, reference.gathered(cache.hnd, used.table, used.lengths, 50), cache.dtype)


@every_layout
@pytest.mark.parametrize("dequantized", [False, True])
def test_tokens_without_a_block_are_zero(machine: Machine, layout: str, kind: str, dequantized: bool) -> None:
    """Before the first and behind the last sequence, padding, ids beyond the cache, beyond the row of the table."""
    cache = Cache(machine, 6, 3, 4, 32, "uint8", layout, kind)
    table = np.array([[5, -1, 2], [6, 0, 1], [-(2**62), 2**62, 3], [4, 0, 1]])
    used = Sequences(table, np.array([3, 14, 22, 30, 45]))
    tokens = 50
    expected = reference.gathered(cache.hnd, table, used.lengths, tokens)
    empty = (expected == 0).all(axis=(1, 2))
    assert empty.sum() == 3 + 4 + 4 + 8 + 3 + 5, "the reference itself"
    if not dequantized:
        check_gather(cache, used, tokens)
        return
    result = gather(cache, used, tokens, kv_cache_dtype="paddle_uint8", out_dtype="float32")
    values = float_formats.dequantize(expected, 1.0, "paddle_uint8", "float32")
    values[empty] = 0
    check_rows(machine, result, values, "float32")


def test_fewer_tokens_than_the_sequences_have(machine: Machine) -> None:
    cache = Cache(machine, 6, 2, 4, 8, "float32")
    check_gather(cache, sequences([7, 9], 6, 4), tokens=11)


def test_ids_beyond_the_cache_are_reported_where_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(machine, 6, 2, 4, 8, "float32")
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    check_gather(cache, Sequences(np.array([[5, -1], [0, 99]]), np.array([0, 8, 12])))  # 99 belongs to no token
    with pytest.raises(IndexError, match=r"block_table\[1, 1\] = 6 must be in \[0, 6\)"):
        gather(cache, Sequences(np.array([[5, -1], [0, 6]]), np.array([0, 8, 13])))
    with pytest.raises(IndexError, match=r"cu_seq_lens\[1\] = 9: sequence 0 has 3 blocks, block_table has 2 for it"):
        gather(cache, Sequences(np.array([[5, -1], [0, 1]]), np.array([0, 9, 13])))
    with pytest.raises(ValueError, match=r"cu_seq_lens\[2\] = 3 behind 5; the ends of sequences must not .* decrease"):
        gather(cache, Sequences(np.array([[5, -1], [0, 1]]), np.array([0, 5, 3])), tokens=13)
    with pytest.raises(ValueError, match=r"cu_seq_lens\[2\] = 8 .* not exceed the 7 tokens"):
        gather(cache, Sequences(np.array([[5, -1], [0, 1]]), np.array([0, 5, 8])), tokens=7)


@every_layout
@pytest.mark.parametrize("form", float_formats.FORMATS)
@pytest.mark.parametrize("out_dtype", list(float_formats.PLAIN_TYPES))
@pytest.mark.parametrize("head_size", [32, 48])
def test_dequantizing(machine: Machine, layout: str, kind: str, form: str, out_dtype: str, head_size: int) -> None:
    cache = Cache(machine, 11, 3, 5, head_size, STORAGE[form], layout, kind)
    cache_codes = reference.gathered(cache.hnd, (used := sequences(LENGTHS, 11, 5)).table, used.lengths, used.tokens)
    scales = np.array([0.3, 2.0, 7e-3], np.float32)
    for given_scale, by in (
        (None, 1.0),
        (0.3, 0.3),
        (paddle.to_tensor(np.array([0.7], np.float32), place=machine.place), 0.7),
        (paddle.to_tensor(scales, place=machine.place), scales[:, None]),
    ):
        result = gather(cache, used, kv_cache_dtype=form, out_dtype=out_dtype, scale=given_scale)
        expected = float_formats.dequantize(cache_codes.view(np.uint8), by, form, out_dtype)
        check_rows(machine, result, expected, out_dtype)
    cache.check_untouched()


@every_layout
@pytest.mark.parametrize("out_dtype", list(float_formats.PLAIN_TYPES))
@pytest.mark.parametrize(("block_size", "head_size"), [(1, 64), (3, 46), (16, 112), (17, 120), (48, 256), (64, 576)])
def test_dequantizing_tiles(
    machine: Machine, layout: str, kind: str, out_dtype: str, block_size: int, head_size: int
) -> None:
    if (layout, kind) == ("packed", "key"):
        head_size = -(-head_size // 16) * 16
    blocks = sum(-(-length // block_size) for length in TILE_LENGTHS) + 1
    cache = Cache(machine, blocks, 2, block_size, head_size, "uint8", layout, kind)
    used = sequences(TILE_LENGTHS, blocks, block_size)
    codes = reference.gathered(cache.hnd, used.table, used.lengths, used.tokens)
    scales = np.array([0.3, 2.0], np.float32)
    for given_scale, by in ((0.3, 0.3), (paddle.to_tensor(scales, place=machine.place), scales[:, None])):
        result = gather(cache, used, kv_cache_dtype="fp8_e4m3", out_dtype=out_dtype, scale=given_scale)
        check_rows(machine, result, float_formats.dequantize(codes, by, "fp8_e4m3", out_dtype), out_dtype)
    cache.check_untouched()


@pytest.mark.parametrize("head_size", [1, 3, 7, 46])
@pytest.mark.parametrize("out_dtype", list(float_formats.PLAIN_TYPES))
def test_dequantizing_rows_that_are_no_whole_words(machine: Machine, head_size: int, out_dtype: str) -> None:
    cache = Cache(machine, 9, 3, 5, head_size, "uint8")
    used = sequences([6, 17], 9, 5)
    codes = reference.gathered(cache.hnd, used.table, used.lengths, used.tokens)
    result = gather(cache, used, kv_cache_dtype="fp8_e5m2", out_dtype=out_dtype, scale=0.1)
    check_rows(machine, result, float_formats.dequantize(codes, 0.1, "fp8_e5m2", out_dtype), out_dtype)


@every_layout
@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
@pytest.mark.parametrize("form", float_formats.FORMATS)
def test_extreme_scales_in_a_tensor(machine: Machine, layout: str, kind: str, scale: float, form: str) -> None:
    """What becomes NaN is a quiet NaN with the sign of the code, the same on every processor."""
    cache = Cache(machine, 2, 1, 4, 64, STORAGE[form], layout, kind)
    used = sequences([8], 2, 4)
    by = paddle.to_tensor(np.array([scale], np.float32), place=machine.place)
    result = gather(cache, used, kv_cache_dtype=form, scale=by)
    codes = reference.gathered(cache.hnd, used.table, used.lengths, 8).view(np.uint8)
    plain = float_formats.dequantize(codes, 1.0, form, "float32")
    expected = float_formats.dequantize(codes, scale, form, "float32")
    expected = np.where(np.isnan(expected), np.copysign(np.float32(np.nan), plain), expected)
    check_rows(machine, result, expected, "float32")


def test_the_default_of_dequantizing_is_float32(machine: Machine) -> None:
    cache = Cache(machine, 3, 1, 4, 8, "int8")
    result = gather(cache, sequences([5], 3, 4), kv_cache_dtype="int8", scale=0.5)
    assert str(result.dtype) == "paddle.float32"


@pytest.mark.skipif(not hasattr(paddle, "float8_e4m3fn"), reason="Paddle 2.6 has no fp8 dtypes")
@pytest.mark.parametrize(("form", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_dequantizing_paddles_own_dtype(machine: Machine, form: str, dtype: str) -> None:
    cache = Cache(machine, 3, 1, 4, 64, dtype)
    used = sequences([9], 3, 4)
    codes = reference.gathered(cache.hnd, used.table, used.lengths, 9)
    result = gather(cache, used, kv_cache_dtype=form, out_dtype=paddle.float16)
    check_rows(machine, result, float_formats.dequantize(codes, 1.0, form, "float16"), "float16")


@given(data=st.data())
def test_any_shape_and_table(machine: Machine, data: st.DataObject) -> None:
    layout, kind = data.draw(st.sampled_from(LAYOUTS))
    dtype = data.draw(st.sampled_from(["uint8", "float16", "float32"]))
    blocks, heads, block_size = (data.draw(st.integers(1, 9)) for _ in range(3))
    unit = 16 // item_bytes(dtype) if (layout, kind) == ("packed", "key") else 1
    head_size = unit * data.draw(st.integers(1, 40))
    count = data.draw(st.integers(1, 5))
    lengths = np.cumsum([0, *data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))])
    width = data.draw(st.integers(1, 5))
    ids = st.lists(st.integers(-2, blocks + 1), min_size=width, max_size=width)
    table = np.array(data.draw(st.lists(ids, min_size=count, max_size=count)))
    cache = Cache(machine, blocks, heads, block_size, head_size, dtype, layout, kind)
    used = Sequences(table, lengths, data.draw(st.sampled_from(["int32", "int64"])))
    check_gather(cache, used, data.draw(st.integers(1, 160)))


@pytest.mark.parametrize("form", ["auto", "int8"])
def test_no_tokens(machine: Machine, form: str) -> None:
    cache = Cache(machine, 3, 2, 4, 8, "int8")
    result = gather(cache, sequences([0, 0], 3, 4), kv_cache_dtype=form)
    assert list(result.shape) == [0, 2, 8]
    assert str(result.dtype) == ("paddle.int8" if form == "auto" else "paddle.float32")
    with pytest.raises(ValueError, match="cu_seq_lens has 4 entries, block_table 2 rows"):
        gather(cache, Sequences(np.zeros((2, 3), np.int64), np.zeros(4, np.int64)), kv_cache_dtype=form)


def test_no_sequences(machine: Machine) -> None:
    cache = Cache(machine, 3, 2, 4, 8, "float32")
    check_gather(cache, Sequences(np.zeros((0, 3), np.int64), np.array([0])), tokens=5)


def test_an_address_that_is_no_multiple_of_anything(machine: Machine) -> None:
    """The guard in front of the cache is one block: of 3 x 7 x 5 = 105 bytes."""
    cache = Cache(machine, 8, 3, 7, 5, "uint8")
    assert cache.tensor.data_ptr() % 2 == 1
    check_gather(cache, sequences([20, 20], 8, 7))


def test_errors(machine: Machine) -> None:
    cache = Cache(machine, 6, 2, 4, 8, "float16")
    table, lengths = sequences([7, 9], 6, 4).tensors(machine)

    def refuse(error: type[Exception], message: str, **changed: Any) -> None:
        given: dict[str, Any] = {
            "cache": cache.tensor,
            "block_table": table,
            "cu_seq_lens": lengths,
            "total_tokens": 16,
        }
        with pytest.raises(error, match=message):
            ops.gather_cache(**given | changed)

    refuse(ValueError, 'layout = "HDN" must be "HND", "NHD" or "packed"', layout="HDN")
    refuse(TypeError, "layout is 3; a string is expected", layout=3)
    refuse(ValueError, 'kv_cache_dtype = "fp8" must be "auto"', kv_cache_dtype="fp8", out_dtype="float16")
    refuse(ValueError, 'cache with kv_cache_dtype "int8" has dtype float16; int8 is expected', kv_cache_dtype="int8")
    refuse(ValueError, 'out_dtype = "float32" differs from the dtype of cache, float16', out_dtype="float32")
    refuse(ValueError, "scale was given with kv_cache_dtype", scale=1.0)
    refuse(ValueError, "total_tokens = -1 must not be negative", total_tokens=-1)
    refuse(TypeError, "total_tokens is 1.0", total_tokens=1.0)
    for tokens in (2**58, 2**62, 2**62 + 5, 2**63 - 1):  # the product of the shape overflows, to small numbers too
        refuse(ValueError, f"total_tokens x bytes of one token: {tokens} x", total_tokens=tokens)
    refuse(TypeError, "cache is ndarray", cache=np.zeros((6, 2, 4, 8)))
    refuse(TypeError, "block_table is list", block_table=[[0]])
    refuse(ValueError, r"cache has shape \[6, 64\]; \[blocks, heads, block size, head size\]",
           cache=tensor_of(cache.bits(cache.hnd), (64,), "float16", machine.place))  # fmt: skip
    refuse(ValueError, "last dimension must be contiguous", cache=cache.tensor.transpose([0, 1, 3, 2]))
    refuse(ValueError, "block_table is not contiguous", block_table=table.transpose([1, 0]))
    refuse(ValueError, r"block_table has shape \[3\]; \[sequences, blocks per sequence\]", block_table=lengths)
    refuse(ValueError, r"cu_seq_lens has shape \[2, 4\]; \[sequences \+ 1\]", cu_seq_lens=table)
    refuse(ValueError, "cu_seq_lens has 2 entries, block_table 2 rows; one entry more", cu_seq_lens=lengths[:2])
    place = machine.place
    refuse(ValueError, "block_table has dtype float32; int32 or int64",
           block_table=paddle.to_tensor(np.zeros((2, 3), np.float32), place=place))  # fmt: skip
    codes = tensor_of(np.zeros((6, 64), np.uint8), (2, 4, 8), "uint8", place)
    options = {"cache": codes, "kv_cache_dtype": "fp8_e4m3"}
    refuse(ValueError, 'out_dtype = "int8" must be "float16", "bfloat16" or "float32"', out_dtype="int8", **options)
    refuse(ValueError, "scale = 0 must be positive", scale=0, **options)
    wrong = paddle.to_tensor(np.ones(3, np.float32), place=place)
    refuse(ValueError, r"scale has shape \[3\]; one value or one for each of the 2 heads", scale=wrong, **options)
    cache.check_untouched()
    check_gather(cache, sequences([7, 9], 6, 4))  # Paddle is still usable


@pytest.mark.parametrize("full_graph", [True, False])
@pytest.mark.parametrize("form", ["auto", "fp8_e4m3"])
def test_in_a_traced_program(machine: Machine, full_graph: bool, form: str) -> None:
    cache = Cache(machine, 11, 3, 5, 16, "uint8" if form != "auto" else "float16")
    used = sequences(LENGTHS, 11, 5)
    out_dtype = "float16" if form != "auto" else None
    gather_26 = partial(ops.gather_cache, total_tokens=26, kv_cache_dtype=form, out_dtype=out_dtype)

    # What it needs are arguments: 2.6 rewrites the source and loses the names around it.
    def function(cache: Any, table: Any, lengths: Any, gather_26: Any) -> Any:
        return gather_26(cache, table, lengths).reshape([26, 3, 16])  # 2.6 asks the last operator for a gradient

    traced = paddle.jit.to_static(function, full_graph=full_graph)
    expected = reference.gathered(cache.hnd, used.table, used.lengths, 26)
    if form != "auto":
        expected = float_formats.dequantize(expected, 1.0, form, "float16")
    with paddle.no_grad():
        for _ in range(2):
            rows = traced(cache.tensor, *used.tensors(machine), gather_26)
            check_rows(machine, rows, expected, "float16")


def test_a_stream_cannot_be_named_in_a_traced_program(machine: Machine) -> None:
    cache = Cache(machine, 3, 2, 4, 8, "float16")

    def function(cache: Any, table: Any, lengths: Any) -> Any:
        return ops.gather_cache(cache, table, lengths, total_tokens=5, stream=7)

    with pytest.raises(NotImplementedError, match="stream cannot be named in a traced program"):
        paddle.jit.to_static(function, full_graph=True)(cache.tensor, *sequences([5], 3, 4).tensors(machine))
