"""Inserts, gathers and scatters on caches that are views with strides: on the whole memory of the tensor behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.fuzz.both_ways import registered_only
from tests.machine import GuardedCache, Machine, cpu_machine, item_bytes
from tests.ops.cache_conformance import check_rows, elements, sequences
from tests.ops.insert_conformance import CACHE_DTYPES, random_bits, random_rows, slot_tensor, tensor
from tests.reference import cache_convert, float_formats
from tests.reference.cache_insert import placed, scales_of_rows

# [tokens of a block, heads, head size]
SIZES = [(4, 3, 32), (1, 1, 72), (5, 1, 16), (3, 2, 72), (16, 4, 128), (2, 3, 7)]


@dataclass
class Form:
    """How keys (0) and values (1) lie in one tensor. NumPy and Paddle make the same views."""

    layout: str
    block_shape: Callable[[int, int, int], tuple[int, ...]]
    view: Callable[[Any, int], Any]


FORMS = {
    "keys and values of a block": Form("NHD", lambda t, h, d: (2, t, h, d), lambda base, i: base[:, i]),
    "the same, seen as HND": Form(
        "HND", lambda t, h, d: (2, t, h, d), lambda base, i: base[:, i].transpose([0, 2, 1, 3])
    ),
    "NHD, seen as HND": Form("HND", lambda t, h, d: (t, 2 * h, d), lambda base, i: heads_of(base, i)),
    "HND, seen as NHD": Form("NHD", lambda t, h, d: (2, h, t, d), lambda base, i: base[:, i].transpose([0, 2, 1, 3])),
    "beside each other in a token": Form("NHD", lambda t, h, d: (t, 2, h, d), lambda base, i: base[:, :, i]),
    "beside each other in a head": Form("NHD", lambda t, h, d: (t, h, 2 * d), lambda base, i: half_of(base, i)),
    "HND, one layer of three": Form("HND", lambda t, h, d: (3, 2, h, t, d), lambda base, i: base[:, 1, i]),
    "packed values": Form("packed", lambda t, h, d: (2, h, d, t), lambda base, i: base[:, i]),
}  # fmt: skip


def heads_of(base: Any, i: int) -> Any:
    heads = base.shape[2] // 2
    return base.transpose([0, 2, 1, 3])[:, i * heads : (i + 1) * heads]


def half_of(base: Any, i: int) -> Any:
    size = base.shape[-1] // 2
    return base[..., i * size : (i + 1) * size]


every_form = pytest.mark.parametrize("name", list(FORMS))
plain_forms = pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.layout != "packed"])


class Views:
    """Two caches in one guarded tensor of random bits."""

    def __init__(self, machine: Machine, name: str, sizes: tuple[int, int, int], dtype: str, blocks: int = 6) -> None:
        self.machine, self.form, self.dtype = machine, FORMS[name], dtype
        self.block_size, self.heads, self.head_size = sizes
        self.blocks = blocks
        shape = self.form.block_shape(*sizes)
        size = int(np.prod(shape)) * item_bytes(dtype)
        bits = np.random.default_rng(3).integers(0, 256, (blocks, size), np.uint8)
        self.guarded = GuardedCache(machine, bits, shape, dtype)
        self.base = elements(bits, item_bytes(dtype)).reshape(blocks, *shape)
        self.tensors = [self.form.view(self.guarded.tensor, i) for i in range(2)]
        assert blocks == 1 or not self.tensors[0].is_contiguous()

    def hnd(self, i: int) -> np.ndarray:
        return cache_convert.from_layout(self.form.view(self.base, i), self.form.layout)

    def check(self, *expected_hnd: np.ndarray) -> None:
        base = self.base.copy()
        for i, hnd in enumerate(expected_hnd):
            self.form.view(base, i)[...] = cache_convert.to_layout(hnd.view(base.dtype), self.form.layout, "value")
        self.machine.synchronize()
        self.guarded.check(base.view(np.uint8).reshape(self.blocks, -1))

    def slots(self, tokens: int) -> np.ndarray:
        slots = np.random.default_rng(4).permutation(self.blocks * self.block_size)[:tokens]
        outside = [-1, -(2**40), self.blocks * self.block_size][: tokens // 3]
        slots[: len(outside)] = outside
        return slots

    def rows(self, tokens: int, dtype: str, make: Any) -> list[np.ndarray]:
        return [make((tokens, self.heads, self.head_size), dtype, seed) for seed in (1, 2)]


def inserted(rows: np.ndarray, hnd: np.ndarray, slots: np.ndarray) -> np.ndarray:
    cache = hnd.copy()
    for token, block, position in placed(slots, cache):
        cache[block, :, position] = rows[token].view(hnd.dtype)
    return cache


@every_form
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", ["auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_inserts(machine: Machine, name: str, sizes: tuple[int, int, int], form: Any, dtype: str) -> None:
    views = Views(machine, name, sizes, CACHE_DTYPES.get(form, dtype))
    if form != "auto" and name == "packed values":
        return  # its keys are no packed keys
    tokens = min(11, views.blocks * views.block_size)
    rows, slots = views.rows(tokens, dtype, random_bits if form == "auto" else random_rows), views.slots(tokens)
    scale = None if form == "auto" else 0.3
    insert(views, rows, slots, kv_cache_dtype=form, k_scale=scale, v_scale=scale)
    stored = [each if form == "auto" else float_formats.quantize(each, 0.3, form) for each in rows]
    check_inserted(views, stored, slots)


def insert(views: Views, rows: list[np.ndarray], slots: np.ndarray, **options: Any) -> None:
    """Packed keys are contiguous, beside values that are not."""
    caches, machine = list(views.tensors), views.machine
    if views.form.layout == "packed":
        shape = (views.blocks, views.heads, 1, views.block_size, views.head_size)
        caches[0] = tensor(np.zeros(shape, rows[0].dtype), machine)
    result = ops.reshape_and_cache(
        *(tensor(each, machine) for each in rows), *caches, slot_tensor(slots, machine), layout=views.form.layout,
        **options,
    )  # fmt: skip
    assert all(a is b for a, b in zip(result, caches, strict=True))


def check_inserted(views: Views, stored: list[np.ndarray], slots: np.ndarray) -> None:
    keys = views.hnd(0) if views.form.layout == "packed" else inserted(stored[0], views.hnd(0), slots)
    views.check(keys, inserted(stored[1], views.hnd(1), slots))


@every_form
def test_many_tokens(machine: Machine, name: str) -> None:
    views = Views(machine, name, (16, 3, 72), "float16", blocks=300)
    rows, slots = views.rows(4000, "float16", random_bits), views.slots(4000)
    insert(views, rows, slots)
    check_inserted(views, rows, slots)


@plain_forms
@pytest.mark.parametrize("sizes", SIZES)
def test_inserts_with_computed_scales(machine: Machine, name: str, sizes: tuple[int, int, int]) -> None:
    views = Views(machine, name, sizes, "uint8")
    tokens = min(11, views.blocks * views.block_size)
    rows, slots = views.rows(tokens, "bfloat16", random_rows), views.slots(tokens)
    scales = [tensor(np.zeros((6, sizes[1], sizes[0]), np.float32), machine) for _ in range(2)]
    ops.reshape_and_cache_dynamic(
        *(tensor(each, machine) for each in rows), *views.tensors, *scales, slot_tensor(slots, machine),
        layout=views.form.layout,
    )  # fmt: skip
    codes = [float_formats.quantize(each, scales_of_rows(each, "fp8_e4m3")[..., None], "fp8_e4m3") for each in rows]
    views.check(*(inserted(codes[i], views.hnd(i), slots) for i in range(2)))


@every_form
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_gathers_and_scatters(machine: Machine, name: str, sizes: tuple[int, int, int], dtype: str) -> None:
    lengths = [2 * sizes[0] + 1, 0, sizes[0]]
    views, used = Views(machine, name, sizes, dtype), sequences(lengths, 6, sizes[0])
    for i in range(2):
        rows = ops.gather_cache(
            views.tensors[i], *used.tensors(machine), total_tokens=used.tokens, layout=views.form.layout
        )
        check_rows(machine, rows, cache_convert.gathered(views.hnd(i), used.table, used.lengths, used.tokens), dtype)
    views.check()
    new = np.random.default_rng(6).integers(0, 256, (used.tokens, sizes[1], sizes[2] * item_bytes(dtype)), np.uint8)
    given = GuardedCache(machine, new.reshape(used.tokens, -1), sizes[1:], dtype).tensor
    after = ops.scatter_cache(given, views.tensors[1], *used.tensors(machine), layout=views.form.layout)
    assert after is views.tensors[1]
    moved = elements(new, item_bytes(dtype))
    views.check(views.hnd(0), cache_convert.scattered(moved, views.hnd(1), used.table, used.lengths))


def test_strides_of_dimensions_of_one_mean_nothing(machine: Machine) -> None:
    """One token of a block, one head, one element: every other one of at most two or three is one."""
    whole = tensor(np.arange(5 * 2 * 2 * 3, dtype=np.float32).reshape(5, 2, 2, 3), machine)
    view = whole[:, 1::2, ::2, 1::2]
    assert list(view.shape) == [5, 1, 1, 1] and view.get_strides()[1:] == [12, 6, 2]
    rows = ops.gather_cache(view, slot_tensor([[3, 1]], machine), slot_tensor([0, 2], machine), total_tokens=2)
    assert rows.numpy().ravel().tolist() == [43.0, 19.0]
    twice = tensor(2 * rows.numpy(), machine)  # not by Paddle, whose own kernels do not run on every GPU
    ops.scatter_cache(twice, view, slot_tensor([[0, 4]], machine), slot_tensor([0, 2], machine))
    expected = np.arange(60, dtype=np.float32)
    expected[[7, 55]] = [86, 38]
    machine.synchronize()
    assert whole.numpy().ravel().tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["beside each other in a token", "NHD, seen as HND"])
def test_one_block(machine: Machine, name: str) -> None:
    """Its stride says nothing, and may be shorter than the block."""
    views = Views(machine, name, (4, 3, 32), "uint8", blocks=1)
    rows, slots = views.rows(3, "bfloat16", random_rows), np.array([2, 0, 3])
    scales = [tensor(np.zeros((1, 3, 4), np.float32), machine) for _ in range(2)]
    ops.reshape_and_cache_dynamic(
        *(tensor(each, machine) for each in rows), *views.tensors, *scales, slot_tensor(slots, machine),
        layout=views.form.layout,
    )  # fmt: skip
    by = [scales_of_rows(each, "fp8_e4m3")[..., None] for each in rows]
    codes = [float_formats.quantize(each, own, "fp8_e4m3") for each, own in zip(rows, by, strict=True)]
    views.check(*(inserted(codes[i], views.hnd(i), slots) for i in range(2)))
    for i in range(2):
        found = ops.gather_cache(
            views.tensors[i], slot_tensor([[0]], machine), slot_tensor([0, 1], machine), total_tokens=1,
            starts=slot_tensor([3], machine), layout=views.form.layout, kv_cache_dtype="fp8_e4m3", scale=scales[i],
        )  # fmt: skip
        check_rows(machine, found, float_formats.dequantize(codes[i][2:], by[i][2:], "fp8_e4m3", "float32"), "float32")


@every_form
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("by", ["number", "head", "token"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_dequantising(machine: Machine, name: str, sizes: tuple[int, int, int], by: str, out_dtype: str) -> None:
    views, used = Views(machine, name, sizes, "uint8"), sequences([2 * sizes[0] + 1, 0, sizes[0]], 6, sizes[0])
    shape = {"number": (1,), "head": (sizes[1],), "token": (6, sizes[1], sizes[0])}[by]
    scales = np.random.default_rng(5).uniform(0.1, 3, shape).astype(np.float32)
    of_token = (
        scales[..., None] if by == "token" else np.broadcast_to(scales.reshape(1, -1, 1, 1), (6, sizes[1], sizes[0], 1))
    )
    for i in range(2):
        rows = ops.gather_cache(
            views.tensors[i], *used.tensors(machine), total_tokens=used.tokens, layout=views.form.layout,
            kv_cache_dtype="fp8_e4m3", scale=tensor(scales, machine), out_dtype=out_dtype,
        )  # fmt: skip
        codes = cache_convert.gathered(views.hnd(i), used.table, used.lengths, used.tokens)
        factors = cache_convert.gathered(of_token, used.table, used.lengths, used.tokens)
        check_rows(machine, rows, float_formats.dequantize(codes, factors, "fp8_e4m3", out_dtype), out_dtype)
    views.check()


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_a_latent_cache(machine: Machine, block_size: int) -> None:
    """The layers of a block together, rows wider than what they hold."""
    bits = np.random.default_rng(3).integers(0, 256, (7, 2 * block_size * 80 * 2), np.uint8)
    guarded = GuardedCache(machine, bits, (2, block_size, 80), "bfloat16")
    base = elements(bits, 2).reshape(7, 2, block_size, 80)
    view = guarded.tensor[:, 1, :, :72]
    used = sequences([2 * block_size + 1, 0, block_size], 7, block_size)
    rows = ops.gather_cache(view, *used.tensors(machine), total_tokens=used.tokens)
    hnd = np.ascontiguousarray(base[:, 1, :, :72])[:, None]
    check_rows(machine, rows, cache_convert.gathered(hnd, used.table, used.lengths, used.tokens)[:, 0], "bfloat16")
    new = random_bits((used.tokens, 72), "bfloat16", 1)
    slots = np.random.default_rng(2).permutation(7 * block_size)[: used.tokens]
    latent = tensor(new, machine)
    ops.concat_and_cache_mla(latent[:, :64], latent[:, 64:], view, slot_tensor(slots, machine))
    expected = base.copy()
    expected[:, 1, :, :72] = inserted(new[:, None], hnd, slots)[:, 0]
    guarded.check(expected.view(np.uint8).reshape(7, -1))
    ops.scatter_cache(rows, view, *used.tensors(machine))
    back = cache_convert.gathered(hnd, used.table, used.lengths, used.tokens)
    expected[:, 1, :, :72] = cache_convert.scattered(
        back, np.ascontiguousarray(expected[:, 1, :, :72])[:, None], used.table, used.lengths
    )[:, 0]
    machine.synchronize()
    guarded.check(expected.view(np.uint8).reshape(7, -1))


def zeros(machine: Machine, *shape: int) -> paddle.Tensor:
    return tensor(np.zeros(shape, np.float32), machine)


def test_views_that_no_kernel_takes(machine: Machine) -> None:
    sound, slots = zeros(machine, 6, 4, 2, 8), slot_tensor([3], machine)
    rows = tensor(np.ones((1, 2, 8), np.float32), machine)
    table, lengths = slot_tensor([[0]], machine), slot_tensor([0, 1], machine)
    for cache, message in (
        (zeros(machine, 6, 4, 2, 16)[..., ::2], r"\[128, 32, 16, 2\]; its last dimension must be"),
        (zeros(machine, 6, 4, 8, 2).transpose([0, 1, 3, 2]), r"\[64, 16, 1, 2\]; its last dimension must be"),
        (zeros(machine, 4, 6, 2, 8).transpose([1, 0, 2, 3]), r"\[16, 96, 8, 1\]; its blocks must lie one behind"),
        (zeros(machine, 500).as_strided([6, 4, 2, 8], [64, 8, 4, 1]), "no two of its elements may lie in one place"),
        (zeros(machine, 500).as_strided([6, 4, 2, 8], [64, 0, 8, 1]), "no two of its elements may lie in one place"),
        (zeros(machine, 500).as_strided([6, 4, 2, 8], [63, 16, 8, 1]), "its blocks must lie one behind the other"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"value_cache has shape \[6, 4, 2, 8\] and strides .*{message}"):
            ops.reshape_and_cache(rows, rows, sound, cache, slots, layout="NHD")
        with pytest.raises(ValueError, match=message):
            ops.gather_cache(cache, table, lengths, total_tokens=1, layout="NHD")
        with pytest.raises(ValueError, match=message):
            ops.scatter_cache(rows, cache, table, lengths, layout="NHD")
        machine.synchronize()
        assert not cache.numpy().any() and not sound.numpy().any()
    latent = zeros(machine, 6, 4, 16)[..., ::2]
    with pytest.raises(ValueError, match=r"kv_cache has .*its last dimension must be contiguous"):
        ops.concat_and_cache_mla(rows[:, 0, :7], rows[:, 0, :1], latent, slots)
    assert not latent.numpy().any()


def test_keys_and_values_in_one_place(machine: Machine) -> None:
    views = Views(machine, "keys and values of a block", (4, 3, 32), "float16")
    rows = [tensor(each, machine) for each in views.rows(1, "float16", random_bits)]
    whole = views.guarded.tensor.reshape([6, 8, 3, 32])
    for keys, values in (
        (views.tensors[0], views.tensors[0]),
        (views.tensors[0], whole[:, 3:7]),
        (whole[:, 1:5], views.tensors[0]),
        (whole[:, 1:5], views.tensors[1]),
    ):
        with pytest.raises(ValueError, match="two of the memories to be written overlap"):
            ops.reshape_and_cache(*rows, keys, values, slot_tensor([3], machine), layout="NHD")
    views.check()


def test_where_paddle_would_copy_a_view_it_is_refused(machine: Machine) -> None:
    """The registered operator would write to a copy of it."""
    views = Views(machine, "keys and values of a block", (4, 3, 32), "float16")
    rows = [tensor(each, machine) for each in views.rows(1, "float16", random_bits)]
    with registered_only(), pytest.raises(ValueError, match="key_cache is not contiguous"):
        ops.reshape_and_cache(*rows, *views.tensors, slot_tensor([3], machine), layout="NHD")
    views.check()


@given(st.data())
def test_whether_two_views_share_memory(data: st.DataObject) -> None:
    """What shares an element is refused, and nothing else where the strides agree."""
    machine = cpu_machine()
    draw = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    tokens, heads, size = draw(1, 2, 3), draw(1, 2), draw(1, 2, 4)
    strides = []
    for _ in range(2):
        head = draw(size, size + 1, 2 * size)
        token = draw(heads * head, heads * head + 2, 2 * heads * head)
        block = draw(tokens * token, tokens * token + 3, 2 * tokens * token)
        strides.append([block, token, head, 1])
    if data.draw(st.booleans()):
        strides[1] = strides[0]
    offsets = [data.draw(st.integers(0, 3 * strides[0][0])) for _ in range(2)]
    shape = (2, tokens, heads, size)
    base = np.zeros(6 * max(each[0] for each in strides), np.float32)
    whole = tensor(base, machine)
    arrays = [
        np.lib.stride_tricks.as_strided(base[at:], shape, [4 * s for s in own])
        for at, own in zip(offsets, strides, strict=True)
    ]
    views = [whole.as_strided(list(shape), own, 4 * at) for at, own in zip(offsets, strides, strict=True)]
    for view, at in zip(views, offsets, strict=True):
        assert view.data_ptr() == whole.data_ptr() + 4 * at
    rows = tensor(np.ones((1, heads, size), np.float32), machine)
    refused = ""
    try:
        ops.reshape_and_cache(rows, rows, *views, slot_tensor([0], machine), layout="NHD")
    except ValueError as error:
        refused = str(error)
    shared = np.shares_memory(*arrays)
    assert "overlap" in refused if shared else strides[0] != strides[1] or "overlap" not in refused, (strides, offsets)
