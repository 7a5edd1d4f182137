"""Eager calls go straight into the library, and nothing else can be seen of it; programs keep what is registered."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from paddle_kv.ops import _arguments, _library
from tests.fuzz.both_ways import TAKE_VIEWS, equal_bits, registered_only, said
from tests.fuzz.calls import FAMILIES
from tests.fuzz.ground import Ground
from tests.fuzz.mutate import STRANGE
from tests.machine import Machine
from tests.ops.test_refused_tensors import Given, every_argument, released, sparse

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = sorted(_library.operators)


def signature(op: str) -> list[str]:
    inputs, attributes, _ = _library._op_info(_library.PREFIX + op)
    return [*inputs, *attributes]


def test_each_registered_operator_has_one() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "custom_ops").rglob("*.cc"))
    assert re.findall(r"^PD_BUILD_STATIC_OP\(paddle_kv_(\w+)\)", sources, re.M) != []
    assert set(OPERATORS) == set(re.findall(r"^PD_BUILD_STATIC_OP\(paddle_kv_(\w+)\)", sources, re.M))


def test_every_public_operator_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"{arguments[0]} went through Paddle")

    monkeypatch.setattr(_library, "_run", refuse)
    ground = Ground(np.random.default_rng(1))
    for family in FAMILIES:
        for _ in range(12):
            call = family(ground)
            getattr(ops, call.op)(*call.arguments.values(), **call.options)
    ops.has_memcpy_batch_async()


def put_none(given: Given, name: str) -> None:
    return None


def put_array(given: Given, name: str) -> np.ndarray:
    return given[name].numpy()


def put_empty_list(given: Given, name: str) -> list[Any]:
    return []


def put_unallocated(given: Given, name: str) -> paddle.Tensor:
    return paddle.Tensor()


def put_transposed(given: Given, name: str) -> paddle.Tensor:
    return paddle.concat([given[name]] * 2, axis=-1)[..., ::2]


def put_without_elements(given: Given, name: str) -> paddle.Tensor:
    return given.tensor(np.zeros((0, *given[name].shape[1:]), given[name].numpy().dtype))


def put_float64(given: Given, name: str) -> paddle.Tensor:
    return given.tensor(given[name].numpy().astype(np.float64))


def put_another_rank(given: Given, name: str) -> paddle.Tensor:
    return given[name][0] if given[name].ndim == 6 else paddle.unsqueeze(given[name], 0)  # 2.6 makes none above 6


def put_complex(given: Given, name: str) -> paddle.Tensor:
    return given.tensor(given[name].numpy().astype(np.complex64))


def put_leaf(given: Given, name: str) -> paddle.Tensor:
    given[name].stop_gradient = False
    return given[name]


def put_parameter(given: Given, name: str) -> paddle.Tensor:
    return paddle.create_parameter(given[name].shape, "float32")


def put_same(given: Given, name: str) -> paddle.Tensor:
    return given[name]


IN_ITS_PLACE: list[Callable[[Given, str], Any]] = [
    put_same, put_none, put_array, put_empty_list, put_unallocated, put_transposed, put_without_elements, put_float64,
    put_another_rank, put_complex, put_leaf, put_parameter, sparse, released,
]  # fmt: skip


@every_argument
def test_both_ways_refuse_and_accept_alike(
    machine: Machine, op: str, argument: str, name: str, call: Callable[[Given], Any]
) -> None:
    def attempt(put: Callable[[Given, str], Any]) -> tuple[str, str, Any, dict[str, np.ndarray], list[int]]:
        given = Given(machine)
        replaced = put(given, name)
        tensors = dict(given.tensors)
        given.tensors[name] = replaced
        error, text, result = said(lambda: call(given))
        given.tensors = tensors
        versions = [tensor.inplace_version for tensor in tensors.values() if tensor._is_initialized()]
        return error, text, shown(result), given.bits(), versions

    paddle.seed(7)
    for put in IN_ITS_PLACE:
        straight = attempt(put)
        paddle.seed(7)
        with registered_only():
            registered = attempt(put)
        paddle.seed(7)
        if put is put_transposed and op.partition(" ")[0] in TAKE_VIEWS and re.search("cache|scale", argument):
            # What is registered would get a copy. No kernel takes such a view, but for scales.
            assert registered[0] == "ValueError" and "is not contiguous" in registered[1]
            if "scale" in argument:
                continue
            assert straight[0] == "ValueError"
        else:
            assert straight[:3] == registered[:3], put.__name__
        assert equal_bits(straight[3], registered[3]), put.__name__
        assert straight[4] == registered[4], put.__name__


def shown(result: Any) -> Any:
    if isinstance(result, paddle.Tensor):
        about = (result.dtype, list(result.shape), str(result.place), result.stop_gradient, result.is_leaf)
        return (*about, result.inplace_version, result.numpy().tolist())
    return [shown(one) for one in result] if isinstance(result, (list, tuple)) else result


@pytest.mark.parametrize("text", ["\ud800", "H\0", "", "é", "HND "])
def test_texts_that_name_no_layout(machine: Machine, text: str) -> None:
    def call() -> Any:
        given = Given(machine)
        tokens = [given[name] for name in ("key", "value", "key_cache", "value_cache", "slots")]
        return ops.reshape_and_cache(*tokens, layout=text)  # type: ignore[arg-type]

    straight = said(call)
    with registered_only():
        assert said(call) == straight
    assert straight[0] == "ValueError"


def test_the_largest_and_the_smallest_integers(machine: Machine) -> None:
    for number in (2**63 - 1, -(2**63), 2**63, -(2**63) - 1):
        for call in (
            lambda given, n=number: ops.copy_single_block(given["cache"], None, n, 0),
            lambda given, n=number: ops.swap_cache_per_layer(given["cache"], 1 << 20, n, [0], [n], 0, 0),
            lambda given, n=number: ops.gather_cache(given["cache"], given["table"], given["lengths"], total_tokens=n),
        ):
            straight = said(lambda call=call: call(Given(machine)))
            with registered_only():
                assert said(lambda call=call: call(Given(machine))) == straight
            assert straight[0] in ("ValueError", "IndexError")


def insert(key: paddle.Tensor, caches: list[paddle.Tensor], slots: paddle.Tensor) -> paddle.Tensor:
    cache, _ = ops.reshape_and_cache(key, key, caches[0], caches[1], slots)
    return cache * 1


def test_a_program_has_the_registered_operator(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = []
    monkeypatch.setitem(_library.operators, "reshape_and_cache", lambda *arguments: straight.append(arguments))
    given = Given(machine)
    caches = [given["key_cache"], given["value_cache"]]
    programs = [paddle.jit.to_static(insert, full_graph=True)]
    if paddle.__version__ >= "3":  # of caches that are no variables of the program, as those of a model

        def closed(key: paddle.Tensor, ignored: Any, slots: paddle.Tensor) -> paddle.Tensor:
            return insert(key, caches, slots)

        programs.append(paddle.jit.to_static(closed, full_graph=True))
    with paddle.no_grad():
        for filling, program in enumerate(programs * 2, 3):
            key = np.full(given["key"].shape, filling, np.float32)  # not a product: a GPU may be unknown to Paddle 2.6
            program(given.tensor(key), caches, given["slots"])
            assert caches[0].numpy()[0, 0, 1].tolist() == [filling, filling]
    assert straight == []


def test_a_static_program_has_the_registered_operator(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "operators", None)  # asking it would fail
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            cache = paddle.static.data("cache", [3, 1, 2, 2], "float32")
            table, lengths = (paddle.static.data(name, shape, "int64") for name, shape in (("t", [1, 1]), ("l", [2])))
            rows = ops.gather_cache(cache, table, lengths, total_tokens=2)
            given = {"cache": np.arange(12, dtype="float32").reshape(3, 1, 2, 2), "t": [[2]], "l": [0, 2]}
            feed = {name: np.asarray(value) for name, value in given.items()}
            [found] = paddle.static.Executor(paddle.CPUPlace()).run(feed=feed, fetch_list=[rows])
    finally:
        paddle.disable_static()
    assert found.ravel().tolist() == [8.0, 9.0, 10.0, 11.0]


@pytest.mark.parametrize("op", OPERATORS)
def test_nonsense_is_refused_before_anything_runs(op: str) -> None:
    """One argument of each call is of no kind that an operator takes; the others are anything."""
    random = np.random.default_rng(OPERATORS.index(op))
    count = len(signature(op))
    anything = [*STRANGE, [], (), [1], [True], [2**64], [[1]], "HND", 0, False, np.int64(1), np.zeros(3), type, op,
                paddle.zeros([2, 2]), paddle.zeros([0]), paddle.Tensor(), [paddle.zeros([1])], [paddle.Tensor()],
                paddle.zeros([2, 2]).transpose([1, 0]), paddle.zeros([3, 4])[:, ::2]]  # fmt: skip
    run = _library.operators[op]
    for _ in range(60):
        arguments = [anything[int(random.integers(len(anything)))] for _ in range(count)]
        if count:
            arguments[int(random.integers(count))] = object()
            with pytest.raises((TypeError, ValueError, OverflowError)):
                run(*arguments)
        for wrong in {0, count - 1, count + 1} - {count, -1}:
            with pytest.raises(TypeError, match=rf"^{op} takes {count} arguments; {wrong} were given$"):
                run(*(arguments * 2 + [None])[:wrong])
    with pytest.raises(TypeError):
        run(**{"x": 1})


def test_what_is_refused_is_named() -> None:
    run = _library.operators["gather_cache"]
    cache, ids, lengths = paddle.zeros([2, 1, 2, 2]), paddle.zeros([1, 1], "int64"), paddle.zeros([2], "int64")
    sound: list[Any] = [cache, ids, lengths, None, None, 1, "HND", "auto", "", 1.0, "HND", 0]
    assert run(*sound)[0].shape == [1, 1, 2]
    for position, value, said_of_it in [
        (0, None, "argument 1 of gather_cache is NoneType; a paddle.Tensor is expected"),
        (3, [cache], "argument 4 of gather_cache is list; a paddle.Tensor is expected"),
        (5, True, "argument 6 of gather_cache is bool; an integer is expected"),
        (5, 1.0, "argument 6 of gather_cache is float; an integer is expected"),
        (6, b"HND", "argument 7 of gather_cache is bytes; a string is expected"),
        (9, 1, "argument 10 of gather_cache is int; a float is expected"),
    ]:
        with pytest.raises(TypeError, match=f"^{said_of_it}$"):
            run(*sound[:position], value, *sound[position + 1 :])
    with pytest.raises(ValueError, match="block_table is not contiguous"):
        run(cache, paddle.zeros([1, 4], "int64")[:, ::2], *sound[2:])
    with pytest.raises(ValueError, match="cu_seq_lens is not contiguous"):
        run(cache, ids, paddle.zeros([4], "int64")[::2], *sound[3:])
    with pytest.raises(ValueError, match="scale is not contiguous"):
        codes = paddle.zeros([2, 2, 2, 2], "int8")
        run(codes, ids, lengths, paddle.ones([4])[::2], None, 1, "HND", "int8", "float32", 1.0, "HND", 0)
    with pytest.raises(ValueError, match="out is not contiguous"):
        into = [paddle.zeros([1, 1, 4])[..., ::2], cache, ids, lengths, None, None, "HND", "auto", 1.0, "HND", 0]
        _library.operators["gather_cache_into"](*into)
    with pytest.raises(ValueError, match=r"^argument 1 of convert_layout is not contiguous; "):
        _library.operators["convert_layout"](cache.transpose([1, 0, 2, 3])[:, ::2], "key", "HND", "NHD", 0)
    with pytest.raises(OverflowError):
        run(*sound[:5], 2**63, *sound[6:])
    swap = _library.operators["swap_blocks"]
    with pytest.raises(ValueError, match=r"^argument 1 of swap_blocks is empty; a list of paddle.Tensor is expected"):
        swap([], None, [], [], 0, 0)
    with pytest.raises(TypeError, match=r"^argument 3 of swap_blocks is bool; a list of integers is expected"):
        swap([cache], None, [True], [], 0, 0)
    with pytest.raises(TypeError, match=r"^argument 2 of reshape_and_cache is dict; "):
        _library.operators["reshape_and_cache"](cache, {}, *[None] * 15)
    with pytest.raises(TypeError, match=r"^argument 6 of universal_from_cache is int; a bool is expected$"):
        _library.operators["universal_from_cache"]([cache], None, cache, [], 0, 0, 0)


@pytest.mark.parametrize("fact", sorted(_library.facts))
def test_facts_of_nonsense(fact: str) -> None:
    if fact == "checks":
        return
    sparse_one = paddle.sparse.sparse_coo_tensor([[0]], [1.0], [3])
    for value in [*STRANGE, [], type, paddle, np.zeros(2), paddle.Tensor(), sparse_one]:
        assert _library.facts[fact](value) is (False if fact == "is_plain" else None)
    for wrong in ((), (1, 2)):
        with pytest.raises(TypeError):
            _library.facts[fact](*wrong)


def test_facts_are_what_paddle_says(machine: Machine) -> None:
    """Of tensors of every dtype and any strides."""
    base = [np.arange(24).reshape(2, 3, 4).astype(dtype) for dtype in ("bool", "uint8", "int16", "int64", "float64")]
    tensors = [paddle.to_tensor(array, place=machine.place) for array in base]
    tensors += [tensor.astype(dtype) for tensor in tensors[-1:] for dtype in ("float16", "bfloat16", "complex64")]
    tensors += [
        view for t in tensors for view in (t[1:], t[:, 1:2], t.transpose([2, 0, 1]), t[0, 0, 0], t[:0], t[:, ::2])
    ]
    where = -1 if machine.on_cpu else 0
    for tensor in tensors:
        plain = bool(tensor._is_initialized() and tensor.is_dense() and tensor.is_contiguous())
        assert _library.facts["is_plain"](tensor) is plain
        assert _library.facts["device"](tensor) == (where if tensor._is_initialized() else None)
        numbers = _library.facts["strided"](tensor)
        if numbers is None:
            assert 0 in tensor.shape or tensor.ndim == 0
        elif numbers[1] in _arguments._NUMBERS:
            with registered_only():
                assert _arguments.strided(tensor, "tensor") == numbers
        else:
            with registered_only(), pytest.raises(TypeError, match="which no operator takes"):
                _arguments.strided(tensor, "tensor")


def test_the_debug_mode_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False), ("10", False)):
        monkeypatch.setenv("PADDLE_KV_CHECK", value)
        assert _library.facts["checks"]() is expected
    monkeypatch.delenv("PADDLE_KV_CHECK")
    assert _library.facts["checks"]() is False


def test_other_threads_run_during_a_call(machine: Machine) -> None:
    """Nobody else asks for the interpreter for an hour: who gets it was given it by the operator."""
    caches = [paddle.zeros([2, 1, 1, 1 << 20], "uint8") for _ in range(2)]
    started, ended = threading.Event(), []

    def work() -> None:
        started.set()
        for _ in range(300):
            ops.copy_blocks(caches, None, [(0, 1)])
        ended.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        before_the_end = not ended
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert before_the_end and ended


def test_a_library_of_earlier_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_library._python_functions()[0]) == len(OPERATORS)
    monkeypatch.setattr(ctypes, "PyDLL", lambda path: object())
    assert _library._python_functions() == ({}, {})


@pytest.mark.parametrize("again", [False, True])
def test_two_copies_of_the_library(tmp_path: Path, again: bool) -> None:
    """A package that is installed and one that is built in place. The same file again is no second copy."""
    library = _library.LIBRARY if again else shutil.copy(_library.LIBRARY, tmp_path)
    program = (
        "import zlib, sys, paddle\nfrom paddle.utils import cpp_extension\n"
        f"cpp_extension.load_op_meta_info_and_register_op({str(library)!r})\n"
        "try:\n    from paddle_kv import ops\n    print('loaded')\nexcept ImportError as error:\n    print(error)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    refused = f"another copy of the operators is loaded already ({library}), and Paddle takes one; "
    assert ran.returncode == 0 and ran.stdout.startswith("loaded" if again else refused), (ran.stdout, ran.stderr)


def test_the_interpreter_ends_while_a_thread_calls() -> None:
    program = (
        "import zlib, threading, time, paddle\npaddle.set_device('cpu')\nfrom paddle_kv import ops\n"
        "cache = paddle.zeros([4, 1, 1, 1 << 16], 'uint8')\nrunning = threading.Event()\n"
        "def work():\n"
        "    while True:\n        ops.copy_blocks(cache, None, [(0, 1)]); running.set()\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "running.wait()\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    for _ in range(2):
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert ran.returncode == 0, ran.stderr
