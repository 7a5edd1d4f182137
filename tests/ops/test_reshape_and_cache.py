"""reshape_and_cache against the reference, on the whole memory of both caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from paddle_kv.ops import _check
from tests.machine import Machine, cpu_machine
from tests.ops.insert_conformance import Case, slot_tensor, tensor

LAYOUTS = ["HND", "NHD", "packed"]
FORMATS = ["fp8_e4m3", "fp8_e5m2", "int8", "paddle_uint8"]
DTYPES = ["float16", "bfloat16", "float32"]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_format = pytest.mark.parametrize("kv_cache_dtype", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_layout
@every_dtype
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FORMATS])
def test_layouts_dtypes_and_formats(machine: Machine, layout: str, dtype: str, kv_cache_dtype: str) -> None:
    case = Case(machine, layout=layout, dtype=dtype, kv_cache_dtype=kv_cache_dtype, head_size=32, value_head_size=48)
    case.check_insert(case.random_slots())


@every_layout
@pytest.mark.parametrize("head_size", [46, 64, 80, 96, 112, 120, 128, 192, 256, 576])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_head_sizes(machine: Machine, layout: str, head_size: int, kv_cache_dtype: str) -> None:
    if layout == "packed":
        head_size -= head_size % (8 if kv_cache_dtype == "auto" else 16)
    case = Case(
        machine,
        layout=layout,
        head_size=head_size,
        value_head_size=head_size // 2,
        heads=2,
        kv_cache_dtype=kv_cache_dtype,
    )
    case.check_insert(case.random_slots())


@every_layout
@pytest.mark.parametrize("heads", [1, 2, 7, 130])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_heads_and_block_sizes(machine: Machine, layout: str, heads: int, block_size: int) -> None:
    """130 heads of 64 are more 16-byte words a token than a CTA has threads."""
    blocks = 24 // block_size + 2
    case = Case(
        machine,
        tokens=min(19, blocks * block_size - 1),
        layout=layout,
        heads=heads,
        block_size=block_size,
        blocks=blocks,
        head_size=64,
    )
    case.check_insert(case.random_slots())


@every_layout
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 1000])
def test_token_counts(machine: Machine, layout: str, tokens: int) -> None:
    case = Case(machine, tokens=tokens, layout=layout, heads=2, head_size=16, blocks=tokens // 16 + 2, block_size=16)
    case.check_insert(case.random_slots(negative=min(2, tokens - 1)))


@every_layout
def test_two_hundred_thousand_tokens(machine: Machine, layout: str) -> None:
    """More than 65,535: tokens cannot be the second dimension of a CUDA grid."""
    tokens, block_size, heads, head_size = 200_000, 16, 1, 8
    blocks = tokens // block_size
    slots = np.random.default_rng(1).permutation(tokens)
    rows = np.arange(tokens * head_size, dtype=np.uint32).view(np.float32).reshape(tokens, 1, head_size)
    shape = {"HND": (blocks, heads, block_size, head_size), "NHD": (blocks, block_size, heads, head_size)}
    key_shape = shape.get(layout, (blocks, heads, head_size // 4, block_size, 4))
    value_shape = shape.get(layout, (blocks, heads, head_size, block_size))
    caches = [tensor(np.zeros(s, np.float32), machine) for s in (key_shape, value_shape)]
    ops.reshape_and_cache(
        tensor(rows, machine), tensor(rows, machine), *caches, slot_tensor(slots, machine), layout=layout
    )
    machine.synchronize()
    expected = np.empty_like(rows)
    expected[slots] = rows
    keys, values = (cache.numpy() for cache in caches)
    if layout == "packed":
        keys = keys.transpose(0, 3, 1, 2, 4)
        values = values.transpose(0, 3, 1, 2)
    assert np.array_equal(np.ascontiguousarray(keys).view(np.uint32).ravel(), expected.view(np.uint32).ravel())
    assert np.array_equal(np.ascontiguousarray(values).view(np.uint32).ravel(), expected.view(np.uint32).ravel())


@every_layout
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("first_slot", [0, 5, 8, 16, 33])
@pytest.mark.parametrize("tokens", [64, 130])
def test_consecutive_slots(machine: Machine, layout: str, kv_cache_dtype: str, first_slot: int, tokens: int) -> None:
    """A prompt: its tokens fill blocks in order, from any position of the first block on."""
    case = Case(
        machine,
        tokens=tokens,
        layout=layout,
        heads=2,
        head_size=32,
        blocks=14,
        block_size=16,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
    )
    case.check_insert(np.arange(first_slot, first_slot + tokens))


@every_layout
def test_runs_of_slots_with_gaps(machine: Machine, layout: str) -> None:
    case = Case(machine, tokens=80, layout=layout, heads=1, head_size=16, blocks=12, block_size=16)
    slots = np.arange(16, 96)
    slots[[3, 20, 21, 40]] = -1
    slots[48:56] = np.arange(150, 158)
    slots[56:64] = np.arange(143, 135, -1)
    case.check_insert(slots)


@every_layout
@pytest.mark.parametrize("slots", [[-1] * 11, [20, 21, 2**31, 2**40, 2**62, -5, 19, 0, -(2**62), 1 << 32, 100]])
def test_slots_outside_the_cache_are_never_written(machine: Machine, layout: str, slots: list[int]) -> None:
    case = Case(machine, layout=layout)
    case.check_insert(np.array(slots))


@every_layout
def test_slots_of_32_bits_and_with_a_stride(machine: Machine, layout: str) -> None:
    case = Case(machine, layout=layout)
    slots = case.random_slots(negative=1)
    case.check_insert(slots, slot_mapping=slot_tensor(slots, machine, "int32"))
    table = slot_tensor(np.stack([slots, slots + 1], axis=1), machine)
    case.check_insert(slots, slot_mapping=table[:, 0])


class TestWholeRows:
    """Rows in one piece on both sides, in words of 16 bytes, have a kernel of their own on a GPU."""

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    @pytest.mark.parametrize("tokens", [1, 2, 3, 15, 16, 17, 64, 255, 256, 257])
    @pytest.mark.parametrize("dependent_launch", [False, True])
    def test_token_counts(self, machine: Machine, layout: str, tokens: int, dependent_launch: bool) -> None:
        case = Case(
            machine, tokens=tokens, layout=layout, heads=8, head_size=64, blocks=tokens // 16 + 2, block_size=16
        )
        case.check_insert(case.random_slots(negative=min(2, tokens - 1)), dependent_launch=dependent_launch)

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    @pytest.mark.parametrize(
        ("heads", "head_size", "value_head_size"),
        [(1, 8, 8), (1, 8, 24), (2, 24, 24), (3, 40, 8), (8, 128, 64), (16, 256, 256), (32, 256, 256), (33, 256, 256),
         (64, 8, 8), (1, 46, 46)],
    )  # fmt: skip
    @pytest.mark.parametrize("block_size", [16, 17])
    def test_lengths_of_rows(
        self, machine: Machine, layout: str, heads: int, head_size: int, value_head_size: int, block_size: int
    ) -> None:
        """From several tokens in a CTA to more than one CTA has threads for."""
        case = Case(machine, tokens=13, layout=layout, heads=heads, head_size=head_size, blocks=2,
                    value_head_size=value_head_size, block_size=block_size)  # fmt: skip
        slots = np.maximum(case.random_slots(), -(2**31))
        slots[3] = 2 * block_size  # behind the last
        for dtype in ("int32", "int64"):
            case.check_insert(slots, slot_mapping=slot_tensor(slots, machine, dtype))

    def test_more_tokens_than_slots(self, machine: Machine) -> None:
        case = Case(machine, tokens=21, layout="NHD", heads=1, head_size=8)
        slots = np.arange(19)[::-1].copy()
        case.insert(slots, padded=True)
        case.rows = [rows[:19] for rows in case.rows]
        case.check_bits(case.expected(slots))


@every_layout
def test_no_tokens(machine: Machine, layout: str) -> None:
    case = Case(machine, layout=layout, tokens=0)
    case.check_insert(np.zeros(0, np.int64))


class TestPrompts:
    """So many tokens that packed values go through tiles: 32, 64 or 128 tokens and 128 elements."""

    TOKENS = 700

    def prompts(self, machine: Machine, block_size: int, **options: Any) -> tuple[Case, np.ndarray]:
        """Three prompts, each in blocks of its own, from a position inside a block on; some tokens are padding."""
        blocks = self.TOKENS // block_size + 8
        case = Case(machine, tokens=self.TOKENS, blocks=blocks, block_size=block_size, layout="packed", **options)
        slots = np.arange(self.TOKENS)
        for first in (200, 337):  # tokens: no multiples of anything
            slots[first:] += -(-slots[first] // block_size) * block_size - slots[first] + block_size // 2
        slots[[0, 64, 65, 130, 131, 699]] = [-1, -(2**40), -1, -3, -1, -1]
        assert slots.max() < blocks * block_size
        return case, slots

    @pytest.mark.parametrize("block_size", [1, 3, 16, 17, 48, 64])
    @pytest.mark.parametrize("value_head_size", [46, 64, 80, 112, 120, 128, 192, 256, 576])
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
    def test_edges_of_tiles(self, machine: Machine, block_size: int, value_head_size: int, kv_cache_dtype: str) -> None:
        case, slots = self.prompts(
            machine, block_size, heads=2, value_head_size=value_head_size, kv_cache_dtype=kv_cache_dtype
        )
        case.check_insert(slots)

    @every_dtype
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", *FORMATS])
    def test_dtypes_and_formats(self, machine: Machine, dtype: str, kv_cache_dtype: str) -> None:
        case, slots = self.prompts(machine, 16, dtype=dtype, kv_cache_dtype=kv_cache_dtype, head_size=96)
        case.check_insert(slots)
        scales = (np.array([0.1, 3.0, 0.7]), np.array([1e-3, 250.0, 1.0]))
        if kv_cache_dtype != "auto":
            case.check_insert(slots, scales)

    @every_dtype
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
    @pytest.mark.parametrize("offset", [0, 1, 8])
    def test_views(self, machine: Machine, dtype: str, kv_cache_dtype: str, offset: int) -> None:
        """Values inside a wider tensor at addresses of every alignment, keys with an inner stride."""
        case, slots = self.prompts(machine, 16, dtype=dtype, kv_cache_dtype=kv_cache_dtype, head_size=64)
        key = tensor(np.repeat(case.rows[0], 2, axis=2), machine)[:, :, ::2]
        pad = np.zeros((case.tokens, case.heads, 8 + offset), case.rows[1].dtype)
        value = tensor(np.concatenate([pad, case.rows[1]], axis=2), machine)[:, :, 8 + offset :]
        case.check_insert(slots, tensors=(key, value))
        case.hnd = case.expected(slots)
        case.rows.reverse()
        case.check_insert(slots, tensors=(value, key))

    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
    def test_random_slots(self, machine: Machine, kv_cache_dtype: str) -> None:
        case, _ = self.prompts(machine, 16, head_size=80, kv_cache_dtype=kv_cache_dtype)
        case.check_insert(case.random_slots())

    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
    @pytest.mark.parametrize("tokens", [2101, 8250])
    def test_many_tokens_in_random_slots(self, machine: Machine, tokens: int, kv_cache_dtype: str) -> None:
        """So many that a GPU writes them in another order; the values of a head are more than a tile."""
        case = Case(
            machine, tokens=tokens, heads=3, head_size=16, value_head_size=136, blocks=tokens // 16 + 2, block_size=16,
            layout="packed", kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        case.check_insert(case.random_slots())

    def test_a_cache_at_an_odd_address(self, machine: Machine) -> None:
        """The guard block in front of the values has 3 x 7 x 5 elements."""
        case, slots = self.prompts(machine, 5, head_size=16, value_head_size=7)
        case.check_insert(slots)


class TestStrides:
    """Keys and values as views: read where they lie, with strides of their own."""

    @every_layout
    @every_dtype
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
    @pytest.mark.parametrize("query_heads", [3, 12])
    def test_slices_of_a_fused_qkv(
        self, machine: Machine, layout: str, dtype: str, kv_cache_dtype: str, query_heads: int
    ) -> None:
        case = Case(machine, layout=layout, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        query = np.zeros((case.tokens, query_heads, case.head_size), case.rows[0].dtype)
        fused = tensor(np.concatenate([query, *case.rows], axis=1), machine)
        key, value = fused[:, query_heads : query_heads + 3], fused[:, query_heads + 3 :]
        assert not key.is_contiguous()
        case.check_insert(case.random_slots(), tensors=(key, value))

    @every_layout
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
    def test_heads_before_tokens(self, machine: Machine, layout: str, kv_cache_dtype: str) -> None:
        """Head stride is not the head size, and differs between keys and values."""
        case = Case(machine, layout=layout, kv_cache_dtype=kv_cache_dtype)
        key = tensor(case.rows[0].transpose(1, 0, 2), machine).transpose([1, 0, 2])
        wide = np.concatenate([case.rows[1], case.rows[0]], axis=2)
        value = tensor(wide, machine)[:, :, : case.head_size]
        assert key.strides != value.strides
        case.check_insert(case.random_slots(), tensors=(key, value))

    @every_layout
    @every_dtype
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
    def test_an_inner_stride(self, machine: Machine, layout: str, dtype: str, kv_cache_dtype: str) -> None:
        case = Case(machine, layout=layout, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        key = tensor(np.repeat(case.rows[0], 2, axis=2), machine)[:, :, ::2]
        value = tensor(case.rows[1].transpose(2, 1, 0), machine).transpose([2, 1, 0])
        case.check_insert(case.random_slots(), tensors=(key, value))

    @every_layout
    @pytest.mark.parametrize("offset", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
    def test_rows_at_odd_addresses(self, machine: Machine, layout: str, offset: int, kv_cache_dtype: str) -> None:
        """A source that is aligned less than the cache."""
        case = Case(machine, layout=layout, kv_cache_dtype=kv_cache_dtype)
        pad = np.zeros((case.tokens, case.heads, offset), case.rows[0].dtype)
        tensors = [tensor(np.concatenate([pad, rows], axis=2), machine)[:, :, offset:] for rows in case.rows]
        case.check_insert(case.random_slots(), tensors=tensors)

    @every_layout
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
    def test_strides_of_zero(self, machine: Machine, layout: str, kv_cache_dtype: str) -> None:
        """One row for all tokens and heads, and one element for all of a head."""
        case = Case(machine, layout=layout, kv_cache_dtype=kv_cache_dtype)
        one_row, one_element = case.rows[0][:1, :1], case.rows[1][:, :, :1]
        case.rows = [np.ascontiguousarray(np.broadcast_to(a, case.rows[0].shape)) for a in (one_row, one_element)]
        shape = list(case.rows[0].shape)
        key, value = (
            tensor(a, machine).as_strided(shape, s) for a, s in ((one_row, [0, 0, 1]), (one_element, [3, 1, 0]))
        )
        case.check_insert(case.random_slots(), tensors=(key, value))

    @every_layout
    def test_dimensions_of_size_one_with_odd_strides(self, machine: Machine, layout: str) -> None:
        case = Case(machine, layout=layout, tokens=1, heads=1)
        tensors = []
        for rows in case.rows:
            wide = np.zeros((3, 5, case.head_size), rows.dtype)
            wide[2, 3] = rows[0, 0]
            tensors.append(tensor(wide, machine)[2:3, 3:4])
        case.check_insert(np.array([17]), tensors=tensors)

    @every_layout
    @pytest.mark.parametrize("head_size", [16, 46])
    def test_a_cache_at_an_odd_address(self, machine: Machine, layout: str, head_size: int) -> None:
        """The guard block in front of the cache is 3 heads x 1 token of a size that is no multiple of 16 bytes."""
        head_size = 8 if layout == "packed" else head_size - 1
        case = Case(machine, layout=layout, block_size=1, blocks=20, head_size=head_size, value_head_size=7)
        case.check_insert(case.random_slots())


class TestScales:
    @every_layout
    @every_format
    @every_dtype
    def test_one_number(self, machine: Machine, layout: str, kv_cache_dtype: str, dtype: str) -> None:
        case = Case(machine, layout=layout, kv_cache_dtype=kv_cache_dtype, dtype=dtype)
        case.check_insert(case.random_slots(), (0.37, 12.5))

    @every_layout
    @every_format
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_one_value_in_a_tensor(
        self, machine: Machine, layout: str, kv_cache_dtype: str, shape: tuple[int, ...]
    ) -> None:
        case = Case(machine, layout=layout, kv_cache_dtype=kv_cache_dtype)
        case.check_insert(case.random_slots(), (np.full(shape, 0.37), np.full(shape, 12.5)))

    @every_layout
    @every_format
    def test_one_for_each_head(self, machine: Machine, layout: str, kv_cache_dtype: str) -> None:
        case = Case(machine, layout=layout, kv_cache_dtype=kv_cache_dtype)
        case.check_insert(case.random_slots(), (np.array([0.1, 3.0, 0.7]), np.array([1e-3, 250.0, 1.0])))

    def test_a_number_for_keys_and_a_tensor_for_values(self, machine: Machine) -> None:
        case = Case(machine, kv_cache_dtype="fp8_e4m3")
        case.check_insert(case.random_slots(), (0.37, np.array([0.1, 3.0, 0.7])))

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 1e-60, 1e60])
    def test_numbers_that_are_no_scale(self, machine: Machine, scale: float) -> None:
        case = Case(machine, kv_cache_dtype="fp8_e4m3")
        with pytest.raises(ValueError, match="v_scale"):
            case.insert(case.random_slots(), v_scale=scale)
        case.check_untouched()

    @pytest.mark.parametrize("shape", [(2,), (4,), (0,)])
    def test_tensors_of_the_wrong_shape(self, machine: Machine, shape: tuple[int, ...]) -> None:
        case = Case(machine, kv_cache_dtype="int8")
        with pytest.raises(ValueError, match="k_scale has shape"):
            case.insert(case.random_slots(), k_scale=tensor(np.ones(shape, np.float32), machine))
        case.check_untouched()

    def test_scales_of_another_dtype(self, machine: Machine) -> None:
        case = Case(machine, kv_cache_dtype="int8")
        with pytest.raises(ValueError, match="k_scale has dtype float64"):
            case.insert(case.random_slots(), k_scale=paddle.to_tensor(np.ones(3), place=machine.place))
        case.check_untouched()

    def test_auto_has_no_scales(self, machine: Machine) -> None:
        case = Case(machine)
        with pytest.raises(ValueError, match="k_scale is given"):
            case.insert(case.random_slots(), k_scale=1.0)
        case.check_untouched()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_format
def test_every_bit_pattern(machine: Machine, dtype: str, kv_cache_dtype: str) -> None:
    """All 65,536 of them, in words and (packed values of one token a block) one by one."""
    patterns = np.arange(65536, dtype=np.uint16)
    for layout in ("HND", "packed"):
        case = Case(
            machine,
            tokens=512,
            heads=2,
            head_size=64,
            blocks=512,
            block_size=1,
            layout=layout,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
        )
        case.rows = [patterns.view(rows.dtype).reshape(rows.shape) for rows in case.rows]
        case.check_insert(case.random_slots(), (0.37, 1.0))


@pytest.mark.skipif(not hasattr(paddle, "float8_e4m3fn"), reason="this Paddle has no fp8 dtype")
@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_caches_of_an_fp8_dtype(machine: Machine, kv_cache_dtype: str, dtype: str) -> None:
    case = Case(machine, kv_cache_dtype=kv_cache_dtype)
    tensors = [cache.tensor.view(dtype) for cache in case.caches]
    slots = case.random_slots()
    ops.reshape_and_cache(*case.token_tensors(), *tensors, slot_tensor(slots, machine), kv_cache_dtype=kv_cache_dtype)
    case.check_bits(case.expected(slots))


class TestPadding:
    def test_more_tokens_than_slots_is_an_error(self, machine: Machine) -> None:
        case = Case(machine)
        with pytest.raises(ValueError, match=r"key has 11 tokens, slot_mapping has 8; set padded=True"):
            case.insert(case.random_slots()[:8])
        case.check_untouched()

    @every_layout
    def test_unless_it_is_said(self, machine: Machine, layout: str) -> None:
        case = Case(machine, layout=layout)
        case.check_insert(case.random_slots()[:8], padded=True)

    @pytest.mark.parametrize("padded", [False, True])
    def test_fewer_tokens_than_slots(self, machine: Machine, padded: bool) -> None:
        case = Case(machine)
        with pytest.raises(ValueError, match="key has 11 tokens, slot_mapping has 12"):
            case.insert(np.arange(12), padded=padded)
        case.check_untouched()


class TestCheckMode:
    """PADDLE_KV_CHECK=1 reads the slots before anything is written."""

    @pytest.fixture(autouse=True)
    def check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PADDLE_KV_CHECK", "1")

    @every_layout
    def test_a_slot_beyond_the_caches(self, machine: Machine, layout: str) -> None:
        case = Case(machine, layout=layout)
        slots = case.random_slots()
        slots[4] = 20
        with pytest.raises(IndexError, match=r"slot_mapping\[4\] = 20 must be in \[0, 20\)"):
            case.insert(slots)
        case.check_untouched()

    def test_a_slot_named_twice(self, machine: Machine) -> None:
        case = Case(machine)
        slots = case.random_slots(negative=0)
        slots[9] = slots[2]
        with pytest.raises(ValueError, match=rf"slot_mapping\[2\] and slot_mapping\[9\] both name slot {slots[2]}"):
            case.insert(slots)
        case.check_untouched()

    @every_layout
    def test_legal_slots_in_any_form(self, machine: Machine, layout: str) -> None:
        case = Case(machine, layout=layout)
        slots = case.random_slots()
        case.check_insert(slots)
        case.check_insert(slots, slot_mapping=slot_tensor(np.stack([slots, slots], axis=1), machine)[:, 1])

    def test_two_skipped_tokens_are_not_one_slot_twice(self, machine: Machine) -> None:
        case = Case(machine)
        case.check_insert(np.full(11, -1))


def test_how_paddle_uint8_rounds_is_said(machine: Machine) -> None:
    """Exact halves tell the ways of rounding apart. The docstring and the page say which one it is."""
    scale = np.float32(0.5)
    halves = np.arange(-300, 301, dtype=np.float32) / 2
    values = (halves / 127 / scale).astype(np.float32)
    exact = values * scale * np.float32(127) == halves
    assert exact[halves % 1 == 0.5].sum() > 100
    values, halves = values[exact], halves[exact]
    tokens = paddle.to_tensor(values.reshape(-1, 1, 1), place=machine.place)
    caches = [paddle.to_tensor(np.zeros((1, 1, len(values), 1), np.uint8), place=machine.place) for _ in "kv"]
    slots = paddle.to_tensor(np.arange(len(values)), place=machine.place)
    ops.reshape_and_cache(tokens, tokens, *caches, slots, kv_cache_dtype="paddle_uint8", k_scale=float(scale),
                          v_scale=float(scale))  # fmt: skip
    for cache in caches:
        assert (cache.numpy().ravel() == np.rint(np.clip(halves, -127, 127)) + 128).all()
    page = (Path(__file__).parents[2] / "docs" / "quantisation.md").read_text()
    for text in (" ".join(str(ops.reshape_and_cache.__doc__).split()), " ".join(page.split())):
        assert "rounded with halves to even" in text


def test_blocks_that_a_transfer_is_moving_are_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug mode is told which blocks of which cache are written."""
    seen: list[tuple[int, list[int], bool]] = []
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    monkeypatch.setattr(
        _check, "access_checks", [lambda address, ids, writing, queue: seen.append((address, list(ids), writing))]
    )
    for layout in LAYOUTS:
        seen.clear()
        case = Case(machine, layout=layout)
        slots = np.array([3, 17, -1, 16, 2, -9, 10, 11, 0, 1, 19])
        case.check_insert(slots)
        assert seen == [(cache.data_ptr(), [0, 2, 4], True) for cache in case.cache_tensors]


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layout": "NDH"}, 'layout = "NDH"'),
            ({"kv_cache_dtype": "fp8"}, 'kv_cache_dtype = "fp8"'),
            ({"kv_cache_dtype": "int8"}, "key_cache .*has dtype float16"),
        ],
    )
    def test_names(self, machine: Machine, change: dict[str, Any], message: str) -> None:
        case = Case(machine)
        slots = slot_tensor(case.random_slots(), machine)
        with pytest.raises(ValueError, match=message):
            ops.reshape_and_cache(*case.token_tensors(), *case.cache_tensors, slots, **change)
        case.check_untouched()

    def insert(self, case: Case, **changed: Any) -> None:
        names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
        given = (*case.token_tensors(), *case.cache_tensors, slot_tensor(case.random_slots(), case.machine))
        ops.reshape_and_cache(**{**dict(zip(names, given, strict=True)), **changed}, layout=case.layout)

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("key", (11, 3, 31), r"key has shape \[11, 3, 31\], key_cache has 3 heads of size 32"),
            ("key", (11, 2, 32), r"key has shape \[11, 2, 32\]"),
            ("key", (11, 96), r"key has shape \[11, 96\]; \[tokens, heads, head size\]"),
            ("value", (11, 3, 16), r"value has shape \[11, 3, 16\]"),
            ("value", (10, 3, 32), "key has 11 tokens, value has 10"),
            ("key_cache", (5, 3, 4), "key_cache"),
            ("key_cache", (5, 3, 8, 32), "key_cache has 5 blocks of 8 tokens, value_cache has 5 of 4"),
            ("value_cache", (6, 3, 4, 32), "value_cache has 6 of 4"),
            ("slot_mapping", (11, 1), r"slot_mapping has shape \[11, 1\]"),
        ],
    )
    def test_shapes(self, machine: Machine, name: str, shape: tuple[int, ...], message: str) -> None:
        case = Case(machine)
        dtype = np.int64 if name == "slot_mapping" else np.float16
        with pytest.raises(ValueError, match=message):
            self.insert(case, **{name: tensor(np.zeros(shape, dtype), machine)})
        case.check_untouched()

    @pytest.mark.parametrize(
        ("name", "dtype", "message"),
        [
            ("key", np.float32, "key has dtype float32, value has float16"),
            ("key", np.int32, "dtype int32"),
            ("value", np.float64, "value has float64"),
            ("key_cache", np.float32, "key_cache"),
            ("value_cache", np.float32, "value_cache"),
            ("slot_mapping", np.float32, "slot_mapping has dtype float32; int32 or int64 is expected"),
            ("slot_mapping", np.int16, "slot_mapping has dtype int16"),
        ],
    )
    def test_dtypes(self, machine: Machine, name: str, dtype: Any, message: str) -> None:
        case = Case(machine)
        shapes = {"slot_mapping": (11,), "key": (11, 3, 32), "value": (11, 3, 32)}
        wrong = tensor(np.zeros(shapes.get(name, (5, 3, 4, 32)), dtype), machine)
        with pytest.raises(ValueError, match=message):
            self.insert(case, **{name: wrong})
        case.check_untouched()

    @pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache", "slot_mapping"])
    @pytest.mark.parametrize("wrong", [None, [1, 2], 3.5])
    def test_types(self, machine: Machine, name: str, wrong: Any) -> None:
        case = Case(machine)
        with pytest.raises(TypeError, match=name):
            self.insert(case, **{name: wrong})
        case.check_untouched()

    def test_caches_that_are_not_contiguous(self, machine: Machine) -> None:
        case = Case(machine)
        for name, cache in zip(("key_cache", "value_cache"), case.cache_tensors, strict=True):
            with pytest.raises(ValueError, match="must agree"):  # the same memory, but other dimensions
                self.insert(case, **{name: cache.transpose([0, 2, 1, 3])})
            with pytest.raises(ValueError, match=f"{name} has .*last dimension must be contiguous"):
                self.insert(case, **{name: cache.transpose([0, 1, 3, 2])})
        case.check_untouched()

    def test_one_cache_for_keys_and_values(self, machine: Machine) -> None:
        case = Case(machine)
        with pytest.raises(ValueError, match="overlap"):
            self.insert(case, value_cache=case.cache_tensors[0])
        case.check_untouched()

    def test_a_head_size_that_x_does_not_divide(self, machine: Machine) -> None:
        keys = tensor(np.zeros((2, 3, 20), np.float16), machine)
        key_cache = tensor(np.zeros((5, 3, 2, 4, 8), np.float16), machine)
        value_cache = tensor(np.zeros((5, 3, 20, 4), np.float16), machine)
        with pytest.raises(ValueError, match=r"key has shape \[2, 3, 20\], key_cache has 3 heads of size 16"):
            ops.reshape_and_cache(keys, keys, key_cache, value_cache, slot_tensor([0, 1], machine), layout="packed")


