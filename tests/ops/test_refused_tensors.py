"""Tensors that no operator takes, in the place of each of its arguments: what is said names the argument, nothing has
been written, and the process lives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from paddle_kv.ops import _check
from tests.machine import Machine

BLOCKS, HEADS, TOKENS, WIDTH = 3, 1, 2, 2
HOST_BLOCKS = 3


class Given:
    """Tensors that fit together; a test puts another one in the place of one of them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        cache = (BLOCKS, HEADS, TOKENS, WIDTH)
        self.host = machine.allocate_host(HOST_BLOCKS * HEADS * TOKENS * WIDTH * 4)
        self.host[:] = 7
        shapes = {
            "key": (1, HEADS, WIDTH), "value": (1, HEADS, WIDTH), "kv_c": (1, 1), "k_pe": (1, 1),
            "cache": cache, "key_cache": cache, "value_cache": cache, "kv_cache": (BLOCKS, TOKENS, 2),
            "k_scale_cache": cache[:3], "v_scale_cache": cache[:3], "scale": (1,), "chunk": (TOKENS, HEADS, WIDTH),
            "universal": (1, HEADS, 1, 1, TOKENS, WIDTH), "operational": (1, 1, 1, HEADS * TOKENS * WIDTH),
        }  # fmt: skip
        self.tensors = {name: self.tensor(np.ones(shape, np.float32)) for name, shape in shapes.items()}
        for name in ("key_codes", "value_codes"):
            self.tensors[name] = self.tensor(np.ones(cache, np.int8))
        for name, ids in (("slots", [1]), ("table", [[1]]), ("lengths", [0, 1]), ("pairs", [[0, 1]]), ("ids", [1])):
            self.tensors[name] = self.tensor(np.array(ids))
        for name, size in (("picked", 1), ("topk_table", 1), ("absent", 4), ("tokens", 2), ("order", 2), ("lists", 7)):
            self.tensors[name] = self.tensor(np.full((1, size), -1, np.int32))
        self.tensors["fresh"] = self.tensor(np.zeros(1, np.int32))
        self.tensors["resident"], self.tensors["rows"] = (self.tensor(np.ones((1, n, 2), np.float32)) for n in (2, 1))

    def tensor(self, array: np.ndarray) -> paddle.Tensor:
        return paddle.to_tensor(array, place=self.machine.place)

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def bits(self) -> dict[str, np.ndarray]:
        self.machine.synchronize()
        kept = {name: tensor.numpy() for name, tensor in self.tensors.items() if readable(tensor)}
        return {**kept, "host": self.host.copy()}


def readable(tensor: paddle.Tensor) -> bool:
    return bool(tensor.is_dense() and tensor._is_initialized())


def swap(given: Given, caches: Any, ids: Any = (1,)) -> tuple[Any, ...]:
    address = given.host.ctypes.data
    return caches, [address] if isinstance(caches, list) else address, HOST_BLOCKS, ids, [0], 0, 1


