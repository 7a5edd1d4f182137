"""paddle_kv.ops._arguments by itself: what becomes of ids, pairs and numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv.ops import _arguments as arguments

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64))
def test_ids_are_the_same_in_every_form(ids: list[int]) -> None:
    for form in (ids, tuple(ids), np.array(ids, "int64"), [np.int64(i) for i in ids]):
        found = arguments.block_ids(form, "ids")
        assert found == ids
        assert set(map(type, found)) <= {int}, "Paddle takes Python's ints by the short way"


def test_the_list_of_the_caller_is_copied() -> None:
    ids = [1, 2]
    assert arguments.block_ids(ids, "ids") is not ids


@given(st.lists(INT64, max_size=3), st.integers(2**63, 2**70) | st.integers(-(2**70), -(2**63) - 1))
def test_ids_beyond_64_bits_are_named(ids: list[int], wrong: int) -> None:
    with pytest.raises(IndexError, match=rf"ids\[{len(ids)}\]: {wrong} must be in"):
        arguments.block_ids([*ids, wrong, *ids], "ids")
    with pytest.raises(ValueError, match=rf"ids\[{len(ids)}\]: {wrong} must be in"):
        arguments.addresses([*ids, wrong], "ids")


@given(st.lists(st.tuples(INT64, INT64)))
def test_pairs_are_the_same_in_every_form(pairs: list[tuple[int, int]]) -> None:
    expected = [source for source, _ in pairs], [target for _, target in pairs]
    for form in (pairs, tuple(pairs), [list(pair) for pair in pairs], np.array(pairs, "int64").reshape(-1, 2)):
        assert arguments.block_pairs(form, "pairs") == expected
    by_source: dict[int, list[int]] = {}
    for source, target in pairs:
        by_source.setdefault(source, []).append(target)
    sources, targets = arguments.block_pairs(by_source, "pairs")
    assert sorted(zip(sources, targets, strict=True)) == sorted(pairs)


def test_pairs_become_one_array() -> None:
    columns = np.arange(12).reshape(2, 6).T
    for form in (columns.tolist(), columns, columns.astype("int32"), columns[::-1][::-1]):
        found = arguments.pair_array(form, "pairs")
        assert found.dtype == np.int64 and found.flags.c_contiguous and found.tolist() == columns.tolist()


@pytest.mark.parametrize(
    "odd", [(True, 1), (1.0, 2), (1, None), (np.bool_(1), 2), ("1", "2"), (1,), (1, 2, 3), 5, "12"]
)
def test_one_odd_pair_among_many(odd: object) -> None:
    with pytest.raises((TypeError, ValueError), match="pairs "):
        arguments.pair_array([(i, i + 1) for i in range(50)] + [odd], "pairs")
    with pytest.raises((TypeError, ValueError), match="pairs "):
        arguments.pair_array([odd, odd], "pairs")


def test_integers_of_numpy_in_pairs() -> None:
    assert arguments.pair_array([(np.int32(1), 2), [3, np.uint8(4)]], "pairs").tolist() == [[1, 2], [3, 4]]


@given(st.lists(st.tuples(INT64, INT64), max_size=3), st.integers(2**63, 2**70))
def test_pairs_beyond_64_bits_are_named(pairs: list[tuple[int, int]], wrong: int) -> None:
    with pytest.raises(IndexError, match=rf"pairs\[{len(pairs)}\]: {wrong} must be in"):
        arguments.block_pairs([*pairs, (wrong, 0), *pairs], "pairs")


@pytest.mark.parametrize("wrong", [2**63, np.uint64(2**63), 2**70, np.array([[[2**63]]], np.uint64)])
@pytest.mark.parametrize("form", [arguments.block_ids, arguments.id_array, arguments.pair_array])
def test_a_number_beyond_64_bits_in_place_of_a_list(form: Callable[..., object], wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^ids "):
        form(wrong, "ids")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_integer_tensors_of_every_width(dtype: str) -> None:
    assert arguments.block_ids(paddle.to_tensor([3, 1]).astype(dtype), "ids") == [3, 1]


@pytest.mark.parametrize("dtype", ["bool", "float16", "bfloat16", "float32", "float64"])
def test_tensors_that_hold_no_integers(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"ids has dtype paddle.{dtype}"):
        arguments.block_ids(paddle.zeros([2]).astype(dtype), "ids")


@pytest.mark.parametrize("value", [0, -1, 2**63 - 1, -(2**63), np.int8(-3), np.uint64(5)])
def test_numbers(value: object) -> None:
    found = arguments.integer(value, "count")
    assert type(found) is int
    assert found == value


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, np.uint64(2**63)])
def test_numbers_beyond_64_bits(value: int) -> None:
    with pytest.raises(ValueError, match=f"count = {value} does not fit in 64 bits"):
        arguments.integer(value, "count")


@pytest.mark.parametrize("value", [None, True, np.True_, 1.0, np.float32(1), "1", b"1", [1], np.array([1])])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(TypeError, match=r"count is .*; an integer is expected"):
        arguments.integer(value, "count")


def test_a_tensor_is_no_number() -> None:
    """Paddle would cut 1.5 to 1, and 2 of 1.9."""
    for tensor in (paddle.to_tensor(1.5), paddle.to_tensor(1), paddle.to_tensor([1, 2])):
        with pytest.raises(TypeError, match=r"(?s)count is .*; an integer is expected"):
            arguments.integer(tensor, "count")


def test_messages_stay_short() -> None:
    with pytest.raises(TypeError) as caught:
        arguments.integer(np.zeros(10_000), "count")
    assert len(str(caught.value)) < 200


def has_place(tensor: paddle.Tensor) -> bool:
    try:
        return tensor.place is not None
    except RuntimeError:
        return False


@pytest.mark.parametrize("look", [arguments.cache, arguments.readable, arguments.strided, arguments.scale])
def test_a_tensor_without_memory(look) -> None:
    """To Paddle 3 it is an empty tensor on the CPU, which may be read."""
    may_be_read = has_place(paddle.Tensor()) and look in (arguments.readable, arguments.strided)
    with contextlib.nullcontext() if may_be_read else pytest.raises(ValueError, match=r"x (holds no|has shape)"):
        look(paddle.Tensor(), "x")


@pytest.mark.parametrize(
    ("given_", "kind"),
    [
        ((i for i in (1, 2)), "generator"),
        ({1, 2}, "set"),
        ({1: 2}.keys(), "dict_keys"),
        (map(int, "12"), "map"),
    ],
)
def test_what_is_no_sequence_is_named(given_: object, kind: str) -> None:
    expected = rf"ids is {kind}; integers are expected \(list, tuple, range, array or tensor\)"
    for read in (arguments.block_ids, arguments.id_array, arguments.pair_array):
        with pytest.raises(TypeError, match=expected):
            read(given_, "ids")


def test_a_number_is_no_list_of_addresses() -> None:
    with pytest.raises(ValueError, match=r"source_pointers has shape \[\]; a 1-D list of integers is expected"):
        arguments.addresses(1 << 20, "source_pointers")


def test_a_tensor_is_no_integer() -> None:
    with pytest.raises(TypeError, match=r"total_tokens is a tensor; an integer is expected: int\(tensor\)"):
        arguments.integer(paddle.to_tensor(9), "total_tokens")


@pytest.mark.parametrize("value", [1, 0.5, np.float16(2), np.int8(3), np.array(4.0), Fraction(1, 3), Decimal("0.25")])
def test_numbers_that_scale(value: Any) -> None:
    assert arguments.scale(value, "x") == (None, float(np.float32(float(value))))


@pytest.mark.parametrize(
    "value",
    [
        *(True, np.True_, np.array(True), 1j, np.complex64(1), np.array(1 + 0j), "1", b"1", None, [1.0], np.ones(1)),
        *(np.datetime64("2020-01-01"), np.timedelta64(1, "s"), np.array("2020", "datetime64[Y]"), np.str_("1")),
    ],
)
def test_what_is_no_scale(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^x is \w+; a number or a float32 tensor is expected"):
        arguments.scale(value, "x")


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 1e39, 1e-60, 10**400, -(10**400), float("nan"), float("inf"), np.float64(1e300), Fraction(10**400, 3)),
        *(Decimal("1e400"), Decimal("sNaN"), Decimal("NaN")),
    ],
)
def test_scales_beyond_float32(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^x = .{1,500} must be positive and finite in float32$"):
        arguments.scale(value, "x")


def test_integers_too_long_to_be_written() -> None:
    for call in (arguments.integer, arguments.scale):
        with pytest.raises(ValueError, match=r"^x = an integer of 16610 bits (does not fit|must be)"):
            call(10**5000, "x")
    with pytest.raises(IndexError, match=r"^x\[1\]: an integer of 16610 bits must be in"):
        arguments.block_ids([1, 10**5000], "x")


def test_a_dtype_that_no_operator_takes() -> None:
    with pytest.raises(TypeError, match=r"^x has dtype paddle.complex64, which no operator takes$"):
        arguments.strided(paddle.zeros([2]).astype("complex64"), "x")
