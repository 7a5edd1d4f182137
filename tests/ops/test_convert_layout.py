"""convert_layout against the reference: every pair of layouts, element sizes, errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, Machine, item_bytes
from tests.ops.cache_conformance import KINDS, Cache, check_rows
from tests.reference import cache_convert as reference

every_pair = pytest.mark.parametrize(
    ("source", "target"), [(a, b) for a in reference.LAYOUTS for b in reference.LAYOUTS], ids=lambda v: v
)
every_kind = pytest.mark.parametrize("kind", KINDS)


def check_conversion(cache: Cache, target: str) -> None:
    result = ops.convert_layout(cache.tensor, kind=cache.kind, source_layout=cache.layout, target_layout=target)
    expected = reference.to_layout(cache.hnd, target, cache.kind)
    check_rows(cache.machine, result, expected, cache.dtype)
    assert result.data_ptr() != cache.tensor.data_ptr()
    cache.check_untouched()


@every_pair
@every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair(machine: Machine, source: str, target: str, kind: str, dtype: str) -> None:
    check_conversion(Cache(machine, 5, 3, 7, 48, dtype, source, kind), target)


@every_pair
@every_kind
@pytest.mark.parametrize("shape", [
    (3, 1, 64, 128), (2, 5, 1, 576), (70, 2, 65, 16), (1, 33, 16, 112), (5, 2, 48, 120), (9, 2, 17, 80), (3, 2, 3, 256),
    (11, 3, 16, 64), (2, 2, 64, 192),
], ids=str)  # fmt: skip
def test_shapes(machine: Machine, source: str, target: str, kind: str, shape: tuple[int, int, int, int]) -> None:
    check_conversion(Cache(machine, *shape, "bfloat16", source, kind), target)


@every_pair
@pytest.mark.parametrize("head_size", [1, 3, 46, 1030])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_values_of_any_head_size(machine: Machine, source: str, target: str, head_size: int, dtype: str) -> None:
    check_conversion(Cache(machine, 4, 3, 5, head_size, dtype, source, "value"), target)


@every_pair
@every_kind
def test_more_than_65535_tokens(machine: Machine, source: str, target: str, kind: str) -> None:
    check_conversion(Cache(machine, 4100, 1, 17, 16, "uint8", source, kind), target)


@given(data=st.data())
def test_there_and_back(machine: Machine, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["uint8", "float16", "float32"]))
    kind = data.draw(st.sampled_from(KINDS))
    source, target = (data.draw(st.sampled_from(reference.LAYOUTS)) for _ in range(2))
    blocks, heads, block_size = (data.draw(st.integers(1, 9)) for _ in range(3))
    head_size = 16 // item_bytes(dtype) * data.draw(st.integers(1, 20))
    cache = Cache(machine, blocks, heads, block_size, head_size, dtype, source, kind)
    check_conversion(cache, target)
    there = ops.convert_layout(cache.tensor, kind=kind, source_layout=source, target_layout=target)
    back = ops.convert_layout(there, kind=kind, source_layout=target, target_layout=source)
    check_rows(machine, back, reference.to_layout(cache.hnd, source, kind), dtype)


def test_packed_keys_of_any_x_are_read(machine: Machine) -> None:
    hnd = np.arange(6 * 2 * 3 * 12, dtype=np.uint16).reshape(6, 2, 3, 12)
    packed = np.ascontiguousarray(hnd.reshape(6, 2, 3, 3, 4).transpose(0, 1, 3, 2, 4)).view(np.float16)
    tensor = paddle.to_tensor(packed, place=machine.place)
    for target in ("HND", "NHD"):
        result = ops.convert_layout(tensor, kind="key", source_layout="packed", target_layout=target)
        check_rows(machine, result, reference.to_layout(hnd, target, "key"), "float16")


def test_errors(machine: Machine) -> None:
    cache = Cache(machine, 3, 2, 4, 12, "float16")

    def refuse(error: type[Exception], message: str, **changed: Any) -> None:
        given: dict[str, Any] = {"cache": cache.tensor, "kind": "key", "source_layout": "HND", "target_layout": "NHD"}
        with pytest.raises(error, match=message):
            ops.convert_layout(**given | changed)

    refuse(ValueError, 'kind = "keys" must be "key" or "value"', kind="keys")
    refuse(TypeError, "kind is None; a string is expected", kind=None)
    refuse(ValueError, 'source_layout = "BHD" must be', source_layout="BHD")
    refuse(ValueError, 'target_layout = "BHD" must be', target_layout="BHD")
    refuse(
        ValueError, 'target_layout "packed" keeps 8 elements .* do not divide the head size 12', target_layout="packed"
    )
    refuse(ValueError, r"cache has shape \[3, 2, 4, 12\]; \[blocks, heads, head size / x", source_layout="packed")
    refuse(ValueError, "cache is not contiguous", cache=cache.tensor.transpose([0, 2, 1, 3]))
    refuse(TypeError, "cache is list", cache=[cache.tensor])
    cache.check_untouched()


def test_a_zero_byte_does_not_end_the_message() -> None:
    cache = paddle.to_tensor(np.zeros((2, 1, 2, 4), np.float32), place=paddle.CPUPlace())
    with pytest.raises(ValueError, match=r'^kind = "key\\0\\0s" must be "key" or "value"$'):
        ops.convert_layout(cache, kind="key\0\0s", source_layout="HND", target_layout="NHD")  # type: ignore[arg-type]


@every_pair
@every_kind
@pytest.mark.parametrize("full_graph", [True, False])
def test_in_a_traced_program(machine: Machine, source: str, target: str, kind: str, full_graph: bool) -> None:
    cache = Cache(machine, 5, 3, 7, 16, "float32", source, kind)

    shape = list(reference.to_layout(cache.hnd, target, kind).shape)
    convert = partial(ops.convert_layout, kind=kind, source_layout=source, target_layout=target)

    # What it needs are arguments: 2.6 rewrites the source and loses the names around it.
    def function(tensor: Any, convert: Any, shape: Any) -> Any:
        return convert(tensor).reshape(shape)  # 2.6 asks the last operator for a gradient

    with paddle.no_grad():
        result = paddle.jit.to_static(function, full_graph=full_graph)(cache.tensor, convert, shape)
    check_rows(machine, result, reference.to_layout(cache.hnd, target, kind), "float32")
