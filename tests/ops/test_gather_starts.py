"""gather_cache and scatter_cache from within the rows of a block table; gather_cache into a tensor of the caller."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.fuzz.both_ways import registered_only
from tests.machine import GuardedCache, Machine, item_bytes
from tests.ops.cache_conformance import LAYOUTS, Cache, Sequences, check_rows, elements
from tests.ops.insert_conformance import slot_tensor, tensor
from tests.reference import cache_convert as reference
from tests.reference import float_formats

every_layout = pytest.mark.parametrize(("layout", "kind"), LAYOUTS)
BLOCK_SIZES = [1, 5, 16, 64]


def rows_of_table(blocks: int, ids: str = "int64") -> tuple[Sequences, np.ndarray]:
    """Sequences of any lengths, that begin anywhere in their rows: no two share a block."""
    ids_in_order = np.random.default_rng(2).permutation(blocks)
    return Sequences(ids_in_order.reshape(4, -1), np.array([0, 70, 70, 79, 130]), ids), np.array([3, 1, 16, 0])


def room(block_size: int) -> int:
    return 4 * (-(-90 // block_size))


@every_layout
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_starts(machine: Machine, layout: Any, kind: str, block_size: int, ids: str) -> None:
    cache = Cache(machine, room(block_size), 2, block_size, 48, "bfloat16", layout, kind)
    used, starts = rows_of_table(cache.blocks, ids)
    by = {"starts": slot_tensor(starts, machine, ids), "layout": layout}
    rows = ops.gather_cache(cache.tensor, *used.tensors(machine), total_tokens=used.tokens, **by)
    check_rows(machine, rows, reference.gathered(cache.hnd, used.table, used.lengths, used.tokens, starts), "bfloat16")
    cache.check_untouched()
    bits = np.random.default_rng(6).integers(0, 256, (used.tokens, 2 * 48 * 2), np.uint8)
    new = GuardedCache(machine, bits, (2, 48), "bfloat16").tensor
    ops.scatter_cache(new, cache.tensor, *used.tensors(machine), **by)
    moved = elements(bits, 2).reshape(used.tokens, 2, 48)
    cache.check(reference.scattered(moved, cache.hnd, used.table, used.lengths, starts))


@every_layout
@pytest.mark.parametrize("by_token", [False, True])
def test_starts_of_what_is_dequantised(machine: Machine, layout: Any, kind: str, by_token: bool) -> None:
    cache = Cache(machine, room(5), 3, 5, 32, "uint8", layout, kind)
    used, starts = rows_of_table(cache.blocks)
    shape = (cache.blocks, 3, 5) if by_token else (3,)
    scales = np.random.default_rng(5).uniform(0.1, 3, shape).astype(np.float32)
    rows = ops.gather_cache(
        cache.tensor, *used.tensors(machine), total_tokens=used.tokens, layout=layout, kv_cache_dtype="fp8_e4m3",
        scale=tensor(scales, machine), starts=slot_tensor(starts, machine), out_dtype="bfloat16",
    )  # fmt: skip
    codes = reference.gathered(cache.hnd, used.table, used.lengths, used.tokens, starts)
    factors: Any = scales[:, None]
    if by_token:
        factors = reference.gathered(scales[..., None], used.table, used.lengths, used.tokens, starts)
    check_rows(machine, rows, float_formats.dequantize(codes, factors, "fp8_e4m3", "bfloat16"), "bfloat16")


@every_layout
def test_starts_where_nothing_is(machine: Machine, layout: Any, kind: str) -> None:
    """Negative, behind the row of the table, and so large that a sum with them has no 64 bits."""
    cache = Cache(machine, 12, 2, 4, 16, "float16", layout, kind)
    table, lengths = np.arange(12).reshape(6, 2), np.array([2, 6, 10, 14, 18, 22, 26])
    starts = np.array([-1, 6, 8, 2**63 - 1, -(2**63), 2**62])
    used = Sequences(table, lengths)
    rows = ops.gather_cache(
        cache.tensor, *used.tensors(machine), total_tokens=30, layout=layout, starts=slot_tensor(starts, machine)
    )
    expected = reference.gathered(cache.hnd, table, lengths, 30, starts.astype(object))
    assert (expected != 0).any(axis=(1, 2)).sum() == 2, "the reference itself: positions 6 and 7 of the second one"
    check_rows(machine, rows, expected, "float16")
    bits = np.random.default_rng(6).integers(0, 256, (30, 2 * 16 * 2), np.uint8)
    new = GuardedCache(machine, bits, (2, 16), "float16").tensor
    ops.scatter_cache(new, cache.tensor, *used.tensors(machine), layout=layout, starts=slot_tensor(starts, machine))
    moved = elements(bits, 2).reshape(30, 2, 16)
    cache.check(reference.scattered(moved, cache.hnd, table, lengths, starts.astype(object)))


def test_starts_that_do_not_fit(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(machine, 4, 1, 4, 8, "float16")
    used = Sequences(np.array([[0, 1], [2, 3]]), np.array([0, 3, 6]))
    new = tensor(np.zeros((6, 1, 8), np.float16), machine)

    def both(starts: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            ops.gather_cache(cache.tensor, *used.tensors(machine), total_tokens=6, starts=starts)
        with pytest.raises(error, match=message):
            ops.scatter_cache(new, cache.tensor, *used.tensors(machine), starts=starts)
        cache.check_untouched()

    both(slot_tensor([0], machine), ValueError, "starts has 1 entries, block_table 2 rows; one entry for each row")
    both(slot_tensor([[0, 0]], machine), ValueError, r"starts has shape \[1, 2\]; \[sequences\] is expected")
    both(
        slot_tensor(np.zeros(0), machine), ValueError, r"starts has shape \[0\]; one entry for each row of block_table"
    )
    both(tensor(np.zeros(2, np.float32), machine), ValueError, "starts has dtype float32; int32 or int64 is expected")
    both(slot_tensor([0, 0, 0, 0], machine)[::2], ValueError, "starts is not contiguous")
    both([0, 0], TypeError, "starts is list")
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    both(slot_tensor([0, -1], machine), IndexError, r"starts\[1\] = -1 must be in \[0, 8\]")
    both(slot_tensor([9, 0], machine), IndexError, r"starts\[0\] = 9 must be in \[0, 8\]")
    both(slot_tensor([0, 6], machine), IndexError, "sequence 1 has 3 blocks, block_table has 2 for it")
    ops.gather_cache(cache.tensor, *used.tensors(machine), total_tokens=6, starts=slot_tensor([5, 1], machine))
    ahead = Sequences(np.array([[99, 1], [2, 3]]), used.lengths)  # what lies before the start is not read
    ops.gather_cache(cache.tensor, *ahead.tensors(machine), total_tokens=6, starts=slot_tensor([4, 0], machine))


def test_slots_that_two_sequences_share_are_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows may name a block as long as they write other slots of it."""
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    cache = Cache(machine, 4, 1, 4, 8, "float16")
    used = Sequences(np.array([[0, 1], [3, 1]]), np.array([0, 4, 7]))
    bits = np.random.default_rng(6).integers(0, 256, (7, 16), np.uint8)
    new = GuardedCache(machine, bits, (1, 8), "float16").tensor
    with pytest.raises(ValueError, match=r"block_table\[1, 1\] names block 1 a second time"):
        ops.scatter_cache(new, cache.tensor, *used.tensors(machine), starts=slot_tensor([2, 3], machine))
    cache.check_untouched()
    ops.scatter_cache(new, cache.tensor, *used.tensors(machine), starts=slot_tensor([1, 5], machine))
    moved = elements(bits, 2).reshape(7, 1, 8)
    cache.check(reference.scattered(moved, cache.hnd, used.table, used.lengths, np.array([1, 5])))


