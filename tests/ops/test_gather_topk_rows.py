"""gather_topk_rows against the reference: rows, state, and everything around them, call after call."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import DTYPES, Machine, bits_of
from tests.ops.topk_rig import INTEGERS, Rig


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(machine: Machine, dtype: str) -> None:
    rig = Rig(machine, dtype=dtype, row_elements=5)
    assert rig.step([[3, 0, 7, 12, 23], [1, 2, 3, 4, 5]]) == [5, 5]
    assert rig.step([[23, 0, 8, 9, 1], [5, 4, 3, 2, 1]]) == [3, 0]


TRAFFIC: list[dict[str, Any]] = [
    {"dtype": "uint8", "row_elements": 1, "block_size": 1, "blocks": 30},
    {"dtype": "uint8", "row_elements": 7, "block_size": 3, "gap_bytes": 5, "misalignment": 1},
    {"dtype": "bfloat16", "row_elements": 9, "block_size": 7, "num_slots": 5, "misalignment": 2},
    {"dtype": "float32", "row_elements": 4, "batch": 1, "k": 1, "num_slots": 1, "max_tokens": 5},
    {"dtype": "float16", "row_elements": 20, "max_tokens": 100, "misalignment": 8},
    {"dtype": "bfloat16", "row_elements": 576, "k": 33, "num_slots": 47, "block_size": 16, "gap_bytes": 1152,
     "max_tokens": 96},
]  # fmt: skip


@pytest.mark.parametrize("sizes", TRAFFIC)
def test_traffic(machine: Machine, sizes: dict[str, Any]) -> None:
    rig = Rig(machine, **sizes)
    steps = 300 if sizes is TRAFFIC[1] else 40
    misses = 0
    for _ in range(steps):
        fresh = rig.random.integers(0, 3, rig.batch) if rig.random.random() < 0.1 else None
        table = rig.random_table() if rig.random.random() < 0.3 else None
        misses += sum(rig.step(rig.random_ids(), table=table, fresh=fresh))
    assert 0 < misses < steps * rig.batch * rig.k or rig.k == 1


@pytest.mark.parametrize(("k", "num_slots"), [(1025, 1025), (4099, 4101), (2048, 8192), (5000, 50_000)])
def test_long_lists(machine: Machine, k: int, num_slots: int) -> None:
    """More than the threads of a CTA number at once, and in the end more than its shared memory holds."""
    tokens = 3 * num_slots
    rig = Rig(machine, batch=2, k=k, num_slots=num_slots, row_elements=2, dtype="uint8", block_size=100,
              blocks=-(-tokens // 100), host_blocks=300, max_tokens=tokens)  # fmt: skip
    picked = np.array([rig.random.permutation(tokens)[: 2 * k] for _ in range(2)])
    assert rig.step(picked[:, :k]) == [k, k]
    assert rig.step(picked[:, k // 2 : k // 2 + k]) == [k // 2] * 2
    assert rig.step(np.where(rig.random.random((2, k)) < 0.2, -1, rig.random.permuted(picked, axis=1)[:, :k])) != [0, 0]
    rig.step(rig.random.integers(0, tokens, (2, k)))


class TestOrder:
    """Of one request with four slots: who stays, and who goes."""

    @pytest.fixture
    def rig(self, machine: Machine) -> Rig:
        return Rig(machine, batch=1, k=3, num_slots=4)

    def slots(self, rig: Rig) -> list[int]:
        return rig.integers["token_of_slot"].tensor.numpy()[0].tolist()  # type: ignore[no-any-return]

    def order(self, rig: Rig) -> list[int]:
        return rig.integers["lru_order"].tensor.numpy()[0].tolist()  # type: ignore[no-any-return]

    def test_misses_take_the_oldest_slots_in_the_order_of_the_list(self, rig: Rig) -> None:
        assert rig.step([[9, 4, 6]]) == [3]
        assert self.slots(rig) == [9, 4, 6, -1] and self.order(rig) == [3, 0, 1, 2]
        assert rig.step([[1, 9, 2]]) == [2]
        assert self.slots(rig) == [9, 2, 6, 1] and self.order(rig) == [2, 3, 0, 1]

    def test_hits_go_to_the_end_in_the_order_of_the_list(self, rig: Rig) -> None:
        rig.step([[9, 4, 6]])
        assert rig.step([[6, 9, 6]]) == [0]
        assert self.order(rig) == [3, 1, 2, 0]

    def test_a_token_of_the_list_is_not_evicted_by_one_before_it(self, rig: Rig) -> None:
        rig.step([[9, 4, 6]])
        rig.step([[3, 3, -1]])
        assert self.order(rig) == [0, 1, 2, 3]
        assert rig.step([[1, 2, 9]]) == [2]
        assert self.slots(rig) == [9, 1, 2, 3]

    def test_a_token_that_is_named_often_is_read_once(self, rig: Rig) -> None:
        assert rig.step([[7, 7, 7]]) == [1]
        assert self.slots(rig) == [7, -1, -1, -1]
        assert rig.step([[8, 7, 8]]) == [1]

    def test_padding_changes_nothing(self, rig: Rig) -> None:
        rig.step([[9, 4, 6]])
        assert rig.step([[-1, -5, -(2**31)]]) == [0]
        assert self.order(rig) == [3, 0, 1, 2]

    def test_a_token_without_a_host_row_becomes_zeros_and_not_resident(self, rig: Rig) -> None:
        table = [[0, 1, -1, 9, 2**31 - 1, 3]]
        assert rig.step([[8, 12, 16]], table=table) == [0]
        assert rig.step([[24, 2**31 - 1, 7]]) == [1]
        assert not rig.out.tensor.numpy()[0, :2].any()

    def test_a_resident_token_needs_no_host_row(self, rig: Rig) -> None:
        rig.step([[8, 9, 10]])
        assert rig.step([[10, 8, 8]], table=np.full((1, 6), -1)) == [0]
        assert rig.out.tensor.numpy()[0].any(axis=1).all()

    def test_a_fresh_request_forgets(self, rig: Rig) -> None:
        rig.step([[9, 4, 6]])
        assert rig.step([[6, 9, -1]], fresh=[1]) == [2]
        assert self.slots(rig) == [6, 9, -1, -1] and self.order(rig) == [2, 3, 0, 1]
        assert rig.step([[6, 9, -1]]) == [0]

    def test_a_row_that_changes_on_the_host_stays_until_the_request_is_fresh(self, rig: Rig) -> None:
        rig.step([[9, 4, 6]])
        before = rig.out.tensor.numpy().copy()
        rig.host_bits ^= 255
        rig.host.refill()
        rig.host.bits[:] = rig.host_bits
        rig.host.refill()
        assert rig.step([[9, 4, 6]]) == [0]
        np.testing.assert_array_equal(rig.out.tensor.numpy().view(np.uint8), before.view(np.uint8))
        assert rig.step([[9, 4, 6]], fresh=[5]) == [3]
        np.testing.assert_array_equal(rig.out.tensor.numpy().view(np.uint8), ~before.view(np.uint8))


def test_a_new_tensor(machine: Machine) -> None:
    rig = Rig(machine)
    rig.put(ids=rig.random_ids())
    untouched = bits_of(rig.out.tensor)
    rows = rig.call(out=None)
    rig.expect()
    machine.synchronize()
    assert rows.dtype == rig.resident.tensor.dtype and rows.shape == [2, 5, 3]
    np.testing.assert_array_equal(bits_of(rows), rig.rows)
    rig.check_state()
    rig.out.check(untouched)


def test_more_scratch_than_is_needed(machine: Machine) -> None:
    rig = Rig(machine)
    rig.put(ids=rig.random_ids())
    rig.call(scratch=paddle.to_tensor(np.full((2, 99), 7, np.int32), place=machine.place))
    rig.expect()
    rig.check()


def test_no_host_blocks(machine: Machine) -> None:
    """Then nobody asks what is at the address."""
    rig = Rig(machine)
    rig.put(ids=rig.random_ids())
    rig.call(num_host_blocks=0, host_pointer=0)
    machine.synchronize()
    assert not rig.out.tensor.numpy().any()


@pytest.mark.parametrize(("name", "shape", "message"), [
    ("token_ids", (2,), r"token_ids has shape \[2\]; \[batch, k\] is expected"),
    ("token_ids", (3, 5), r"token_ids has shape \[3, 5\]; \[batch, k\] = \[2, 5\] is expected"),
    ("token_ids", (2, 9), r"resident has 8 slots for a request, token_ids has k = 9 tokens; at least as many slots"),
    ("block_table", (6,), r"block_table has shape \[6\]; \[batch, blocks of a request\] is expected"),
    ("block_table", (1, 6), r"block_table has shape \[1, 6\]; .* = \[2, 6\] is expected"),
    ("slot_of_token", (2, 24, 1), r"slot_of_token has shape \[2, 24, 1\]; \[batch, max_tokens\] is expected"),
    ("slot_of_token", (1, 24), r"slot_of_token has shape \[1, 24\]; \[batch, max_tokens\] = \[2, 24\] is expected"),
    ("token_of_slot", (2, 7), r"token_of_slot has shape \[2, 7\]; \[batch, num_slots\] = \[2, 8\] is expected"),
    ("lru_order", (2, 9), r"lru_order has shape \[2, 9\]; \[batch, num_slots\] = \[2, 8\] is expected"),
    ("fresh", (3,), r"fresh has shape \[3\]; \[batch\] = \[2\] is expected"),
    ("scratch", (2, 32), r"scratch has shape \[2, 32\]; \[batch, num_slots \+ 5 \* k\] = \[2, 33\], or more columns"),
    ("scratch", (3, 33), r"scratch has shape \[3, 33\]; .* = \[2, 33\], or more columns, is expected"),
    ("scratch", (66,), r"scratch has shape \[66\]; \[batch, entries\] is expected"),
    ("lru_order", (0, 8), r"lru_order has shape \[0, 8\]; a tensor with elements is expected"),
])  # fmt: skip
def test_shapes_that_do_not_fit(machine: Machine, name: str, shape: tuple[int, ...], message: str) -> None:
    rig = Rig(machine)
    with pytest.raises(ValueError, match=f"^{message}"):
        long = {"out": paddle.to_tensor(np.zeros((2, 9, 3), "float32"), place=machine.place)} if shape == (2, 9) else {}
        rig.call(**{name: paddle.to_tensor(np.zeros(shape, np.int32), place=machine.place)}, **long)
    rig.check_state()


@pytest.mark.parametrize("name", ["token_ids", "block_table", *INTEGERS])
def test_integers_of_another_dtype(machine: Machine, name: str) -> None:
    rig = Rig(machine)
    wide = paddle.to_tensor(rig.arguments[name].numpy().astype(np.int64), place=machine.place)
    with pytest.raises(ValueError, match=rf"^{name} has dtype int64; int32 is expected"):
        rig.call(**{name: wide})
    rig.check_state()


@pytest.mark.parametrize(("changed", "message"), [
    ({"num_host_blocks": -1}, r"num_host_blocks = -1 must be in \[0, "),
    ({"num_host_blocks": 2**31}, r"num_host_blocks = 2147483648 must be in \[0, "),
    ({"block_size": 0}, r"block_size = 0 must be in \[1, "),
    ({"block_size": 5}, "block_stride_bytes = 48 must be at least 60, the bytes of one block"),
    ({"block_stride_bytes": 2**62}, r"num_host_blocks x block_stride_bytes: 8 x \d+ does not fit in 64 bits"),
    ({"host_pointer": 0}, "host_pointer = 0 must be the address of host memory"),
    ({"host_pointer": 16}, r"host_pointer: the 432 bytes \(num_host_blocks = 9 blocks\) at 16 are not all "),
])  # fmt: skip
def test_numbers_that_do_not_fit(machine: Machine, changed: dict[str, int], message: str) -> None:
    rig = Rig(machine)
    with pytest.raises(ValueError, match=f"^{message}"):
        rig.call(**changed)
    rig.check_state()


def test_rows_that_do_not_fit(machine: Machine) -> None:
    rig = Rig(machine)
    flat = paddle.to_tensor(np.zeros((2, 24), "float32"), place=machine.place)
    with pytest.raises(ValueError, match=r"^resident has shape \[2, 24\]; \[batch, num_slots, row elements\] is"):
        rig.call(resident=flat)
    with pytest.raises(ValueError, match=r"^out has shape \[2, 5, 4\]; \[batch, k, row elements\] = \[2, 5, 3\] is"):
        rig.call(out=paddle.to_tensor(np.zeros((2, 5, 4), "float32"), place=machine.place))
    with pytest.raises(ValueError, match=r"^out and resident differ in dtype \(int32, float32\); both must"):
        rig.call(out=paddle.to_tensor(np.zeros((2, 5, 3), "int32"), place=machine.place))
    with pytest.raises(ValueError, match=r"^out is not contiguous"):
        rig.call(out=paddle.to_tensor(np.zeros((2, 3, 5), "float32"), place=machine.place).transpose([0, 2, 1]))
    with pytest.raises(ValueError, match=r"^host_pointer, out, .*: two of the memories to be written overlap"):
        rig.call(out=rig.resident.tensor.as_strided([2, 5, 3], [15, 3, 1], 0))
    rig.check_state()


def test_memory_that_overlaps(machine: Machine) -> None:
    rig = Rig(machine)
    with pytest.raises(ValueError, match="two of the memories to be written overlap"):
        rig.call(lru_order=rig.arguments["token_of_slot"])
    if machine.on_cpu:  # else it is no host memory
        with pytest.raises(ValueError, match="two of the memories to be written overlap"):
            rig.call(host_pointer=rig.out.tensor.data_ptr(), num_host_blocks=1)
    rig.check_state()


def test_numbers_that_are_no_integers(machine: Machine) -> None:
    rig = Rig(machine)
    for name in ("host_pointer", "num_host_blocks", "block_stride_bytes", "block_size"):
        with pytest.raises(TypeError, match=rf"^{name} is 1.5 \(float\); an integer is expected"):
            rig.call(**{name: 1.5})
    rig.check_state()


@pytest.mark.parametrize(("ids", "table", "message"), [
    ([0, 23, 0, 0, 0], None, r"token_ids\[1, 1\] = 23 must be in \[0, 23\), the tokens of slot_of_token, and in"),
    ([0, 0, 7, 0, 0], [[0, 9, 0, 0, 0, 0]] * 2, r"block_table\[1, 1\] = 9 must be in \[0, 9\), the blocks at host_po"),
    ([0, 0, 0, 0, 8], [[0, 0]] * 2, r"token_ids\[1, 4\] = 8 must be in .* one of the 2 blocks of block_table"),
])  # fmt: skip
def test_what_the_check_mode_says(
    machine: Machine, ids: list[int], table: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(machine, max_tokens=23)
    rig.put(ids=[[-1] * 5, ids], table=table)
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    with pytest.raises(IndexError, match=f"^{message}"):
        rig.call()
    rig.check_state()
    monkeypatch.delenv("PADDLE_KV_CHECK")
    rig.step()


def test_the_check_mode_lets_padding_pass(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    rig = Rig(machine)
    rig.step([[-1, 0, 23, -1, 7], [5, 5, -9, 1, 0]], table=[[0, -1, 3, 4, 5, 8]] * 2)
    rig.step([[-1, -3, 23, -1, 7], [5, 5, -9, -(2**31), 12]], table=[[9, -1, 3, 4, 5, 8]] * 2)


def test_a_state_that_is_none_harms_nothing_else(machine: Machine) -> None:
    """Whatever its tensors hold: guards, host and lists are as they were."""
    rig = Rig(machine, k=8)
    for _ in range(30):
        rig.put(ids=rig.random_ids(), table=rig.random_table())
        for name in INTEGERS[:-1]:
            shape = rig.integers[name].values.shape
            few = rig.random.random(shape) < 0.5
            values = np.where(few, rig.random.integers(-3, 12, shape), rig.random.integers(-(2**31), 2**31, shape))
            if name == "fresh":  # or what the others hold is forgotten
                values[0] = 0
            rig.integers[name] = type(rig.ids)(machine, values)
        rig._collect()
        rig.call()
        machine.synchronize()
        for each in (rig.ids, rig.table):
            each.check(each.values)
        for each in rig.integers.values():
            each.check(None)
        for cache in (rig.out, rig.resident):
            cache.check(bits_of(cache.tensor))
        rig.host.check(rig.host_bits)


def test_a_program_is_refused() -> None:
    paddle.enable_static()
    try:
        with pytest.raises(NotImplementedError, match="gather_topk_rows carries memory addresses"):
            ops.gather_topk_rows(*[None] * 12)  # type: ignore[arg-type]
    finally:
        paddle.disable_static()
