"""concat_and_cache_mla against the reference, on the whole memory of the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from paddle_kv.ops import _check
from tests.machine import GuardedCache, Machine, cpu_machine
from tests.ops.insert_conformance import CACHE_DTYPES, random_bits, random_rows, slot_tensor, tensor
from tests.reference.cache_insert import inserted
from tests.reference.float_formats import quantize

FORMATS = ["fp8_e4m3", "fp8_e5m2", "int8", "paddle_uint8"]
DTYPES = ["float16", "bfloat16", "float32"]


class Latent:
    """A cache with random content, and tokens for it."""

    def __init__(
        self, machine: Machine, tokens: int = 11, rank: int = 32, rope: int = 16, blocks: int = 5,
        block_size: int = 4, dtype: str = "float16", kv_cache_dtype: str = "auto", head: str = "",
    ) -> None:  # fmt: skip
        self.machine, self.kv_cache_dtype, self.block_size = machine, kv_cache_dtype, block_size
        make = random_bits if kv_cache_dtype == "auto" else random_rows
        self.kv_c, self.k_pe = make((tokens, rank), dtype, 1), make((tokens, rope), dtype, 2)
        stored = self.kv_c.dtype if kv_cache_dtype == "auto" else np.dtype(np.uint8)
        shape = (blocks, block_size * (rank + rope) * stored.itemsize)
        bits = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
        width = rank + rope
        rows = {"": (block_size, width), "first": (1, block_size, width), "last": (block_size, 1, width)}[head]
        self.cache = GuardedCache(machine, bits, rows, CACHE_DTYPES.get(kv_cache_dtype, dtype))

    def insert(self, slots: Any, **options: Any) -> Any:
        tensors = options.pop("tensors", None) or (tensor(self.kv_c, self.machine), tensor(self.k_pe, self.machine))
        mapping = options.pop("slot_mapping", None)
        if mapping is None:
            mapping = slot_tensor(slots, self.machine)
        return ops.concat_and_cache_mla(
            *tensors, self.cache.tensor, mapping, kv_cache_dtype=self.kv_cache_dtype, **options
        )

    def check(self, slots: np.ndarray, scale: float = 1.0) -> None:
        self.machine.synchronize()
        rows = np.concatenate([self.kv_c, self.k_pe], axis=1)
        if self.kv_cache_dtype != "auto":
            rows = quantize(rows, scale, self.kv_cache_dtype)
        plain = np.dtype(f"u{rows.dtype.itemsize}")
        hnd = self.cache.bits.view(plain).reshape(len(self.cache.bits), 1, self.block_size, -1)
        expected = inserted(rows.view(plain)[:, None], hnd, slots)
        self.cache.check(expected.view(np.uint8).reshape(len(expected), -1))

    def check_insert(self, slots: Any, scale: Any = None, **options: Any) -> None:
        slots = np.asarray(slots, np.int64)
        assert self.insert(slots, scale=scale, **options) is self.cache.tensor
        self.check(
            slots,
            1.0
            if scale is None
            else float(np.float32(scale if isinstance(scale, float) else scale.numpy().ravel()[0])),
        )


def some_slots(tokens: int, limit: int) -> np.ndarray:
    slots = np.random.default_rng(4).permutation(limit)[:tokens]
    slots[tokens // 2] = -1
    return slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FORMATS])
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (32, 16), (7, 3), (8, 1), (1, 8)])
def test_dtypes_formats_and_sizes(machine: Machine, dtype: str, kv_cache_dtype: str, rank: int, rope: int) -> None:
    latent = Latent(machine, rank=rank, rope=rope, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    latent.check_insert(some_slots(11, 20))


@pytest.mark.parametrize("head", ["first", "last"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_caches_in_which_the_head_is_a_dimension(
    machine: Machine, head: str, kv_cache_dtype: str, block_size: int
) -> None:
    latent = Latent(machine, blocks=20, block_size=block_size, kv_cache_dtype=kv_cache_dtype, head=head)
    latent.check_insert(some_slots(11, 20 * block_size))


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_scales(machine: Machine, kv_cache_dtype: str) -> None:
    for scale in (0.37, 12.5):
        Latent(machine, kv_cache_dtype=kv_cache_dtype).check_insert(some_slots(11, 20), scale)
    in_tensor = tensor(np.array([0.37], np.float32), machine)
    Latent(machine, kv_cache_dtype=kv_cache_dtype).check_insert(some_slots(11, 20), in_tensor)


@pytest.mark.parametrize("tokens", [1, 64, 3000])
def test_token_counts(machine: Machine, tokens: int) -> None:
    latent = Latent(machine, tokens=tokens, blocks=tokens // 16 + 2, block_size=16)
    latent.check_insert(np.random.default_rng(1).permutation((tokens // 16 + 2) * 16)[:tokens])


def test_no_tokens(machine: Machine) -> None:
    Latent(machine, tokens=0).check_insert([])


def test_slots_outside_the_cache_are_never_written(machine: Machine) -> None:
    Latent(machine).check_insert([20, 21, 2**31, 2**40, 2**62, -5, 19, 0, -(2**62), 1 << 32, 100])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_slices_of_one_projection(machine: Machine, kv_cache_dtype: str) -> None:
    latent = Latent(machine, kv_cache_dtype=kv_cache_dtype)
    fused = tensor(np.concatenate([latent.kv_c, latent.k_pe, latent.kv_c[:, :5]], axis=1), machine)
    latent.check_insert(some_slots(11, 20), tensors=(fused[:, :32], fused[:, 32:48]))
    transposed = (tensor(latent.kv_c.T, machine).t(), tensor(np.repeat(latent.k_pe, 3, axis=1), machine)[:, ::3])
    latent.check_insert(some_slots(11, 20), tensors=transposed)


def test_slots_with_a_stride(machine: Machine) -> None:
    slots = some_slots(11, 20)
    table = slot_tensor(np.stack([slots + 1, slots], axis=1), machine, "int32")
    Latent(machine).check_insert(slots, slot_mapping=table[:, 1])


def test_check_mode(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    latent = Latent(machine)
    with pytest.raises(IndexError, match=r"slot_mapping\[3\] = 20 must be in \[0, 20\)"):
        latent.insert([0, 1, 2, 20, 4, 5, 6, 7, 8, 9, 10])
    with pytest.raises(ValueError, match=r"both name slot 5"):
        latent.insert([0, 5, 2, 5, 4, -1, 6, 7, 8, 9, 10])
    latent.cache.check(latent.cache.bits)


@pytest.mark.parametrize("head", ["", "first", "last"])
def test_blocks_that_are_written_are_told(machine: Machine, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever dimension of the cache counts the slots of a block."""
    seen: list[list[int]] = []
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    monkeypatch.setattr(_check, "access_checks", [lambda address, ids, writing, queue: seen.append(list(ids))])
    latent = Latent(machine, tokens=3, head=head)
    latent.check_insert([17, -1, 3])
    assert seen == [[0, 4]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_c": (11, 31)}, "kv_c has rank 31, k_pe has rope 16, kv_cache has rows of 48"),
        ({"k_pe": (11, 17)}, "kv_c has rank 32, k_pe has rope 17"),
        ({"kv_c": (11, 1, 32)}, r"kv_c has shape \[11, 1, 32\]"),
        ({"k_pe": (10, 16)}, "kv_c has 11 tokens, k_pe has 10"),
        ({"kv_cache": (5, 4, 2, 24)}, r"kv_cache has shape \[5, 4, 2, 24\]"),
        ({"slot_mapping": (10,)}, "kv_c has 11 tokens, slot_mapping has 10"),
        ({"slot_mapping": (12,)}, "kv_c has 11 tokens, slot_mapping has 12"),
    ],
)
def test_shapes_that_do_not_fit(machine: Machine, changed: dict[str, Any], message: str) -> None:
    shapes = {"kv_c": (11, 32), "k_pe": (11, 16), "kv_cache": (5, 4, 48), "slot_mapping": (11,), **changed}
    given = {
        name: tensor(np.zeros(shape, np.int64 if name == "slot_mapping" else np.float16), machine)
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        ops.concat_and_cache_mla(**given)


def test_other_mistakes(machine: Machine) -> None:
    latent = Latent(machine)
    slots = some_slots(11, 20)
    with pytest.raises(ValueError, match="scale is given"):
        latent.insert(slots, scale=1.0)
    with pytest.raises(ValueError, match=r"differ in dtype \(float16, float32\); both"):
        latent.insert(slots, tensors=(tensor(latent.kv_c, machine), tensor(np.zeros((11, 16), np.float32), machine)))
    with pytest.raises(ValueError, match="kv_c has dtype float32, kv_cache has float16"):
        latent.insert(slots, tensors=[tensor(np.zeros((11, n), np.float32), machine) for n in (32, 16)])
    with pytest.raises(TypeError, match="k_pe is NoneType"):
        latent.insert(slots, tensors=(tensor(latent.kv_c, machine), None))
    with pytest.raises(ValueError, match=r"scale has shape \[2\]"):
        quantised = Latent(machine, kv_cache_dtype="int8")
        quantised.insert(slots, scale=tensor(np.ones(2, np.float32), machine))
    latent.cache.check(latent.cache.bits)


@given(st.data())
def test_any_shapes_and_slots(data: st.DataObject) -> None:
    tokens, blocks, block_size = (
        data.draw(st.integers(low, 20), name) for low, name in ((0, "tokens"), (1, "blocks"), (1, "block size"))
    )
    latent = Latent(
        cpu_machine(), tokens, data.draw(st.integers(1, 40), "rank"), data.draw(st.integers(1, 40), "rope"), blocks,
        block_size, data.draw(st.sampled_from(DTYPES), "dtype"),
        data.draw(st.sampled_from(["auto", *FORMATS]), "kv_cache_dtype"),
    )  # fmt: skip
    latent.check_insert(data.draw(st.permutations(range(-5, blocks * block_size + 25)), "slots")[:tokens])


@pytest.mark.parametrize("full_graph", [True, False], ids=["source", "bytecode"])
def test_in_a_program(machine: Machine, full_graph: bool) -> None:
    def step(kv_c: Any, k_pe: Any, kv_cache: Any, slots: Any) -> Any:
        kv_cache = ops.concat_and_cache_mla(kv_c, k_pe, kv_cache, slots, kv_cache_dtype="int8", scale=0.37)
        return kv_cache.reshape([-1])[:1]

    traced = paddle.jit.to_static(step, full_graph=full_graph)
    for first in (0, 9):
        latent = Latent(machine, kv_cache_dtype="int8")
        slots = np.arange(first, first + 11)
        traced(
            tensor(latent.kv_c, machine), tensor(latent.k_pe, machine), latent.cache.tensor, slot_tensor(slots, machine)
        )
        latent.check(slots, 0.37)