@every_layout
@pytest.mark.parametrize(("dtype", "form"), [("bfloat16", "auto"), ("float32", "auto"), ("uint8", "fp8_e4m3")])
def test_into_a_tensor_of_the_caller(machine: Machine, layout: Any, kind: str, dtype: str, form: Any) -> None:
    cache = Cache(machine, room(5), 3, 5, 48, dtype, layout, kind)
    used, starts = rows_of_table(cache.blocks)
    out_dtype = "float16" if form != "auto" else dtype
    bits = np.random.default_rng(1).integers(0, 256, (used.tokens, 3 * 48 * item_bytes(out_dtype)), np.uint8)
    out = GuardedCache(machine, bits, (3, 48), out_dtype)
    version = out.tensor.inplace_version
    for total_tokens, way in ((None, contextlib.nullcontext), (used.tokens, registered_only)):
        with way():
            result = ops.gather_cache(
                cache.tensor, *used.tensors(machine), total_tokens=total_tokens, out=out.tensor, layout=layout,
                kv_cache_dtype=form, starts=slot_tensor(starts, machine),
            )  # fmt: skip
        assert result is out.tensor
        expected = reference.gathered(cache.hnd, used.table, used.lengths, used.tokens, starts)
        if form != "auto":
            empty = (expected == 0).all(axis=(1, 2))
            expected = float_formats.dequantize(expected, 1.0, form, out_dtype)
            assert not empty.any()
        machine.synchronize()
        out.check(np.ascontiguousarray(expected).view(np.uint8).reshape(used.tokens, -1))
    assert out.tensor.inplace_version == version + 2
    cache.check_untouched()