# Operator, the argument in its messages, the tensor that is replaced, the call.
CALLS: list[tuple[str, str, str, Callable[[Given], Any]]] = [
    (op, argument, name, call)
    for op, call, named in [
        (
            "reshape_and_cache",
            lambda g: ops.reshape_and_cache(g["key"], g["value"], g["key_cache"], g["value_cache"], g["slots"]),
            {"key": "key", "value": "value", "key_cache": "key_cache", "value_cache": "value_cache",
             "slot_mapping": "slots"},
        ),
        (
            "reshape_and_cache (quantised)",
            lambda g: ops.reshape_and_cache(g["key"], g["value"], g["key_codes"], g["value_codes"], g["slots"],
                                            kv_cache_dtype="int8", k_scale=g["scale"]),
            {"k_scale": "scale"},
        ),
        (
            "reshape_and_cache_dynamic",
            lambda g: ops.reshape_and_cache_dynamic(
                g["key"], g["value"], g["key_codes"], g["value_codes"], g["k_scale_cache"], g["v_scale_cache"],
                g["slots"], kv_cache_dtype="int8"),
            {"key_cache": "key_codes", "value_cache": "value_codes", "k_scale_cache": "k_scale_cache",
             "v_scale_cache": "v_scale_cache", "slot_mapping": "slots"},
        ),
        (
            "concat_and_cache_mla",
            lambda g: ops.concat_and_cache_mla(g["kv_c"], g["k_pe"], g["kv_cache"], g["slots"]),
            {"kv_c": "kv_c", "k_pe": "k_pe", "kv_cache": "kv_cache", "slot_mapping": "slots"},
        ),
        ("copy_blocks", lambda g: ops.copy_blocks(g["cache"], None, g["pairs"]),
         {"key_caches": "cache", "block_mapping": "pairs"}),
        ("copy_blocks of a list", lambda g: ops.copy_blocks([g["key_cache"]], [g["cache"]], [(0, 1)]),
         {r"value_caches\[0\]": "cache"}),
        ("copy_single_block", lambda g: ops.copy_single_block(g["key_cache"], g["cache"], 0, 1),
         {"value_caches": "cache"}),
        ("swap_blocks", lambda g: ops.swap_blocks([g["key_cache"]], [g["cache"]], g["pairs"]),
         {r"key_caches\[0\]": "key_cache", r"value_caches\[0\]": "cache", "block_mapping": "pairs"}),
        ("gather_cache", lambda g: ops.gather_cache(g["cache"], g["table"], g["lengths"], total_tokens=1),
         {"cache": "cache", "block_table": "table", "cu_seq_lens": "lengths"}),
        ("gather_cache (quantised)",
         lambda g: ops.gather_cache(g["key_codes"], g["table"], g["lengths"], total_tokens=1, kv_cache_dtype="int8",
                                    scale=g["scale"]),
         {"scale": "scale"}),
        ("scatter_cache", lambda g: ops.scatter_cache(g["key"], g["cache"], g["table"], g["lengths"]),
         {"tokens": "key", "cache": "cache", "block_table": "table", "cu_seq_lens": "lengths"}),
        ("convert_fp8", lambda g: ops.convert_fp8(g["key"], to="fp8", scale=g["scale"]),
         {"source": "key", "scale": "scale"}),
        ("convert_layout",
         lambda g: ops.convert_layout(g["cache"], kind="key", source_layout="HND", target_layout="NHD"),
         {"cache": "cache"}),
        ("swap_cache_per_layer", lambda g: ops.swap_cache_per_layer(*swap(g, g["cache"], g["ids"])),
         {"cache_gpu": "cache", "swap_block_ids_gpu": "ids"}),
        ("swap_cache_all_layers", lambda g: ops.swap_cache_all_layers(*swap(g, [g["cache"]], g["ids"])),
         {r"cache_gpu_tensors\[0\]": "cache", "swap_block_ids_gpu": "ids"}),
        ("swap_cache_layout",
         lambda g: ops.swap_cache_layout([g["cache"]], *swap(g, g["cache"], g["ids"])[1:2], g["cache"].shape, g["ids"],
                                         [0], 0, 0),
         {r"cache_gpu_tensors\[0\]": "cache", "gpu_block_ids": "ids"}),
        ("transfer_blocks", lambda g: ops.transfer_blocks(g["cache"], g["key_cache"], g["pairs"]),
         {"source": "cache", "target": "key_cache", "block_mapping": "pairs"}),
        ("universal_from_cache",
         lambda g: ops.universal_from_cache([g["cache"]], None, g["ids"], out=g["universal"]),
         {r"key_caches\[0\]": "cache", "block_ids": "ids", "out": "universal"}),
        ("cache_from_universal", lambda g: ops.cache_from_universal(g["universal"], [g["cache"]], None, g["ids"]),
         {"universal": "universal", r"key_caches\[0\]": "cache", "block_ids": "ids"}),
        ("universal_from_block", lambda g: ops.universal_from_block([g["chunk"]], num_layers=1, num_outer=1),
         {r"chunks\[0\]": "chunk"}),
        ("block_from_universal", lambda g: ops.block_from_universal(g["universal"], [g["chunk"]]),
         {"universal": "universal", r"chunks\[0\]": "chunk"}),
        ("operational_from_block", lambda g: ops.operational_from_block([g["chunk"]], num_layers=1, num_outer=1),
         {r"chunks\[0\]": "chunk"}),
        ("block_from_operational", lambda g: ops.block_from_operational(g["operational"], [g["chunk"]]),
         {"operational": "operational", r"chunks\[0\]": "chunk"}),
        ("reshard_universal", lambda g: ops.reshard_universal([g["universal"]], 1), {r"parts\[0\]": "universal"}),
        ("gather_topk_rows",
         lambda g: ops.gather_topk_rows(g["picked"], g["topk_table"], g.host.ctypes.data, HOST_BLOCKS, 16, 2,
                                        g["resident"], g["absent"], g["tokens"], g["order"], g["fresh"], g["lists"],
                                        out=g["rows"]),
         {"token_ids": "picked", "block_table": "topk_table", "resident": "resident", "slot_of_token": "absent",
          "token_of_slot": "tokens", "lru_order": "order", "fresh": "fresh", "scratch": "lists", "out": "rows"}),
    ]
    for argument, name in named.items()
]  # fmt: skip
every_argument = pytest.mark.parametrize(("op", "argument", "name", "call"), CALLS, ids=itertools.count())


