"""scatter_cache against the reference: layouts, strided tokens, tables, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, Machine, item_bytes, tensor_of
from tests.ops.cache_conformance import LAYOUTS, Cache, Sequences, elements, sequences
from tests.reference import cache_convert as reference

every_layout = pytest.mark.parametrize(("layout", "kind"), LAYOUTS)
LENGTHS = [7, 0, 13, 1, 5]
# Sequences that begin and end anywhere in a tile of 16, 32, 64 or 128 tokens.
TILE_LENGTHS = [130, 0, 1, 67, 200, 64]


def random_rows(shape: tuple[int, ...], size: int, seed: int = 9) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8)
    return elements(bits, size)


def as_tensor(machine: Machine, rows: np.ndarray, dtype: str) -> paddle.Tensor:
    bits = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    return tensor_of(bits, rows.shape[1:], dtype, machine.place)


def scatter(cache: Cache, tokens: paddle.Tensor, used: Sequences) -> paddle.Tensor:
    return ops.scatter_cache(tokens, cache.tensor, *used.tensors(cache.machine), layout=cache.layout)


def check_scatter(cache: Cache, used: Sequences, tokens: int | None = None) -> None:
    tokens = used.tokens if tokens is None else tokens
    rows = random_rows((tokens, cache.heads, cache.head_size), item_bytes(cache.dtype))
    assert scatter(cache, as_tensor(cache.machine, rows, cache.dtype), used) is cache.tensor
    cache.check(reference.scattered(rows, cache.hnd, used.table, used.lengths))


@every_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_layouts_and_dtypes(machine: Machine, layout: str, kind: str, dtype: str, ids: str) -> None:
    check_scatter(Cache(machine, 11, 3, 5, 48, dtype, layout, kind), sequences(LENGTHS, 11, 5, ids=ids))


@every_layout
@pytest.mark.parametrize("head_size", [1, 46, 64, 80, 96, 112, 120, 128, 192, 256, 576, 1030])
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_head_sizes(machine: Machine, layout: str, kind: str, head_size: int, dtype: str) -> None:
    if layout == "packed" and kind == "key" and head_size % (16 // item_bytes(dtype)):
        head_size = head_size // 16 * 16 + 16
    check_scatter(Cache(machine, 9, 2, 4, head_size, dtype, layout, kind), sequences([9, 3, 12], 9, 4))


@every_layout
@pytest.mark.parametrize(("heads", "block_size"), [(1, 1), (1, 64), (7, 16), (40, 3)])
def test_heads_and_block_sizes(machine: Machine, layout: str, kind: str, heads: int, block_size: int) -> None:
    cache = Cache(machine, 13, heads, block_size, 32, "float16", layout, kind)
    check_scatter(cache, sequences([2 * block_size + 1, block_size, 1, 3 * block_size], 13, block_size))


@every_layout
@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 48, 64])
@pytest.mark.parametrize("head_size", [46, 64, 80, 112, 120, 128, 192, 256, 576])
def test_edges_of_tiles(machine: Machine, layout: str, kind: str, block_size: int, head_size: int) -> None:
    if (layout, kind) == ("packed", "key"):
        head_size = -(-head_size // 8) * 8
    blocks = sum(-(-length // block_size) for length in TILE_LENGTHS) + 1
    cache = Cache(machine, blocks, 2, block_size, head_size, "bfloat16", layout, kind)
    check_scatter(cache, sequences(TILE_LENGTHS, blocks, block_size))


@every_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [17, 32])
def test_element_sizes_in_tiles(machine: Machine, layout: str, kind: str, dtype: str, block_size: int) -> None:
    cache = Cache(machine, 33, 3, block_size, 144, dtype, layout, kind)
    check_scatter(cache, sequences(TILE_LENGTHS, 33, block_size))


@every_layout
def test_dimensions_of_size_one_with_odd_strides(machine: Machine, layout: str, kind: str) -> None:
    """A stride that is never taken decides nothing, not even about alignment."""
    wide = random_rows((3, 5, 16), 2)
    cache = Cache(machine, 3, 1, 4, 16, "float16", layout, kind)
    used = sequences([1], 3, 4)
    scatter(cache, as_tensor(machine, wide, "float16")[2:3, 3:4], used)
    cache.check(reference.scattered(wide[2:3, 3:4], cache.hnd, used.table, used.lengths))


@every_layout
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("offset", [1, 16])
def test_views_in_tiles(machine: Machine, layout: str, kind: str, dtype: str, offset: int) -> None:
    """Rows at every alignment, and rows whose elements lie apart."""
    used = sequences(TILE_LENGTHS, 33, 16)
    wide = random_rows((used.tokens, 3, 64 + offset), item_bytes(dtype))
    apart = random_rows((used.tokens, 3, 128), item_bytes(dtype), seed=10)
    for rows, tokens in (
        (wide[:, :, offset:], as_tensor(machine, wide, dtype)[:, :, offset:]),
        (apart[:, :, ::2], as_tensor(machine, apart, dtype)[:, :, ::2]),
    ):
        cache = Cache(machine, 33, 3, 16, 64, dtype, layout, kind)
        scatter(cache, tokens, used)
        cache.check(reference.scattered(rows, cache.hnd, used.table, used.lengths))


@every_layout
def test_more_than_65535_tokens(machine: Machine, layout: str, kind: str) -> None:
    check_scatter(Cache(machine, 4100, 1, 17, 16, "uint8", layout, kind), sequences([66_000, 3_000, 1], 4100, 17))


@every_layout
def test_tokens_without_a_block_are_skipped(machine: Machine, layout: str, kind: str) -> None:
    """Before the first and behind the last sequence, padding, ids beyond the cache, beyond the row of the table."""
    cache = Cache(machine, 6, 3, 4, 32, "uint8", layout, kind)
    table = np.array([[5, -1, 2], [6, 0, 1], [-(2**62), 2**62, 3], [4, -7, -1]])
    check_scatter(cache, Sequences(table, np.array([3, 14, 22, 30, 45])), tokens=50)


@every_layout
def test_strided_tokens_are_read_where_they_lie(machine: Machine, layout: str, kind: str) -> None:
    """Slices of a fused QKV tensor, permuted dimensions, a reversed dimension's worth of strides."""
    heads, head_size = 3, 16
    used = sequences(LENGTHS, 11, 5)
    fused = random_rows((used.tokens, 2 * heads + 5, 2 * head_size), 2)
    tensor = as_tensor(machine, fused, "float16")
    by_head = random_rows((heads, used.tokens, head_size), 2, seed=10)
    by_size = random_rows((head_size, heads, used.tokens), 2, seed=11)
    for rows, tokens in (
        (fused[:, 4:7, :head_size], tensor[:, 4:7, :head_size]),
        (fused[:, 1:7:2, head_size:], tensor[:, 1:7:2, head_size:]),
        (fused[:, :3, ::2], tensor[:, :3, ::2]),
        (by_head.transpose(1, 0, 2), as_tensor(machine, by_head, "float16").transpose([1, 0, 2])),
        (by_size.transpose(2, 1, 0), as_tensor(machine, by_size, "float16").transpose([2, 1, 0])),
    ):
        assert not tokens.is_contiguous()
        cache = Cache(machine, 11, heads, 5, head_size, "float16", layout, kind)
        scatter(cache, tokens, used)
        cache.check(reference.scattered(rows, cache.hnd, used.table, used.lengths))