def test_into_what_does_not_fit(machine: Machine) -> None:
    cache = Cache(machine, 4, 2, 4, 8, "float16")
    used = Sequences(np.array([[0, 1], [2, 3]]), np.array([0, 3, 6]))
    table, lengths = used.tensors(machine)

    def refuse(out: Any, error: type[Exception], message: str, **options: Any) -> None:
        before = out.numpy().tobytes() if isinstance(out, paddle.Tensor) else b""
        with pytest.raises(error, match=message):
            ops.gather_cache(options.pop("cache", cache.tensor), table, lengths, out=out, **options)
        machine.synchronize()
        assert not isinstance(out, paddle.Tensor) or out.numpy().tobytes() == before
        cache.check_untouched()

    def zeros(*shape: int, dtype: Any = np.float16) -> paddle.Tensor:
        return tensor(np.zeros(shape, dtype), machine)

    refuse(zeros(6, 2, 9), ValueError, r"out has shape \[6, 2, 9\]; \[6, 2, 8\] is expected")
    refuse(zeros(6, 16), ValueError, r"out has shape \[6, 16\]; \[6, 2, 8\] is expected")
    refuse(zeros(6, 2, 8, dtype=np.float32), ValueError, 'out_dtype = "float32" differs from the dtype of cache')
    refuse(zeros(6, 2, 8), ValueError, "out has dtype .*float16, out_dtype is float32", out_dtype="float32")
    refuse(zeros(6, 2, 8), ValueError, "total_tokens = 5, out has 6 rows; both must be the same", total_tokens=5)
    refuse(zeros(6, 2, 16)[..., :8], ValueError, "out is not contiguous")
    refuse(zeros(0, 2, 9), ValueError, r"out has shape \[0, 2, 9\]; \[0, 2, 8\] is expected")
    refuse([1], TypeError, "out is list")
    inside = cache.tensor.flatten()[8 : 8 + 96].reshape([6, 2, 8])
    refuse(inside, ValueError, "out and cache overlap; out must be memory of its own")
    ids = tensor(np.zeros((7, 2, 2), np.int64), machine)
    with pytest.raises(ValueError, match="out and block_table overlap"):
        ops.gather_cache(
            tensor(np.zeros((9, 1, 2, 4), np.int64), machine), ids.flatten()[8:10].reshape([1, 2]),
            slot_tensor([0, 3], machine), out=ids.flatten()[:12].reshape([3, 1, 4]),
        )  # fmt: skip
    with pytest.raises(ValueError, match="out and cu_seq_lens overlap"):
        ops.gather_cache(
            tensor(np.zeros((9, 1, 2, 4), np.int64), machine), slot_tensor([[0, 1]], machine),
            ids.flatten()[11:13], out=ids.flatten()[:12].reshape([3, 1, 4]),
        )  # fmt: skip
    with pytest.raises(ValueError, match="out and starts overlap"):
        ops.gather_cache(
            tensor(np.zeros((9, 1, 2, 4), np.int64), machine), slot_tensor([[0, 1]], machine),
            slot_tensor([0, 3], machine), out=ids.flatten()[:12].reshape([3, 1, 4]), starts=ids.flatten()[:1],
        )  # fmt: skip
    scales = tensor(np.ones(64, np.float32), machine)
    with pytest.raises(ValueError, match="out and scale overlap"):
        ops.gather_cache(
            tensor(np.zeros((9, 1, 2, 4), np.int8), machine), slot_tensor([[0, 1]], machine),
            slot_tensor([0, 3], machine), out=scales[:12].reshape([3, 1, 4]), kv_cache_dtype="int8",
            scale=scales[11:12],
        )  # fmt: skip
    with pytest.raises(TypeError, match="total_tokens is None"):
        ops.gather_cache(cache.tensor, table, lengths)
    cache.check_untouched()


