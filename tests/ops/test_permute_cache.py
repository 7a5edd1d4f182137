"""Blocks of paged caches to universal tensors and back, and universal tensors cut for other numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, GuardedCache, Machine, bits_of, cpu_machine, item_bytes, random_bits, tensor_of
from tests.ops.permute_conformance import dense, flat
from tests.reference import permute as reference

both_layouts = pytest.mark.parametrize("layout", ["NHD", "HND"])


@dataclass
class Caches:
    """One cache a layer for keys, and one for values unless it is latent; all of different contents."""

    machine: Machine
    layout: str = "HND"
    blocks: int = 9
    layers: int = 3
    heads: int = 4
    tokens: int = 5
    width: int = 7
    dtype: str = "bfloat16"
    latent: bool = False
    rank: int = 4
    bits: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        rows = (self.tokens, self.heads) if self.layout == "NHD" else (self.heads, self.tokens)
        self.block_shape = (*rows, self.width) if self.rank == 4 else (self.tokens, self.width)
        self.rows = (*rows, self.width * item_bytes(self.dtype))
        count = self.layers * (1 if self.latent else 2)
        self.bits = [random_bits(self.blocks, int(np.prod(self.rows)), i) for i in range(count)]
        self.caches = [GuardedCache(self.machine, bits, self.block_shape, self.dtype) for bits in self.bits]
        tensors = [cache.tensor for cache in self.caches]
        self.keys: list[Any] = tensors[: self.layers]
        self.values: list[Any] | None = None if self.latent else tensors[self.layers :]

    def universal_shape(self, count: int) -> tuple[int, ...]:
        return (count, self.heads, self.layers, 1 if self.latent else 2, self.tokens, self.width)

    def expected(self, ids: list[int]) -> np.ndarray:
        rows = [bits.reshape(self.blocks, *self.rows) for bits in self.bits]
        stack = reference.stack_of_cache(rows[: self.layers], rows[self.layers :] or None, ids)
        return flat(reference.universal_from_block(stack, self.layers, 1 if self.latent else 2, self.layout))

    def check_untouched(self) -> None:
        for cache, bits in zip(self.caches, self.bits, strict=True):
            cache.check(bits)


def check_cache(caches: Caches, ids: list[int], form: Any = list) -> None:
    """There, and from there into other blocks of other caches."""
    machine, layout = caches.machine, caches.layout
    out = dense(machine, caches.universal_shape(len(ids)), caches.dtype)
    assert ops.universal_from_cache(caches.keys, caches.values, form(ids), layout=layout, out=out.tensor) is out.tensor
    machine.synchronize()
    universal = caches.expected(ids)
    out.check(universal)
    caches.check_untouched()

    targets = np.random.default_rng(1).permutation(caches.blocks)[: len(ids)].tolist()
    after = [bits.copy() for bits in caches.bits]
    for bits, old in zip(after, caches.bits, strict=True):
        bits[targets] = old[ids]
    result = ops.cache_from_universal(out.tensor, caches.keys, caches.values, form(targets), layout=layout)
    assert result[0] is caches.keys and result[1] is caches.values
    machine.synchronize()
    for cache, expected in zip(caches.caches, after, strict=True):
        cache.check(expected)
    out.check(universal)


@both_layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(machine: Machine, dtype: str, layout: str) -> None:
    check_cache(Caches(machine, layout, dtype=dtype), [7, 0, 3, 8])


@both_layouts
@pytest.mark.parametrize("rank", [3, 4])
def test_a_latent_cache(machine: Machine, layout: str, rank: int) -> None:
    check_cache(Caches(machine, layout, heads=1, width=9, latent=True, rank=rank), [4, 2])


def test_many_layers_and_blocks(machine: Machine) -> None:
    caches = Caches(machine, "NHD", blocks=600, layers=80, heads=2, tokens=3, width=3, dtype="uint8")
    check_cache(caches, np.random.default_rng(2).permutation(600)[:577].tolist())


@pytest.mark.parametrize(
    "form",
    [tuple, np.array, lambda ids: np.array(ids, np.int32), lambda ids: paddle.to_tensor(ids, place=paddle.CPUPlace())],
    ids=["tuple", "array", "int32 array", "CPU tensor"],
)
def test_forms_of_ids(machine: Machine, form: Any) -> None:
    check_cache(Caches(machine), [7, 0, 3, 8], form)


def test_a_block_may_be_read_twice(machine: Machine) -> None:
    caches = Caches(machine)
    universal = ops.universal_from_cache(caches.keys, caches.values, [4, 4, 1])
    machine.synchronize()
    assert tuple(universal.shape) == caches.universal_shape(3)
    assert str(universal.place) == str(caches.keys[0].place) and universal.dtype == caches.keys[0].dtype
    np.testing.assert_array_equal(bits_of(universal), caches.expected([4, 4, 1]))


def test_caches_of_different_lengths(machine: Machine) -> None:
    """A block must be in all of them."""
    keys, values = Caches(machine, blocks=9, layers=1), Caches(machine, blocks=5, layers=1)
    universal = ops.universal_from_cache(keys.keys, values.keys, [4])
    machine.synchronize()
    assert universal.shape[0] == 1
    with pytest.raises(IndexError, match=r"block_ids\[1\] = 5 must be in \[0, 5\)"):
        ops.universal_from_cache(keys.keys, values.keys, [4, 5])


def test_an_empty_list_of_ids(machine: Machine) -> None:
    caches = Caches(machine)
    universal = ops.universal_from_cache(caches.keys, caches.values, [])
    assert tuple(universal.shape) == caches.universal_shape(0)
    assert ops.cache_from_universal(universal, caches.keys, caches.values, [])[0] is caches.keys
    caches.check_untouched()


class TestErrors:
    def refuse(self, error: type[Exception], match: str, caches: Caches, **changed: Any) -> None:
        """Both operators refuse the arguments, and nothing has been written."""
        values = changed.pop("values", caches.values)
        keys = changed.pop("keys", caches.keys)
        ids = changed.pop("ids", [1, 2])
        shape = changed.pop("shape", caches.universal_shape(2))
        universal = dense(caches.machine, shape, changed.pop("dtype", caches.dtype))
        tensor = changed.pop("universal", universal.tensor)
        with pytest.raises(error, match=match):
            ops.universal_from_cache(keys, values, ids, out=tensor, **changed)
        with pytest.raises(error, match=match):
            ops.cache_from_universal(tensor, keys, values, ids, **changed)
        caches.machine.synchronize()
        caches.check_untouched()
        universal.check(universal.bits)

    @pytest.mark.parametrize("bad", [-1, 9, 2**40])
    def test_ids(self, machine: Machine, bad: int) -> None:
        self.refuse(IndexError, rf"block_ids\[1\] = {bad} must be in \[0, 9\)", Caches(machine), ids=[1, bad])

    def test_a_target_named_twice(self, machine: Machine) -> None:
        caches = Caches(machine)
        universal = dense(machine, caches.universal_shape(2), caches.dtype)
        with pytest.raises(ValueError, match="block_ids names block 3 more than once"):
            ops.cache_from_universal(universal.tensor, caches.keys, caches.values, [3, 3])
        caches.check_untouched()

    def test_shapes(self, machine: Machine) -> None:
        caches = Caches(machine)
        for shape in [(3, 4, 3, 2, 5, 7), (2, 5, 3, 2, 4, 7), (2, 4, 3, 1, 5, 7), (2, 4, 3, 2, 35)]:
            self.refuse(ValueError, r"has shape .*\[2, 4, 3, 2, 5, 7\]", caches, shape=shape)
        self.refuse(ValueError, "differ in dtype", caches, dtype="float32")
        other = Caches(machine, width=6)
        self.refuse(ValueError, r"value_caches\[0\] has shape", caches, values=other.values)

    def test_lists(self, machine: Machine) -> None:
        caches = Caches(machine)
        self.refuse(ValueError, "key_caches has 3 tensors, value_caches has 2", caches, values=caches.values[:2])
        self.refuse(ValueError, "key_caches is empty", caches, keys=[], values=None)
        self.refuse(TypeError, "key_caches is Tensor", caches, keys=caches.keys[0], values=None)

    def test_layout(self, machine: Machine) -> None:
        match = "layout is 'packed'; .* is expected; .*convert_layout"
        self.refuse(ValueError, match, Caches(machine), layout="packed")

    def test_a_tensor_that_is_not_contiguous(self, machine: Machine) -> None:
        caches = Caches(machine)
        turned = paddle.to_tensor(np.zeros((9, 5, 4, 7), np.uint16), place=machine.place).transpose([0, 2, 1, 3])
        self.refuse(
            ValueError, r"key_caches\[1\] is not contiguous", caches, keys=[caches.keys[0], turned, caches.keys[2]]
        )

    def test_the_same_cache_as_keys_and_values(self, machine: Machine) -> None:
        caches = Caches(machine)
        universal = dense(machine, caches.universal_shape(1), caches.dtype)
        with pytest.raises(ValueError, match="overlap"):
            ops.cache_from_universal(universal.tensor, caches.keys, caches.keys, [3])
        caches.check_untouched()


def parts_of(machine: Machine, whole: np.ndarray, ranks: int, dtype: str) -> list[Any]:
    heads = whole.shape[1] // ranks
    parts = [np.ascontiguousarray(whole[:, r * heads : (r + 1) * heads]) for r in range(ranks)]
    shape = (heads, *whole.shape[2:-1], whole.shape[-1] // item_bytes(dtype))
    return [tensor_of(flat(part), shape, dtype, machine.place) for part in parts]


def universal_bits(blocks: int, heads: int, dtype: str = "bfloat16", width: int = 3) -> np.ndarray:
    sizes = (blocks, heads, 2, 2, 5, width * item_bytes(dtype))
    return random_bits(blocks, int(np.prod(sizes[1:])), heads).reshape(sizes)


class TestReshard:
    @pytest.mark.parametrize("heads", [8, 24, 40], ids="{} heads".format)
    @pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float64"])
    def test_a_round_trip_over_all_ranks(self, machine: Machine, heads: int, dtype: str) -> None:
        whole = universal_bits(3, heads, dtype)
        parts = parts_of(machine, whole, 1, dtype)
        for ranks in (2, 4, 8, 1):
            parts = ops.reshard_universal(parts, ranks)
            machine.synchronize()
            assert len(parts) == ranks
            for part, expected in zip(parts, parts_of(machine, whole, ranks, dtype), strict=True):
                assert (
                    part.shape == expected.shape
                    and part.dtype == expected.dtype
                    and str(part.place) == str(expected.place)
                )
                np.testing.assert_array_equal(bits_of(part), bits_of(expected))

    @pytest.mark.parametrize(
        ("source", "target"), [(4, 8), (4, 2), (8, 4), (2, 3), (3, 2), (6, 4), (1, 24), (24, 1), (3, 3)]
    )
    def test_against_the_reference(self, machine: Machine, source: int, target: int) -> None:
        whole = universal_bits(2, 24)
        parts = parts_of(machine, whole, source, "bfloat16")
        before = [bits_of(part) for part in parts]
        result = ops.reshard_universal(parts, target)
        machine.synchronize()
        arrays = [whole[:, r * 24 // source : (r + 1) * 24 // source] for r in range(source)]
        for part, expected in zip(result, reference.reshard_universal(arrays, target), strict=True):
            np.testing.assert_array_equal(bits_of(part), flat(expected))
        for part, bits in zip(parts, before, strict=True):
            np.testing.assert_array_equal(bits_of(part), bits)

    def test_saved_by_four_ranks_loaded_by_eight_and_by_two(self, machine: Machine) -> None:
        """Each rank saves its own caches; together they are one cache."""
        ranks = [Caches(machine, heads=2) for _ in range(4)]
        saved = [ops.universal_from_cache(rank.keys, rank.values, [5, 1]) for rank in ranks]
        machine.synchronize()
        whole = np.concatenate([bits_of(part).reshape(2, 2, -1) for part in saved], axis=1)
        for count in (8, 2):
            loaded = ops.reshard_universal(saved, count)
            machine.synchronize()
            np.testing.assert_array_equal(
                np.concatenate([bits_of(part).reshape(2, 8 // count, -1) for part in loaded], axis=1), whole
            )

    def test_errors(self, machine: Machine) -> None:
        parts = parts_of(machine, universal_bits(2, 6), 2, "bfloat16")
        with pytest.raises(ValueError, match=r"6 heads \(2 parts of 3\) cannot be divided by target_tp = 4"):
            ops.reshard_universal(parts, 4)
        with pytest.raises(ValueError, match="cannot be divided by target_tp = 12"):
            ops.reshard_universal(parts, 12)
        with pytest.raises(ValueError, match="target_tp = 0 must be at least 1"):
            ops.reshard_universal(parts, 0)
        with pytest.raises(TypeError, match="target_tp"):
            ops.reshard_universal(parts, 2.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="parts is empty"):
            ops.reshard_universal([], 1)
        with pytest.raises(ValueError, match=r"parts\[1\] has shape"):
            ops.reshard_universal([parts[0], *parts_of(machine, universal_bits(2, 4), 2, "bfloat16")[:1]], 1)
        with pytest.raises(ValueError, match=r"parts\[1\] and parts\[0\] differ in dtype \(float16, bfloat16\)"):
            ops.reshard_universal([parts[0], *parts_of(machine, universal_bits(2, 6, "float16"), 2, "float16")[:1]], 1)
        with pytest.raises(TypeError, match="parts is Tensor"):
            ops.reshard_universal(parts[0], 1)


@settings(max_examples=40)
@given(
    sizes=st.fixed_dictionaries(
        {name: st.integers(1, 6) for name in ("layers", "heads", "width")} | {"tokens": st.integers(1, 40)}
    ),
    ids=st.lists(st.integers(0, 8), unique=True, min_size=1),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["NHD", "HND"]),
    latent=st.booleans(),
)
def test_any_sizes(sizes: dict[str, int], ids: list[int], dtype: str, layout: str, latent: bool) -> None:
    check_cache(Caches(cpu_machine(), layout, **sizes, dtype=dtype, latent=latent), ids)