@given(st.data())
def test_any_shapes_and_slots(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS), "layout")
    kv_cache_dtype = data.draw(st.sampled_from(["auto", *FORMATS]), "kv_cache_dtype")
    step = 1 if layout != "packed" else 16
    case = Case(
        cpu_machine(),
        tokens=data.draw(st.integers(0, 30), "tokens"),
        heads=data.draw(st.integers(1, 4), "heads"),
        head_size=step * data.draw(st.integers(1, 40 // step), "head size"),
        value_head_size=data.draw(st.integers(1, 40), "value head size"),
        blocks=data.draw(st.integers(1, 9), "blocks"),
        block_size=data.draw(st.integers(1, 9), "block size"),
        dtype=data.draw(st.sampled_from(DTYPES), "dtype"),
        kv_cache_dtype=kv_cache_dtype,
        layout=layout,
    )
    slots = data.draw(st.permutations(range(-5, case.blocks * case.block_size + 35)), "slots")[: case.tokens]
    case.check_insert(np.array(slots, np.int64))


# The source tracer of Paddle 2.6 does not see variables of an enclosing function.
def plain_step(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, v_scale: Any) -> Any:
    key_cache, value_cache = ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
    return key_cache.reshape([-1])[:1].cast("float32"), value_cache.reshape([-1])[:1].cast("float32")


def quantised_step(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, v_scale: Any) -> Any:
    key_cache, value_cache = ops.reshape_and_cache(
        key, value, key_cache, value_cache, slots, kv_cache_dtype="fp8_e4m3", k_scale=0.5, v_scale=v_scale
    )
    return key_cache.reshape([-1])[:1].cast("float32"), value_cache.reshape([-1])[:1].cast("float32")


class TestPrograms:
    @pytest.mark.parametrize("full_graph", [True, False], ids=["source", "bytecode"])
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
    def test_every_run_writes_the_caches(self, machine: Machine, full_graph: bool, kv_cache_dtype: str) -> None:
        quantised = kv_cache_dtype != "auto"
        scales = (0.5, np.array([0.1, 3.0, 0.7], np.float32)) if quantised else (1.0, 1.0)

        step = quantised_step if quantised else plain_step
        traced = paddle.jit.to_static(step, full_graph=full_graph)
        case = Case(machine, kv_cache_dtype=kv_cache_dtype)
        v_scale = tensor(np.asarray(scales[1], np.float32), machine)
        for first in (0, 9, 3):
            slots = np.arange(first, first + 11)
            traced(*case.token_tensors(), *case.cache_tensors, slot_tensor(slots, machine), v_scale)
            case.hnd = case.expected(slots, scales)
            case.check_untouched()

    def test_gradients_are_left_alone(self, machine: Machine) -> None:
        case = Case(machine, dtype="float32", kv_cache_dtype="int8")
        key, value = case.token_tensors()
        key.stop_gradient = value.stop_gradient = False
        case.check_insert(case.random_slots(), tensors=(key * 1, value * 1))
