"""The same call by the two ways to an operator: straight into the library, and through Paddle's registered operator."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import paddle

from paddle_kv import ops
from paddle_kv.ops import _arguments, _check, _library
from tests.fuzz.calls import bits_of_result
from tests.fuzz.one_call import call_of

# Operators that take caches with strides. What is registered would get a copy of such a cache, and they say so.
TAKE_VIEWS = {"reshape_and_cache", "reshape_and_cache_dynamic", "concat_and_cache_mla", "gather_cache", "scatter_cache"}
ADDRESS = re.compile(r"0x[0-9a-f]+|\b\d{12,}\b")


@contextlib.contextmanager
def registered_only() -> Iterator[None]:
    """As with a Paddle that does not lend what the straight way needs."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(_library, "operators", {}))
        for fact in ("_is_plain", "_device", "_strided"):
            patches.enter_context(mock.patch.object(_arguments, fact, _arguments._nothing))
        patches.enter_context(mock.patch.object(_check, "enabled", _check._in_environment))
        yield


def without_addresses(text: str) -> str:
    return ADDRESS.sub("ADDRESS", text)


def said(call: Callable[[], Any]) -> tuple[str, str, Any]:
    """Type and message of what a call raises, without addresses, and what it returns."""
    try:
        return "", "", call()
    except Exception as error:  # noqa: BLE001  what it is is compared
        return type(error).__name__, without_addresses(str(error)), None


def about(tensor: paddle.Tensor) -> tuple[Any, ...]:
    return (str(tensor.dtype), list(tensor.shape), str(tensor.place), tensor.stop_gradient, tensor.is_leaf,
            tensor.persistable, tensor.inplace_version, bits_of_result(tensor).tolist())  # fmt: skip


def outcome(seed: int, index: int) -> dict[str, Any]:
    """All that can be seen of a call of the fuzzer."""
    call, given, ground, _ = call_of(seed, index)
    ordered = [given[name] for name in call.arguments]
    options = {name: given[name] for name in call.options}
    error, text, result = said(lambda: getattr(ops, call.op)(*ordered, **options))
    results = result if isinstance(result, (list, tuple)) else [result]
    tensors = [tensor for value in ordered for tensor in (value if isinstance(value, list) else [value])]
    return {
        "op": call.op,
        "error": error,
        "text": text,
        "results": [about(tensor) for tensor in results if isinstance(tensor, paddle.Tensor)],
        "the same objects": [any(one is tensor for tensor in tensors) for one in results],
        "versions": [t.inplace_version for t in tensors if isinstance(t, paddle.Tensor) and t._is_initialized()],
        "memory": [region.memory.tobytes() for region in ground.regions],
    }


def difference(seed: int, index: int) -> str:
    """Empty if both ways are one."""
    straight = outcome(seed, index)
    with registered_only():
        registered = outcome(seed, index)
    if straight["op"] in TAKE_VIEWS and "a cache must be contiguous" in registered["text"]:
        return ""
    unlike = [key for key in straight if straight[key] != registered[key]]
    if not unlike:
        return ""
    return f"{straight['op']}: {unlike} differ: {[(straight[key], registered[key]) for key in unlike][:2]}"


def equal_bits(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