def test_a_row_beside_the_cache_is_no_overlap(machine: Machine) -> None:
    """Memory between the blocks of a view is not the view's."""
    whole = tensor(np.arange(4 * 2 * 6, dtype=np.float32).reshape(4, 2, 1, 1, 6), machine)
    table, lengths = slot_tensor([[3]], machine), slot_tensor([0, 1], machine)
    out = whole[2, 1]
    assert ops.gather_cache(whole[:, 0], table, lengths, out=out) is out
    machine.synchronize()
    assert whole.numpy()[2, 1, 0, 0].tolist() == list(range(36, 42))


def test_no_tokens_into_a_tensor(machine: Machine) -> None:
    cache = Cache(machine, 4, 2, 4, 8, "float16")
    used = Sequences(np.array([[0], [1]]), np.array([0, 0, 0]))
    out = paddle.zeros([0, 2, 8], "float16")._copy_to(machine.place, True)
    assert ops.gather_cache(cache.tensor, *used.tensors(machine), out=out) is out
    none = Sequences(np.zeros((0, 1)), np.array([0]))
    starts = slot_tensor(np.zeros(0), machine)
    rows = ops.gather_cache(cache.tensor, *none.tensors(machine), total_tokens=2, starts=starts)
    assert not rows.numpy().any()


@pytest.mark.parametrize("full_graph", [True, False])
def test_in_a_program(machine: Machine, full_graph: bool) -> None:
    cache = Cache(machine, room(5), 2, 5, 16, "float16")
    used, starts = rows_of_table(cache.blocks)

    def function(cache: Any, table: Any, lengths: Any, starts: Any, out: Any) -> Any:
        return ops.gather_cache(cache, table, lengths, starts=starts, out=out).reshape([130, 32])

    traced = paddle.jit.to_static(function, full_graph=full_graph)
    out = tensor(np.ones((130, 2, 16), np.float16), machine)
    with paddle.no_grad():
        rows = traced(cache.tensor, *used.tensors(machine), slot_tensor(starts, machine), out)
    expected = reference.gathered(cache.hnd, used.table, used.lengths, used.tokens, starts)
    check_rows(machine, rows, expected.reshape(130, 32), "float16")


def test_a_sequence_without_tokens_has_no_block(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it starts, and whatever its row of the block table says."""
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    cache = Cache(machine, 4, 1, 2, 16, "bfloat16", "NHD", "key")
    used, starts = Sequences(np.array([[1], [1], [70]]), np.array([0, 2, 2, 2])), np.array([0, 1, 1])
    by = {"starts": slot_tensor(starts, machine), "layout": "NHD"}
    rows = ops.gather_cache(cache.tensor, *used.tensors(machine), total_tokens=2, **by)
    check_rows(machine, rows, reference.gathered(cache.hnd, used.table, used.lengths, 2, starts), "bfloat16")
    ops.scatter_cache(rows, cache.tensor, *used.tensors(machine), **by)
    cache.check_untouched()
