"""fp8_ds_mla: the 656 bytes a token that concat_and_cache_mla writes and gather_cache reads, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import GuardedCache, Machine
from tests.ops.cache_conformance import check_rows, sequences
from tests.ops.insert_conformance import random_rows, slot_tensor, tensor
from tests.reference import cache_convert, float_formats
from tests.reference.cache_insert import inserted, scales_of_rows

BYTES = 656
LENGTHS = [70, 0, 1, 33]
FORM: Any = "fp8_ds_mla"
# Rank 3, and both places of the one head.
SHAPES = [lambda t: (t, BYTES), lambda t: (1, t, BYTES), lambda t: (t, 1, BYTES)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=["latent", "head first", "token first"])


def packed(latent: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """[tokens, 656] bytes."""
    groups = latent.reshape(len(latent), 4, 128)
    scales = scales_of_rows(groups, "fp8_e4m3")
    codes = float_formats.quantize(groups, scales[..., None], "fp8_e4m3").reshape(len(latent), 512)
    parts = (codes.view(np.uint8), scales.view(np.uint8), np.ascontiguousarray(rope).view(np.uint8))
    return np.concatenate(parts, axis=1)


def unpacked(rows: np.ndarray) -> np.ndarray:
    """[tokens, 576] bfloat16, as bits."""
    scales = np.ascontiguousarray(rows[:, 512:528]).view(np.float32)
    codes = rows[:, :512].reshape(len(rows), 4, 128)
    values = float_formats.dequantize(codes, scales[..., None], "fp8_e4m3", "bfloat16")
    rope = np.ascontiguousarray(rows[:, 528:]).view(np.uint16)
    return np.concatenate([values.view(np.uint16).reshape(len(rows), 512), rope], axis=1)


def memory(blocks: int, block_size: int) -> np.ndarray:
    """Tokens as they would be written, [blocks, block size, 656]."""
    tokens = blocks * block_size
    new = packed(random_rows((tokens, 512), "bfloat16", 1), random_rows((tokens, 64), "bfloat16", 2))
    return new.reshape(blocks, block_size, BYTES)


@every_shape
@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_written(machine: Machine, shape: Any, block_size: int, tokens: int) -> None:
    blocks = tokens // block_size + 2
    before = memory(blocks, block_size)
    cache = GuardedCache(machine, before.reshape(blocks, -1), shape(block_size), "uint8")
    latent, rope = (random_rows((tokens, size), "bfloat16", size) for size in (512, 64))
    latent[0, :128] = 0
    slots = np.random.default_rng(4).permutation(blocks * block_size)[:tokens]
    if tokens > 5:
        slots[[1, 3, 5]] = [-1, -(2**40), blocks * block_size]
    result = ops.concat_and_cache_mla(
        tensor(latent, machine), tensor(rope, machine), cache.tensor, slot_tensor(slots, machine), kv_cache_dtype=FORM
    )
    assert result is cache.tensor
    machine.synchronize()
    expected = inserted(packed(latent, rope)[:, None], before[:, None], slots)
    cache.check(expected.reshape(blocks, -1))


def test_slices_of_one_projection(machine: Machine) -> None:
    """Rows that are no whole words, and elements that do not lie side by side."""
    before = memory(3, 8)
    latent, rope = (random_rows((11, size), "bfloat16", size) for size in (512, 64))
    slots = np.random.default_rng(4).permutation(24)[:11]
    expected = inserted(packed(latent, rope)[:, None], before[:, None], slots).reshape(3, -1)
    fused = tensor(np.concatenate([latent[:, :3], latent, rope], axis=1), machine)
    turned = tensor(np.ascontiguousarray(latent.T), machine).t(), tensor(np.repeat(rope, 3, axis=1), machine)[:, ::3]
    for given in ((fused[:, 3:515], fused[:, 515:]), turned):
        cache = GuardedCache(machine, before.reshape(3, -1), (8, BYTES), "uint8")
        ops.concat_and_cache_mla(*given, cache.tensor, slot_tensor(slots, machine, "int32"), kv_cache_dtype=FORM)
        machine.synchronize()
        cache.check(expected)


@every_shape
@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("into", [False, True])
def test_read(machine: Machine, shape: Any, block_size: int, into: bool) -> None:
    blocks = sum(-(-length // block_size) for length in LENGTHS) + 2
    bits = memory(blocks, block_size)
    cache = GuardedCache(machine, bits.reshape(blocks, -1), shape(block_size), "uint8")
    used = sequences(LENGTHS, blocks, block_size)
    total = used.tokens + 3  # of no sequence
    layout: Any = "NHD" if shape(7) == (7, 1, BYTES) else "HND"
    heads = (1,) if len(shape(7)) == 3 else ()
    out = None
    if into:
        out = GuardedCache(machine, np.full((total, 1152), 7, np.uint8), (*heads, 576), "bfloat16")
    rows = ops.gather_cache(
        cache.tensor, *used.tensors(machine), total_tokens=total, kv_cache_dtype=FORM, layout=layout,
        out=None if out is None else out.tensor,
    )  # fmt: skip
    expected = unpacked(cache_convert.gathered(bits[:, None], used.table, used.lengths, total)[:, 0])
    expected[used.tokens :] = 0
    if out is None:
        check_rows(machine, rows, expected.reshape(total, *heads, 576), "bfloat16")
    else:
        machine.synchronize()
        out.check(expected.view(np.uint8))
    cache.check(bits.reshape(blocks, -1))


def test_there_and_back_through_views(machine: Machine) -> None:
    """One layer of all layers, rows longer than their tokens: written by slots, read from within a table."""
    bits = np.random.default_rng(3).integers(0, 256, (9, 2, 16, 672), np.uint8)
    whole = GuardedCache(machine, bits.reshape(9, -1), (2, 16, 672), "uint8")
    view = whole.tensor[:, 1, :, 4:660]
    latent, rope = (random_rows((100, size), "bfloat16", size) for size in (512, 64))
    table = np.random.default_rng(5).permutation(9)
    slots = np.array([table[p // 16] * 16 + p % 16 for p in range(100)])
    ops.concat_and_cache_mla(
        tensor(latent, machine), tensor(rope, machine), view, slot_tensor(slots, machine), kv_cache_dtype=FORM
    )
    machine.synchronize()
    expected = bits.copy()
    expected[:, 1, :, 4:660] = inserted(packed(latent, rope)[:, None], bits[:, None, 1, :, 4:660], slots)[:, 0]
    whole.check(expected.reshape(9, -1))
    rows = ops.gather_cache(
        view, slot_tensor(table[None], machine), slot_tensor([0, 90], machine), total_tokens=90, kv_cache_dtype=FORM,
        starts=slot_tensor([10], machine),
    )  # fmt: skip
    check_rows(machine, rows, unpacked(packed(latent, rope)[10:]), "bfloat16")


def test_what_does_not_fit(machine: Machine) -> None:
    cache = tensor(np.zeros((3, 4, BYTES), np.uint8), machine)
    ids = slot_tensor([[0]], machine), slot_tensor([0, 2], machine)

    def write(message: str, rank: int = 512, rope: int = 64, dtype: Any = ml_dtypes.bfloat16, into: Any = cache,
              **options: Any) -> None:  # fmt: skip
        given = [tensor(np.ones((2, size), dtype), machine) for size in (rank, rope)]
        with pytest.raises(ValueError, match=message):
            ops.concat_and_cache_mla(*given, into, slot_tensor([3, 5], machine), kv_cache_dtype=FORM, **options)
        assert not into.numpy().any()

    def read(message: str, given: Any = cache, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            ops.gather_cache(given, *ids, total_tokens=2, kv_cache_dtype=FORM, **options)

    write("kv_c has rank 511, k_pe has rope 64; 512 and 64 are expected", rank=511)
    write("kv_c has rank 512, k_pe has rope 65; 512 and 64 are expected", rope=65)
    write("kv_c has dtype float16; bfloat16 is expected", dtype=np.float16)
    write("scale is given, but", scale=1.0)
    read("scale was given with", scale=1.0)
    read("out_dtype is float32; bfloat16 is expected", out_dtype="float32")
    read("out_dtype is float32; bfloat16 is expected", out=tensor(np.zeros((2, 576), np.float32), machine))
    read(
        r"out has shape \[2, 656\]; \[2, 576\] is expected",
        out=paddle.zeros([2, 656], "bfloat16")._copy_to(machine.place, True),
    )
    for wrong, message in (
        (np.zeros((3, 4, 657), np.uint8), r"has shape \[3, 4, 657\]; \[blocks, block size, 656\] is expected"),
        (np.zeros((3, 4, BYTES), np.int8), "has dtype int8; uint8 is expected"),
    ):
        write(message, into=tensor(wrong, machine))
        read(message, tensor(wrong, machine))
    heads = tensor(np.zeros((3, 2, 4, BYTES), np.uint8), machine)
    read(r"has shape \[3, 2, 4, 656\]; \[blocks, block size, 656\] is expected", heads)
    wide = tensor(np.zeros((3, 4, 660), np.uint8), machine)
    write("tokens at addresses that are no multiples of 4 bytes", into=wide[..., 2:658])
    read("tokens at addresses that are no multiples of 4 bytes", wide[..., 2:658])
    with pytest.raises(ValueError, match='kv_cache_dtype = "fp8_ds_mla" must be'):
        rows = tensor(np.ones((1, 1, 656), np.float16), machine)
        caches = [tensor(np.zeros((3, 1, 4, BYTES), np.uint8), machine) for _ in "kv"]
        ops.reshape_and_cache(rows, rows, *caches, slot_tensor([3], machine), kv_cache_dtype=FORM)


def test_slots_beyond_the_cache_are_reported_where_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    cache = tensor(np.zeros((3, 4, BYTES), np.uint8), machine)
    given = [tensor(np.ones((2, size), ml_dtypes.bfloat16), machine) for size in (512, 64)]
    with pytest.raises(IndexError, match=r"slot_mapping\[1\] = 12 must be in \[0, 12\)"):
        ops.concat_and_cache_mla(*given, cache, slot_tensor([3, 12], machine), kv_cache_dtype=FORM)
    assert not cache.numpy().any()


@pytest.mark.parametrize("full_graph", [True, False])
def test_in_a_program(machine: Machine, full_graph: bool) -> None:
    def step(kv_c: Any, k_pe: Any, cache: Any, slots: Any, table: Any, lengths: Any) -> Any:
        cache = ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, kv_cache_dtype="fp8_ds_mla")
        rows = ops.gather_cache(cache, table, lengths, total_tokens=5, kv_cache_dtype="fp8_ds_mla")
        return rows.reshape([5, 576])

    traced = paddle.jit.to_static(step, full_graph=full_graph)
    latent, rope = (random_rows((5, size), "bfloat16", size) for size in (512, 64))
    cache = tensor(np.zeros((3, 4, BYTES), np.uint8), machine)
    with paddle.no_grad():
        rows = traced(
            tensor(latent, machine), tensor(rope, machine), cache, slot_tensor([8, 9, 10, 11, 0], machine),
            slot_tensor([[2, 0]], machine), slot_tensor([0, 5], machine),
        )  # fmt: skip
    check_rows(machine, rows, unpacked(packed(latent, rope)), "bfloat16")
