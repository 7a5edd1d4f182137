"""ResidentRows: the tensors that it makes, and calls with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import HostPool, KVCacheSpec, ResidentRows, ops
from tests.reference.topk import State, gathered

STATE = ("slot_of_token", "token_of_slot", "lru_order", "fresh")


def make(**changed: Any) -> ResidentRows:
    given = {"batch": 2, "top_k": 3, "num_slots": 5, "row_elements": 4, "dtype": "float32", "max_tokens": 20,
             "device": "cpu", **changed}  # fmt: skip
    batch, top_k, num_slots = (given.pop(name) for name in ("batch", "top_k", "num_slots"))
    return ResidentRows(batch, top_k, num_slots, **given)


def on_cpu(values: Any) -> paddle.Tensor:
    return paddle.to_tensor(np.array(values, np.int32), place=paddle.CPUPlace())


def check(rows: ResidentRows, state: State) -> None:
    for name in STATE:
        np.testing.assert_array_equal(getattr(rows, name).numpy(), getattr(state, name))
    held = np.ascontiguousarray(rows.resident.numpy()).view(np.uint8)
    np.testing.assert_array_equal(held, state.resident)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int8"])
def test_it_begins_empty(dtype: str) -> None:
    rows = make(dtype=dtype)
    assert rows.resident.shape == [2, 5, 4] and rows.resident.dtype == getattr(paddle, dtype)
    item = rows.resident.element_size()
    check(rows, State.empty(np.zeros((2, 5, 4 * item), np.uint8), 20))


def test_all_of_it_lies_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    places, make_tensor = [], paddle.to_tensor

    def to_tensor(array: Any, place: Any = None) -> paddle.Tensor:
        places.append(place)
        return make_tensor(array, place=place)

    monkeypatch.setattr(paddle, "to_tensor", to_tensor)
    make(device="cpu")
    assert len(places) == 7
    assert {str(place) for place in places} == {str(paddle.CPUPlace())}


@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
def test_rows_of_a_host_pool(layout: Any) -> None:
    """Of an MLA cache, in the layouts whose blocks lie together and apart."""
    spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", latent=True)
    pool = HostPool(spec, 7, layout=layout)
    name = spec.tensor_names[0]
    random = np.random.default_rng(1)
    layers = []
    for layer in range(2):
        for block in range(7):
            pool.view(name, layer, block)[...] = random.random((4, 4))
        layers.append(np.stack([pool.view(name, layer, block) for block in range(7)]).copy())
    rows = [make() for _ in layers]
    states = [State.empty(np.zeros((2, 5, 16), np.uint8), 20) for _ in layers]
    table = random.integers(0, 7, (2, 5))
    out = paddle.zeros([2, 3, 4])
    for _ in range(30):
        for layer in range(2):
            ids = random.integers(-1, 20, (2, 3))
            where = (pool.pointer(name, layer), pool.num_blocks, pool.stride_bytes(name), spec.block_size)
            assert rows[layer].gather(on_cpu(ids), on_cpu(table), *where, out=out) is out
            expected, _ = gathered(states[layer], ids, table, layers[layer].view(np.uint8))
            np.testing.assert_array_equal(out.numpy().view(np.uint8), expected)
            check(rows[layer], states[layer])
    pool.close()


def test_the_state_of_a_request_has_the_size_that_is_told() -> None:
    rows = make(batch=7, top_k=3, num_slots=5, max_tokens=20)
    held = (rows.slot_of_token, rows.token_of_slot, rows.lru_order, rows._scratch)
    assert sum(tensor.numpy().nbytes for tensor in held) == 7 * 4 * (20 + 3 * 5 + 5 * 3)


def test_the_work_goes_to_the_stream_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []
    for name in ("gather_topk_rows", "vectorized_copy"):
        monkeypatch.setattr(ops, name, lambda *given, stream, out=None: streams.append(stream))
    rows = make()
    rows.gather(on_cpu([[1, 2, 3]] * 2), on_cpu([[0]] * 2), 0, 0, 64, 4, stream=5)
    rows.reset([1], stream=6)
    assert streams == [5, 6]


def test_reset() -> None:
    rows = make(batch=3)
    host = np.arange(80, dtype="float32").reshape(5, 4, 4)
    ids, table = [[1, 2, 3]] * 3, np.tile(np.arange(5), (3, 1))
    state = State.empty(np.zeros((3, 5, 16), np.uint8), 20)

    def step(*reset: int) -> list[int]:
        state.fresh[list(reset)] = 1
        rows.reset(list(reset))
        assert rows.fresh.numpy().tolist() == state.fresh.tolist()
        rows.gather(on_cpu(ids), on_cpu(table), host.ctypes.data, 5, 64, 4)
        _, misses = gathered(state, np.array(ids), table, host.view(np.uint8))
        check(rows, state)
        return misses

    assert step() == [3, 3, 3]
    assert step(2, 0) == [3, 0, 3]
    assert step() == [0, 0, 0]
    rows.reset(np.array([1]))
    assert rows.fresh.numpy().tolist() == [0, 1, 0]


def test_resets_that_are_refused() -> None:
    rows = make()
    for wrong, message in (([2], r"requests\[0\] = 2 must be in \[0, 2\)"), ([0, -1], r"requests\[1\] = -1 must be")):
        with pytest.raises(IndexError, match=message):
            rows.reset(wrong)
    with pytest.raises(ValueError, match=r"requests = \[1, 1\] names a row of the batch twice"):
        rows.reset([1, 1])
    with pytest.raises(TypeError, match="requests"):
        rows.reset(None)  # type: ignore[arg-type]
    assert not rows.fresh.numpy().any()


@pytest.mark.parametrize("name", ["batch", "top_k", "num_slots", "row_elements", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None])
def test_sizes_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} = {value} must be an integer of at least 1"):
        make(**{name: value})


def test_a_dtype_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        make(dtype="nonsense")


def test_fewer_slots_than_tokens() -> None:
    with pytest.raises(ValueError, match=r"^num_slots = 2 must be at least top_k = 3"):
        make(num_slots=2)
    assert make(num_slots=3).resident.shape[1] == 3


def test_a_list_of_more_tokens_than_was_said() -> None:
    rows = make(top_k=2)
    with pytest.raises(ValueError, match="scratch has shape"):
        rows.gather(on_cpu([[1, 2, 3]] * 2), on_cpu([[0]] * 2), 0, 0, 64, 4)
