"""reshape_and_cache_dynamic against the reference: codes and scales, on the whole memory of all four caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import Machine, cpu_machine
from tests.ops.insert_conformance import Case, check_dynamic, slot_tensor, tensor
from tests.reference.cache_insert import scales_of_rows

LAYOUTS = ["HND", "NHD", "packed"]
FORMATS = ["fp8_e4m3", "fp8_e5m2", "int8"]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_format = pytest.mark.parametrize("kv_cache_dtype", FORMATS)


@every_layout
@every_format
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_layouts_formats_and_dtypes(machine: Machine, layout: str, kv_cache_dtype: str, dtype: str) -> None:
    case = Case(machine, layout=layout, kv_cache_dtype=kv_cache_dtype, dtype=dtype, head_size=32, value_head_size=48)
    check_dynamic(case, case.random_slots())


@every_layout
@pytest.mark.parametrize("head_size", [1, 7, 16, 46, 64, 80, 128, 192, 256, 576, 1040])
def test_head_sizes(machine: Machine, layout: str, head_size: int) -> None:
    if layout == "packed":
        head_size = max(16, head_size // 16 * 16)
    case = Case(machine, layout=layout, kv_cache_dtype="fp8_e4m3", head_size=head_size, value_head_size=head_size + 3)
    check_dynamic(case, case.random_slots())


@every_layout
def test_slots_outside_the_caches(machine: Machine, layout: str) -> None:
    case = Case(machine, layout=layout, kv_cache_dtype="fp8_e4m3")
    check_dynamic(case, np.array([20, 21, 2**31, 2**40, 2**62, -5, 19, 0, -(2**62), 1 << 32, 100]))


@every_format
def test_rows_of_zeros_and_of_what_is_not_finite(machine: Machine, kv_cache_dtype: str) -> None:
    case = Case(machine, kv_cache_dtype=kv_cache_dtype, dtype="float32", tokens=8)
    rows = np.zeros((8, 3, 32), np.float32)
    rows[1] = -0.0
    rows[2, :, 5] = np.nan
    rows[3, :, 5] = np.inf
    rows[4, :, :3] = [np.nan, -np.inf, 2.5]
    rows[5, :, 0] = 1e-45  # the smallest float32: its scale would not be a normal number
    rows[6, :, :2] = [3e38, -1e-3]
    rows[7] = np.nan
    case.rows = [rows, -rows]
    scales = scales_of_rows(rows, kv_cache_dtype)[:, 0]
    assert (scales[[0, 1, 2, 3, 7]] == 1).all() and scales[5] == np.finfo(np.float32).smallest_normal
    check_dynamic(case, case.random_slots(negative=0))


@every_layout
def test_slices_of_a_fused_qkv_and_inner_strides(machine: Machine, layout: str) -> None:
    case = Case(machine, layout=layout, kv_cache_dtype="fp8_e4m3")
    query = np.zeros((case.tokens, 6, case.head_size), case.rows[0].dtype)
    fused = tensor(np.concatenate([query, *case.rows], axis=1), machine)
    check_dynamic(case, case.random_slots(), tensors=(fused[:, 6:9], fused[:, 9:]))
    key = tensor(np.repeat(case.rows[0], 2, axis=2), machine)[:, :, ::2]
    value = tensor(case.rows[1].transpose(2, 1, 0), machine).transpose([2, 1, 0])
    case = Case(machine, layout=layout, kv_cache_dtype="fp8_e4m3")
    check_dynamic(case, case.random_slots(), tensors=(key, value))


@every_layout
def test_no_tokens(machine: Machine, layout: str) -> None:
    check_dynamic(Case(machine, layout=layout, kv_cache_dtype="int8", tokens=0), np.zeros(0, np.int64))


def test_many_tokens(machine: Machine) -> None:
    case = Case(machine, tokens=3000, heads=5, blocks=200, block_size=16, kv_cache_dtype="fp8_e5m2", dtype="bfloat16")
    check_dynamic(case, case.random_slots())


class TestWrongArguments:
    def insert(self, case: Case, **changed: Any) -> None:
        names = ("key", "value", "key_cache", "value_cache", "k_scale_cache", "v_scale_cache", "slot_mapping")
        scales = [tensor(np.zeros((5, 3, 4), np.float32), case.machine) for _ in range(2)]
        given = (*case.token_tensors(), *case.cache_tensors, *scales, slot_tensor(case.random_slots(), case.machine))
        ops.reshape_and_cache_dynamic(**{**dict(zip(names, given, strict=True)), "kv_cache_dtype": "int8", **changed})

    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "paddle_uint8", "fp4"])
    def test_formats(self, machine: Machine, kv_cache_dtype: str) -> None:
        case = Case(machine, kv_cache_dtype="int8")
        with pytest.raises(ValueError, match=f'kv_cache_dtype = "{kv_cache_dtype}"'):
            self.insert(case, kv_cache_dtype=kv_cache_dtype)
        case.check_untouched()

    @pytest.mark.parametrize("name", ["k_scale_cache", "v_scale_cache"])
    def test_scale_caches(self, machine: Machine, name: str) -> None:
        case = Case(machine, kv_cache_dtype="int8")
        for shape in ((5, 4, 3), (5, 3), (4, 3, 4)):
            with pytest.raises(ValueError, match=rf"{name} has shape .*\[5, 3, 4\] is expected"):
                self.insert(case, **{name: tensor(np.zeros(shape, np.float32), machine)})
        with pytest.raises(ValueError, match=f"{name} has dtype float16"):
            self.insert(case, **{name: tensor(np.zeros((5, 3, 4), np.float16), machine)})
        overlapping = tensor(np.zeros(60, np.float32), machine).as_strided([5, 3, 4], [12, 2, 1])
        with pytest.raises(ValueError, match=rf"{name} has .* strides \[12, 2, 1\]; no two of its elements may"):
            self.insert(case, **{name: overlapping})
        with pytest.raises(
            ValueError, match=r"_scale_cache has shape .*\[blocks, block size, heads\] = \[5, 4, 3\] is"
        ):
            self.insert(case, **{name: tensor(np.zeros((5, 3, 4), np.float32), machine), "scale_layout": "NHD"})
        with pytest.raises(ValueError, match='scale_layout = "packed" must be "HND" or "NHD"'):
            self.insert(case, scale_layout="packed")
        with pytest.raises(TypeError, match=name):
            self.insert(case, **{name: None})
        case.check_untouched()

    def test_one_scale_cache_for_both(self, machine: Machine) -> None:
        case = Case(machine, kv_cache_dtype="int8")
        scales = tensor(np.zeros((5, 3, 4), np.float32), machine)
        with pytest.raises(ValueError, match="overlap"):
            self.insert(case, k_scale_cache=scales, v_scale_cache=scales)
        case.check_untouched()

    def test_padding_is_not_known(self, machine: Machine) -> None:
        case = Case(machine, kv_cache_dtype="int8")
        with pytest.raises(ValueError, match="key has 11 tokens, slot_mapping has 8"):
            self.insert(case, slot_mapping=slot_tensor(range(8), machine))
        case.check_untouched()


@given(st.data())
def test_any_shapes_and_slots(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS), "layout")
    step = 1 if layout != "packed" else 16
    case = Case(
        cpu_machine(),
        tokens=data.draw(st.integers(0, 20), "tokens"),
        heads=data.draw(st.integers(1, 4), "heads"),
        head_size=step * data.draw(st.integers(1, 40 // step), "head size"),
        value_head_size=data.draw(st.integers(1, 40), "value head size"),
        blocks=data.draw(st.integers(1, 9), "blocks"),
        block_size=data.draw(st.integers(1, 9), "block size"),
        dtype=data.draw(st.sampled_from(["float16", "bfloat16", "float32"]), "dtype"),
        kv_cache_dtype=data.draw(st.sampled_from(FORMATS), "kv_cache_dtype"),
        layout=layout,
    )
    slots = data.draw(st.permutations(range(-5, case.blocks * case.block_size + 25)), "slots")[: case.tokens]
    check_dynamic(case, np.array(slots, np.int64))


@pytest.mark.parametrize("full_graph", [True, False], ids=["source", "bytecode"])
def test_in_a_program(machine: Machine, full_graph: bool) -> None:
    def step(key: Any, value: Any, a: Any, b: Any, c: Any, d: Any, slots: Any) -> Any:
        a, b, c, d = ops.reshape_and_cache_dynamic(key, value, a, b, c, d, slots, kv_cache_dtype="int8")
        return c.sum() + d.sum()

    traced = paddle.jit.to_static(step, full_graph=full_graph)
    case = Case(machine, kv_cache_dtype="int8")
    plain = Case(machine, kv_cache_dtype="int8")
    scales, plain_scales = ([tensor(np.zeros((5, 3, 4), np.float32), machine) for _ in "kv"] for _ in range(2))
    for first in (0, 9):
        slots = slot_tensor(np.arange(first, first + 11), machine)
        traced(*case.token_tensors(), *case.cache_tensors, *scales, slots)
        ops.reshape_and_cache_dynamic(
            *plain.token_tensors(), *plain.cache_tensors, *plain_scales, slots, kv_cache_dtype="int8"
        )
    machine.synchronize()
    for got, expected in zip([*case.cache_tensors, *scales], [*plain.cache_tensors, *plain_scales], strict=True):
        assert np.array_equal(got.numpy(), expected.numpy())
