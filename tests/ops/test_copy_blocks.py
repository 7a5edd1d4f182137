"""copy_blocks against the reference, on the whole memory of every cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from paddle_kv.ops import _check
from tests.machine import DTYPES, Machine, cpu_machine
from tests.ops.copy_conformance import check, check_one, check_untouched, make, shuffled_pairs

OP = "copy_blocks"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_shape", [(5, 3), (3, 5, 7), (2, 3, 5, 4)], ids=["rank3", "rank4", "rank5"])
def test_dtypes_and_ranks(machine: Machine, dtype: str, block_shape: tuple[int, ...]) -> None:
    pairs = shuffled_pairs(5, 11)
    keys, values = (make(machine, 11, block_shape, dtype, seed) for seed in (1, 2))
    check_one(OP, keys, values, pairs, pairs)


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 15, 16, 17, 33, 255, 4099, 8191, 8192, 8209, 100_003])
def test_odd_block_sizes_at_odd_addresses(machine: Machine, block_bytes: int) -> None:
    """The guard in front makes the address of each block as odd as its size."""
    pairs = shuffled_pairs(4, 9)
    cache = make(machine, 9, (1, block_bytes), "uint8", 1)
    check_one(OP, cache, None, pairs, pairs)


def test_blocks_large_enough_to_be_cut(machine: Machine) -> None:
    pairs = [(4, 0), (1, 3)]
    cache = make(machine, 5, (3, (1 << 20) - 5), "uint8", 1)
    check_one(OP, cache, None, pairs, pairs)


def test_one_source_many_targets(machine: Machine) -> None:
    keys, values = (make(machine, 6, (2, 5), "float16", seed) for seed in (1, 2))
    check_one(OP, keys, values, [(3, 0), (3, 5), (1, 2), (3, 4)], {3: [0, 5, 4], 1: 2})


def test_more_pairs_than_one_launch_holds(machine: Machine) -> None:
    for count in (279, 280, 281, 3190, 3191, 6380, 6381, 13_000):
        pairs = shuffled_pairs(count, 2 * count + 3)
        check_one(OP, make(machine, 2 * count + 3, (1, 5), "uint8", count), None, pairs, np.array(pairs))


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks"])
@pytest.mark.parametrize("blocks", [65_535, 65_536, 65_537, 70_000])
@pytest.mark.parametrize("count", [300, 3191, 6381])
def test_ids_of_16_bits_and_of_more(machine: Machine, op: str, blocks: int, count: int) -> None:
    """The last blocks are among them. The second cache may have more blocks than the first."""
    ids = np.random.default_rng(count).permutation(blocks)
    last = np.flatnonzero(ids == blocks - 1)[0]
    ids[[0, last]] = ids[[last, 0]]
    pairs = np.stack([ids[:count], ids[count : 2 * count][::-1]], axis=1)
    for others in (blocks, 65_600):
        keys, values = (make(machine, n, (1, 3), "uint8", n) for n in (blocks, max(blocks, others)))
        check_one(op, keys, values, pairs.tolist(), pairs)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 128, 129, 150])
def test_many_caches_of_different_block_sizes(machine: Machine, count: int) -> None:
    """Also across the limits of one launch. Block bytes from 1 to 20,000, in no order."""
    pairs = shuffled_pairs(3, 7)
    sizes = np.random.default_rng(count).integers(1, 300, (2, count))
    sizes[0, count // 2] = 20_000
    keys, values = ([make(machine, 7, (1, int(n)), "uint8", i) for i, n in enumerate(row)] for row in sizes)
    check(OP, keys, values, pairs, pairs)


def test_latent_caches_with_their_scales(machine: Machine) -> None:
    pairs = shuffled_pairs(3, 7)
    latent = [make(machine, 7, (4, 576), "uint8", seed) for seed in range(3)]
    scales = [make(machine, 7, (4, 1), "float32", seed) for seed in range(3)]
    check(OP, latent + scales, None, pairs, pairs)


def test_caches_of_different_length(machine: Machine) -> None:
    pairs = [(2, 0), (1, 3)]
    check(OP, [make(machine, 4, (2, 5), "int8", 1), make(machine, 9, (2, 5), "int8", 2)], None, pairs, pairs)


FORMS = {
    "list": list,
    "tuple of lists": lambda pairs: tuple(list(pair) for pair in pairs),
    "dict": dict,
    "int32 array": lambda pairs: np.array(pairs, "int32"),
    "int64 array": lambda pairs: np.array(pairs, "int64"),
    "strided array": lambda pairs: np.array(pairs, "int64").T.copy().T,
    "int32 tensor": lambda pairs: paddle.to_tensor(np.array(pairs, "int32"), place=paddle.CPUPlace()),
    "int64 tensor": lambda pairs: paddle.to_tensor(np.array(pairs, "int64"), place=paddle.CPUPlace()),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_mapping(machine: Machine, form: str) -> None:
    pairs = shuffled_pairs(3, 8)
    check_one(OP, make(machine, 8, (2, 5), "float32", 1), None, pairs, FORMS[form](pairs))


EMPTY = [[], (), {}, {3: []}, np.zeros((0, 2), "int64")]


@pytest.mark.parametrize("none", EMPTY, ids=["list", "tuple", "dict", "dict without targets", "array"])
def test_an_empty_mapping_moves_nothing(machine: Machine, none: Any) -> None:
    keys, values = (make(machine, 4, (2, 5), "float32", seed) for seed in (1, 2))
    check_one(OP, keys, values, [], none)


def test_an_empty_tensor_moves_nothing(machine: Machine) -> None:
    keys = make(machine, 4, (2, 5), "float32", 1)
    check_one(OP, keys, None, [], paddle.to_tensor(np.zeros((0, 2), "int64"), place=paddle.CPUPlace()))


def test_no_caches_at_all(machine: Machine) -> None:
    assert ops.copy_blocks([], None, [(0, 1)]) == ([], None)
    assert ops.copy_blocks([], [], []) == ([], [])


WRONG_IDS = [
    ([(0, 1), (2, 7)], r"targets of block_mapping\[1\] = 7 must be in \[0, 7\)"),
    ([(0, 1), (7, 2)], r"sources of block_mapping\[1\] = 7 must be in \[0, 7\)"),
    ([(-1, 1)], r"sources of block_mapping\[0\] = -1 must be in \[0, 7\)"),
    ([(0, 1), (2, -3)], r"targets of block_mapping\[1\] = -3 must be in \[0, 7\)"),
    ([(0, 2**40)], r"1099511627776 must be in \[0, 7\)"),
]


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks"])
@pytest.mark.parametrize(("mapping", "message"), WRONG_IDS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_ids_out_of_range(machine: Machine, op: str, mapping: Any, message: str, as_tensor: bool) -> None:
    caches = [make(machine, blocks, (2, 5), "float32", blocks) for blocks in (9, 7, 8)]
    given_mapping = paddle.to_tensor(np.array(mapping), place=paddle.CPUPlace()) if as_tensor else mapping
    with pytest.raises(IndexError, match=message):
        getattr(ops, op)([cache.tensor for cache in caches], None, given_mapping)
    check_untouched(*caches)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ([(0, 1), (2, 1)], "name block 1 more than once"),
        ([(1, 2), (2, 3)], "block 2 is in sources of block_mapping and in targets of block_mapping"),
        ([(2, 3), (1, 2)], "block 2 is in sources"),
        ([(4, 4)], "block 4 is in sources"),
        ({0: [1, 1]}, "name block 1 more than once"),
        ([[0, 1, 2]], r"shape \[1, 3\]"),
        ([0, 1], r"shape \[2\]"),
        (np.zeros((2, 2, 2), "int64"), r"shape \[2, 2, 2\]"),
    ],
)
def test_pairs_that_make_no_copy(machine: Machine, mapping: Any, message: str) -> None:
    keys, values = (make(machine, 7, (2, 5), "float32", seed) for seed in (1, 2))
    with pytest.raises(ValueError, match=message):
        ops.copy_blocks(keys.tensor, values.tensor, mapping)
    check_untouched(keys, values)
    ops.copy_blocks(keys.tensor, values.tensor, [(0, 1)])  # the process lives, and works


@pytest.mark.parametrize("mapping", [None, "ab", [(0.0, 1.0)], [(0, None)], 3.5])
def test_mappings_of_the_wrong_type(machine: Machine, mapping: Any) -> None:
    cache = make(machine, 7, (2, 5), "float32", 1)
    with pytest.raises(TypeError, match="block_mapping"):
        ops.copy_blocks(cache.tensor, None, mapping)
    check_untouched(cache)


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks", "copy_single_block"])
def test_blocks_that_a_transfer_is_moving_are_reported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """The debug mode is told which blocks of which cache are read and which are written."""
    seen: list[tuple[int, list[int], bool]] = []
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    monkeypatch.setattr(
        _check, "access_checks", [lambda address, ids, writing, queue: seen.append((address, list(ids), writing))]
    )
    keys, values = (make(machine, 6, (2, 5), "int8", seed).tensor for seed in (1, 2))
    pairs = [(3, 0)] if op == "copy_single_block" else [(3, 0), (1, 5)]
    getattr(ops, op)(keys, values, *(pairs[0] if op == "copy_single_block" else [pairs]))
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    swaps = op == "swap_blocks"
    assert seen == [
        access
        for cache in (keys, values)
        for access in ((cache.data_ptr(), sources, swaps), (cache.data_ptr(), targets, True))
    ]


class TestWrongCaches:
    def test_lists_of_different_length(self, machine: Machine) -> None:
        a, b, c = (make(machine, 4, (2, 5), "float32", seed) for seed in range(3))
        with pytest.raises(ValueError, match="key_caches has 2 tensors, value_caches has 1"):
            ops.copy_blocks([a.tensor, b.tensor], [c.tensor], [(0, 1)])
        check_untouched(a, b, c)

    def test_one_cache_named_twice(self, machine: Machine) -> None:
        cache = make(machine, 4, (2, 5), "float32", 1)
        for keys, values in (([cache.tensor, cache.tensor], None), (cache.tensor, cache.tensor)):
            with pytest.raises(ValueError, match="overlap"):
                ops.copy_blocks(keys, values, [(0, 1)])
        check_untouched(cache)

    def test_caches_that_overlap(self, machine: Machine) -> None:
        cache = make(machine, 6, (2, 5), "float32", 1)
        with pytest.raises(ValueError, match="overlap"):
            ops.copy_blocks(cache.tensor[:4], cache.tensor[3:], [(0, 1)])
        check_untouched(cache)

    def test_halves_of_one_tensor_are_two_caches(self, machine: Machine) -> None:
        cache = make(machine, 6, (2, 5), "float32", 1)
        ops.copy_blocks(cache.tensor[:3], cache.tensor[3:], [(0, 1)])
        machine.synchronize()
        whole = cache.bits.copy()
        whole[1], whole[4] = whole[0], whole[3]
        cache.check(whole)

    def test_a_view_that_is_not_contiguous(self, machine: Machine) -> None:
        cache = make(machine, 4, (2, 6), "float32", 1)
        for view in (cache.tensor[:, :, ::2], cache.tensor.transpose([1, 0, 2]), cache.tensor[:, :1]):
            with pytest.raises(ValueError, match="key_caches is not contiguous"):
                ops.copy_blocks(view, None, [(0, 1)])
        check_untouched(cache)

    @pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 1, 1, 1, 1, 1)])
    def test_ranks(self, machine: Machine, shape: tuple[int, ...]) -> None:
        tensor = paddle.to_tensor(np.zeros(shape, "float32"), place=machine.place)
        with pytest.raises(ValueError, match=f"key_caches has rank {len(shape)}"):
            ops.copy_blocks(tensor, None, [(0, 1)])

    @pytest.mark.parametrize("cache", [None, 3, np.zeros((4, 2, 5), "float32")])
    def test_types(self, machine: Machine, cache: Any) -> None:
        with pytest.raises(TypeError, match="key_caches"):
            ops.copy_blocks(cache, None, [(0, 1)])
        with pytest.raises(TypeError, match=r"key_caches\[0\]"):
            ops.copy_blocks([cache], None, [(0, 1)])

    def test_the_error_names_the_list_and_the_position(self, machine: Machine) -> None:
        good, bad = make(machine, 4, (2, 5), "float32", 1), make(machine, 4, (20,), "float32", 2)
        others = [make(machine, 4, (2, 5), "float32", seed) for seed in (3, 4)]
        with pytest.raises(ValueError, match=r"value_caches\[1\] has rank 2"):
            ops.copy_blocks([cache.tensor for cache in others], [good.tensor, bad.tensor], [(0, 1)])
        check_untouched(good, bad, *others)


@given(st.data())
def test_any_caches_and_pairs(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(2, 40), "blocks")
    ids = data.draw(st.permutations(range(blocks)), "ids")
    sources = ids[: data.draw(st.integers(1, blocks - 1), "sources")]
    targets = ids[len(sources) :][: data.draw(st.integers(0, blocks), "pairs")]
    pairs = [(data.draw(st.sampled_from(sources)), target) for target in targets]
    sizes = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5), "block bytes")
    keys = [make(cpu_machine(), blocks, (1, size), "uint8", i) for i, size in enumerate(sizes)]
    check(OP, keys, None, pairs, pairs)


# The source tracer of Paddle 2.6 does not see variables of an enclosing function.
def step_on_tensors(keys: Any, values: Any, pairs: Any) -> Any:
    keys, values = ops.copy_blocks(keys, values, pairs)
    return keys + 0, values + 0


def step_on_lists(keys: Any, values: Any, pairs: Any) -> Any:
    (keys,), (values,) = ops.copy_blocks([keys], [values], pairs)
    return keys + 0, values + 0


class TestPrograms:
    """The operator in a function that Paddle traces, from source (full_graph) or from bytecode."""

    @pytest.fixture(params=[True, False], ids=["source", "bytecode"])
    def full_graph(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.param)

    @pytest.mark.parametrize("as_lists", [False, True])
    def test_a_tensor_of_pairs_is_read_in_every_run(self, machine: Machine, full_graph: bool, as_lists: bool) -> None:
        step = step_on_lists if as_lists else step_on_tensors
        traced = paddle.jit.to_static(step, full_graph=full_graph)
        keys, values = (make(machine, 5, (2, 3), "float32", seed) for seed in (1, 2))
        done: list[tuple[int, int]] = []
        for pair in ((0, 3), (1, 4), (2, 0)):
            mapping = paddle.to_tensor(np.array([pair], "int32"), place=machine.place)
            results = traced(keys.tensor, values.tensor, mapping)
            done.append(pair)
            for cache, result in zip((keys, values), results, strict=True):
                whole = cache.bits.copy()
                for source, target in done:
                    whole[target] = whole[source]
                cache.check(whole)
                assert np.array_equal(result.numpy().view(np.uint8).reshape(5, -1), whole)

    def test_pairs_of_the_host_are_part_of_the_program(self, machine: Machine, full_graph: bool) -> None:
        def step(keys: Any) -> Any:
            keys, _ = ops.copy_blocks(keys, None, {0: [2, 3]})
            keys, _ = ops.copy_single_block(keys, None, 1, 4)
            keys, _ = ops.swap_blocks(keys, None, [(0, 1)])
            return keys + 0

        keys = make(machine, 5, (2, 3), "float32", 1)
        traced = paddle.jit.to_static(step, full_graph=full_graph)
        traced(keys.tensor)
        machine.synchronize()
        keys.check(keys.bits[[1, 0, 0, 0, 1]])
        traced(keys.tensor)
        machine.synchronize()
        keys.check(keys.bits[[0, 1, 1, 1, 0]])

    def test_a_bad_id_is_an_index_error_when_the_program_runs(self, full_graph: bool) -> None:
        def step(keys: Any, pairs: Any) -> Any:
            return ops.copy_blocks(keys, None, pairs)[0] + 0

        traced = paddle.jit.to_static(step, full_graph=full_graph)
        keys = make(cpu_machine(), 5, (2, 3), "float32", 1)
        with pytest.raises(IndexError, match=r"targets of block_mapping\[0\] = 9 must be in \[0, 5\)"):
            traced(keys.tensor, paddle.to_tensor(np.array([[0, 9]]), place=paddle.CPUPlace()))
        check_untouched(keys)

    def test_a_stream_cannot_be_named(self, machine: Machine) -> None:
        def step(keys: Any) -> Any:
            return ops.copy_blocks(keys, None, [(0, 1)], stream=7)[0] + 0

        traced = paddle.jit.to_static(step, full_graph=True)
        with pytest.raises(NotImplementedError, match="stream cannot be named in a traced program"):
            traced(make(machine, 5, (2, 3), "float32", 1).tensor)