@pytest.fixture(params=[False, True], ids=["plain", "debug"])
def debug(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug mode looks at slots and blocks before the operator does."""
    if request.param:
        monkeypatch.setenv("PADDLE_KV_CHECK", "1")
        monkeypatch.setattr(_check, "access_checks", [lambda address, ids, writing, queue: None])


def sparse(given: Given, name: str) -> paddle.Tensor:
    tensor = given[name]
    values = given.tensor(np.ones(1, np.int64 if tensor.dtype == paddle.int64 else np.float32))
    # On the CPU: to make one, Paddle 2.6 computes on its device.
    return paddle.sparse.sparse_coo_tensor([[0]] * tensor.ndim, values, tensor.shape, place=paddle.CPUPlace())


def released(given: Given, name: str) -> paddle.Tensor:
    given[name]._clear_data()
    return given[name]


def refuses(given: Given, call: Callable[[Given], Any], message: str) -> None:
    before = given.bits()
    with pytest.raises(ValueError, match=f"^{message}"):
        call(given)
    for name, bits in given.bits().items():
        np.testing.assert_array_equal(bits, before[name])


@every_argument
def test_the_calls_work_with_nothing_replaced(
    machine: Machine, op: str, argument: str, name: str, call: Callable[[Given], Any], debug: None
) -> None:
    call(Given(machine))


@every_argument
@pytest.mark.parametrize("wrong", [sparse, released], ids=["sparse", "released"])
def test_refused(
    machine: Machine,
    op: str,
    argument: str,
    name: str,
    call: Callable[[Given], Any],
    wrong: Callable[[Given, str], paddle.Tensor],
    debug: None,
) -> None:
    given = Given(machine)
    given.tensors[name] = wrong(given, name)
    refuses(given, call, f"{argument} (is not a dense tensor|holds no memory); ")


def misaligned(given: Given, name: str) -> paddle.Tensor:
    """The same shape, one byte behind a multiple of the bytes of an element."""
    tensor = given[name]
    strides = np.ones(tensor.shape)[None].strides[1:]
    memory = paddle.to_tensor(np.ones(tensor.size + 1, tensor.numpy().dtype), place=tensor.place)
    return memory.as_strided(tensor.shape, [stride // 8 for stride in strides], 1)


WITH_ELEMENTS = ("reshape_and_cache", "concat_and_cache_mla", "gather", "scatter_cache", "convert")


@pytest.mark.parametrize(
    ("argument", "name", "call"),
    [each[1:] for each in CALLS if each[0].startswith(WITH_ELEMENTS) and "codes" not in each[2]],
)
def test_memory_that_is_not_aligned(
    machine: Machine, argument: str, name: str, call: Callable[[Given], Any], debug: None
) -> None:
    given = Given(machine)
    given.tensors[name] = misaligned(given, name)
    address, size = given[name].data_ptr(), given[name].element_size()
    assert address % size == 1
    refuses(given, call, f"{argument} lies at address {address}; a multiple of {size}, the bytes of an element, is")


# Where Paddle knows that a tensor is written in place it refuses a leaf that needs a gradient: behind the operator.
IN_PLACE = {"reshape_and_cache", "reshape_and_cache_dynamic", "concat_and_cache_mla", "copy_single_block",
            "swap_blocks", "scatter_cache"}  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "name", "call"), [each[1:] for each in CALLS if each[0] in IN_PLACE and "cache" in each[1]]
)
def test_a_leaf_that_needs_a_gradient(machine: Machine, argument: str, name: str, call: Callable[[Given], Any]) -> None:
    given = Given(machine)
    given[name].stop_gradient = False
    refuses(given, call, f"{argument} is a leaf that needs a gradient; a tensor with stop_gradient=True is expected")


def test_a_cache_that_is_computed_from_such_a_leaf(machine: Machine) -> None:
    """Paddle lets it be written, and so do the operators."""
    given = Given(machine)
    leaf = given["cache"]
    leaf.stop_gradient = False
    cache = leaf * 2
    ops.scatter_cache(given["key"], cache, given["table"], given["lengths"])
    assert cache.numpy()[1, 0, 0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("slots", "layout", "message"),
    [
        (np.array([[1]]), "HND", r"slot_mapping has shape \[1, 1\]; \[tokens\] is expected"),
        (np.array([1.0]), "HND", "slot_mapping has dtype float64; int32 or int64 is expected"),
        (np.array([1]), "packed", r"key_cache has shape \[3, 1, 2, 2\]; .*packed keys, is expected"),
        (np.array([1]), "NDH", 'layout = "NDH" must be'),
    ],
)
def test_slots_and_shapes_in_the_debug_mode(
    machine: Machine, slots: np.ndarray, layout: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said is what the operator says without it."""
    monkeypatch.setattr(_check, "access_checks", [lambda address, ids, writing, queue: None])
    for mode in "01":
        monkeypatch.setenv("PADDLE_KV_CHECK", mode)
        given = Given(machine)
        given.tensors["slots"] = given.tensor(slots)
        tokens = [given[name] for name in ("key", "value", "key_cache", "value_cache", "slots")]
        refuses(given, lambda g, tokens=tokens: ops.reshape_and_cache(*tokens, layout=layout), message)


def test_ids_are_not_read_back_while_a_graph_is_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would break the capture. Ids on the host are looked at all the same."""
    seen: list[list[int]] = []
    monkeypatch.setattr(_check, "access_checks", [lambda address, ids, writing, queue: seen.append(list(ids))])
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    given = Given(machine)
    calls = {
        "reshape_and_cache": lambda: ops.reshape_and_cache(
            *(given[name] for name in ("key", "value", "key_cache", "value_cache", "slots"))
        ),
        "copy_blocks": lambda: ops.copy_blocks(given["cache"], None, given["pairs"]),
    }
    for op, call in calls.items():
        seen.clear()
        call()
        assert seen
        with monkeypatch.context() as patch:
            patch.setattr(_check.streams, "is_capturing", lambda handle: True)
            patch.setattr(_check.devices, "on_gpu", lambda tensor: True)
            for name in ("numpy", "tolist"):
                patch.setattr(paddle.Tensor, name, lambda tensor: pytest.fail("ids are read"))
            seen.clear()
            with pytest.warns(RuntimeWarning, match=f"^{op}: PADDLE_KV_CHECK=1 does not look at .* captured") as said:
                call()
            assert not seen and said[0].filename == __file__
            ops.copy_blocks(given["cache"], None, [(0, 2)])
            assert seen == [[0], [2]]


def test_more_tokens_than_there_is_memory_for(machine: Machine) -> None:
    given = Given(machine)
    try:
        with pytest.raises(MemoryError, match=f"^total_tokens = {2**50}: "):
            ops.gather_cache(given["cache"], given["table"], given["lengths"], total_tokens=2**50)
    except OSError as error:
        if "no kernel image" not in str(error):
            raise
        pytest.skip("Paddle 2.6 has no kernels for this GPU, and reports that instead of the lack of memory")


@pytest.mark.parametrize(("op", "shape"), [("universal", [1, 1, 0, 1, 2, 2]), ("universal", [1, 1, 1, 0, 2, 2]),
                                           ("operational", [1, 0, 1, 4])])  # fmt: skip
def test_a_tensor_without_layers(machine: Machine, op: str, shape: list[int]) -> None:
    given = Given(machine)
    empty = given.tensor(np.zeros(shape, np.float32))
    call = lambda g: getattr(ops, f"block_from_{op}")(empty, [g["chunk"]])  # noqa: E731
    refuses(given, call, rf"{op} has shape \[1, .*\]; at least one layer, and one outer of each, are expected")