@every_layout
@pytest.mark.parametrize("shape", [(26, 1, 16), (1, 3, 16), (1, 1, 16)])
def test_strides_of_dimensions_of_size_one_are_not_taken(
    machine: Machine, layout: str, kind: str, shape: tuple[int, int, int]
) -> None:
    tokens, heads, head_size = shape
    used = sequences([tokens], 11, 5)
    fused = random_rows((tokens, 4, 3 * head_size + 1), 2)
    narrow = as_tensor(machine, fused, "float16")[:, 1 : 1 + heads, 5 : 5 + head_size]
    cache = Cache(machine, 11, heads, 5, head_size, "float16", layout, kind)
    scatter(cache, narrow, used)
    rows = fused[:, 1 : 1 + heads, 5 : 5 + head_size]
    cache.check(reference.scattered(rows, cache.hnd, used.table, used.lengths))


@given(data=st.data())
def test_there_and_back(machine: Machine, data: st.DataObject) -> None:
    """gather_cache returns what scatter_cache has written."""
    layout, kind = data.draw(st.sampled_from(LAYOUTS))
    dtype = data.draw(st.sampled_from(["uint8", "float16", "float32"]))
    heads, block_size = (data.draw(st.integers(1, 9)) for _ in range(2))
    unit = 16 // item_bytes(dtype) if (layout, kind) == ("packed", "key") else 1
    head_size = unit * data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    blocks = sum(-(-length // block_size) for length in lengths) + data.draw(st.integers(1, 3))
    used = sequences(lengths, blocks, block_size, seed=data.draw(st.integers(0, 99)))
    cache = Cache(machine, blocks, heads, block_size, head_size, dtype, layout, kind)
    rows = random_rows((used.tokens, heads, head_size), item_bytes(dtype))
    if used.tokens == 0:
        return
    tokens = as_tensor(machine, rows, dtype)
    scatter(cache, tokens, used)
    cache.check(reference.scattered(rows, cache.hnd, used.table, used.lengths))
    back = ops.gather_cache(cache.tensor, *used.tensors(machine), total_tokens=used.tokens, layout=layout)
    np.testing.assert_array_equal(back.numpy().view(rows.dtype), rows)
    np.testing.assert_array_equal(tokens.numpy().view(rows.dtype), rows)


def test_returns_the_cache(machine: Machine) -> None:
    cache = Cache(machine, 3, 1, 2, 4, "float32")
    tokens = as_tensor(machine, random_rows((3, 1, 4), 4), "float32")
    address = cache.tensor.data_ptr()
    assert scatter(cache, tokens, sequences([3], 3, 2)).data_ptr() == address


def test_no_tokens(machine: Machine) -> None:
    cache = Cache(machine, 3, 2, 4, 8, "float32")
    empty = paddle.to_tensor(np.zeros((0, 2, 8), np.float32), place=machine.place)
    assert scatter(cache, empty, sequences([0], 3, 4)) is cache.tensor
    cache.check_untouched()


def test_no_sequences(machine: Machine) -> None:
    cache = Cache(machine, 3, 2, 4, 8, "float32")
    check_scatter(cache, Sequences(np.zeros((0, 3), np.int64), np.array([0])), tokens=5)
    cache.check_untouched()


def test_an_address_that_is_no_multiple_of_anything(machine: Machine) -> None:
    """The guard in front of the cache is one block: of 3 x 7 x 5 = 105 bytes."""
    cache = Cache(machine, 8, 3, 7, 5, "uint8")
    assert cache.tensor.data_ptr() % 2 == 1
    check_scatter(cache, sequences([20, 20], 8, 7))


def test_wrong_tables_are_reported_where_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(machine, 6, 2, 4, 8, "float32")
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    tokens = as_tensor(machine, random_rows((13, 2, 8), 4), "float32")
    with pytest.raises(IndexError, match=r"block_table\[1, 1\] = 6 must be in \[0, 6\)"):
        scatter(cache, tokens, Sequences(np.array([[5, -1], [0, 6]]), np.array([0, 8, 13])))
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] names block 5 a second time; it would be written twice"):
        scatter(cache, tokens, Sequences(np.array([[5, -1], [5, 1]]), np.array([0, 8, 13])))
    with pytest.raises(ValueError, match=r"cu_seq_lens\[2\] = 14 .* not exceed the 13 tokens"):
        scatter(cache, tokens, Sequences(np.array([[5, -1], [0, 1]]), np.array([0, 8, 14])))
    cache.check_untouched()
    check_scatter(cache, Sequences(np.array([[5, -1], [0, 5]]), np.array([0, 8, 12])), 13)  # the second 5 is not used


def test_errors(machine: Machine) -> None:
    cache = Cache(machine, 6, 2, 4, 8, "float16")
    table, lengths = sequences([7, 9], 6, 4).tensors(machine)
    tokens = as_tensor(machine, random_rows((16, 2, 8), 2), "float16")

    def refuse(error: type[Exception], message: str, **changed: Any) -> None:
        given: dict[str, Any] = {"tokens": tokens, "cache": cache.tensor, "block_table": table, "cu_seq_lens": lengths}
        with pytest.raises(error, match=message):
            ops.scatter_cache(**given | changed)

    def other(shape: tuple[int, ...], dtype: Any = np.float16) -> paddle.Tensor:
        return paddle.to_tensor(np.zeros(shape, dtype), place=machine.place)

    refuse(ValueError, 'layout = "" must be "HND", "NHD" or "packed"', layout="")
    refuse(TypeError, "tokens is ndarray; a paddle.Tensor is expected", tokens=np.zeros((16, 2, 8)))
    refuse(ValueError, r"tokens has shape \[16, 3, 8\]; \[tokens, 2, 8\] is expected", tokens=other((16, 3, 8)))
    refuse(ValueError, r"tokens has shape \[16, 16\]; \[tokens, 2, 8\] is expected", tokens=other((16, 16)))
    refuse(ValueError, "tokens has dtype float32, cache float16", tokens=other((16, 2, 8), np.float32))
    refuse(ValueError, r"tokens has shape \[16, 2, 9\]", tokens=other((16, 2, 10))[:, :, :9])
    refuse(ValueError, r"tokens has shape \[16, 8\]; \[tokens, 2, 8\]", tokens=other((16, 10))[:, :8])
    refuse(ValueError, "tokens has dtype .*float32, cache .*float16", tokens=other((16, 2, 10), np.float32)[:, :, :8])
    refuse(ValueError, r"tokens has shape .*; \[tokens, 4, 8\] is expected", cache=cache.tensor.transpose([0, 2, 1, 3]))
    refuse(ValueError, "last dimension must be contiguous", cache=cache.tensor.transpose([0, 1, 3, 2]),
           tokens=other((16, 2, 4)))  # fmt: skip
    refuse(ValueError, r"cache has shape \[6, 2, 4, 4, 2\]; \[blocks, heads, block size", layout="HND",
           cache=other((6, 2, 4, 4, 2)))  # fmt: skip
    refuse(ValueError, "block_table has dtype float16; int32 or int64", block_table=other((2, 3)))
    cache.check_untouched()


@pytest.mark.parametrize("full_graph", [True, False])
def test_in_a_traced_program(machine: Machine, full_graph: bool) -> None:
    cache = Cache(machine, 11, 3, 5, 16, "float32")
    used = sequences(LENGTHS, 11, 5)

    def function(tokens: Any, cache: Any, table: Any, lengths: Any) -> Any:
        cache = ops.scatter_cache(tokens, cache, table, lengths)
        return cache.reshape(cache.shape)  # 2.6 asks the last operator for a gradient

    traced = paddle.jit.to_static(function, full_graph=full_graph)
    hnd = cache.hnd
    with paddle.no_grad():
        for seed in (1, 2):
            rows = random_rows((used.tokens, 3, 16), 4, seed)
            result = traced(as_tensor(machine, rows, "float32"), cache.tensor, *used.tensors(machine))
            hnd = reference.scattered(rows, hnd, used.table, used.lengths)
            cache.check(hnd)
            np.testing.assert_array_equal(result.numpy().view(np.uint32), hnd)
