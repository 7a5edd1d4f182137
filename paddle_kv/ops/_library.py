"""Loads the compiled operators and calls them. Nothing else touches Paddle's custom-operator interface.

There are two ways to the same functions of the library. Eager calls go straight to them; Paddle's call of a custom
operator, of which the programs that it traces are made, takes ten times as long, and longer with each operator that is
registered. It also serves eager calls with a Paddle that does not lend what the straight way needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from .._paddle import private
from ..errors import CudaError

_register = private("utils.cpp_extension", "load_op_meta_info_and_register_op")
_op_info = private("utils.cpp_extension.extension_utils", "parse_op_info")
_LayerHelper = private("base.layer_helper", "LayerHelper")
_eager = private("base.core", "eager")

DIRECTORY = Path(__file__).resolve().parent.parent / "_lib"
LIBRARY = DIRECTORY / f"paddle_kv_ops-paddle{paddle.__version__}.so"
PREFIX = "static_op_paddle_kv_"
_Functions = dict[str, Callable[..., Any]]
_LOADER_ERROR = re.compile(r"error code is (?:\S+\.so: )?([^\n]*?)\)?\.?\n")


def _load() -> None:
    if not LIBRARY.exists():
        others = sorted(path.name for path in DIRECTORY.glob("*.so"))
        have = f"found only {', '.join(others)}" if others else "nothing is built"
        raise ImportError(
            f"paddle_kv has no operators for Paddle {paddle.__version__} ({have} in {DIRECTORY}); "
            "build them with this Paddle: python setup_ops.py build"
        )
    other = _other_copy()
    if other is not None:  # Paddle would end the process
        raise ImportError(
            f"another copy of the operators is loaded already ({other}), and Paddle takes one; {LIBRARY} is not loaded"
        )
    try:
        _register(str(LIBRARY))
    except RuntimeError as error:  # what the loader said stands in the midst of Paddle's own advice
        reason = _LOADER_ERROR.search(str(error))
        raise ImportError(
            f"{LIBRARY} cannot be loaded by Paddle {paddle.__version__} ({reason[1] if reason else error}); "
            "build it again on this machine: python setup_ops.py build"
        ) from None


def _other_copy() -> str | None:
    """A library of the same name, but another file, that this process has loaded."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as loaded:
        for line in loaded:
            path = line[line.find("/") :].rstrip("\n")
            if f"/{LIBRARY.name}" in path and not (os.path.exists(path) and LIBRARY.samefile(path)):
                return path
    return None


def _python_functions() -> tuple[_Functions, _Functions]:
    ask = getattr(ctypes.PyDLL(str(LIBRARY)), "paddle_kv_python_functions", None)  # loaded already: the same library
    if ask is None:  # built in place from earlier sources
        return {}, {}
    ask.restype = ctypes.py_object
    return ask()  # type: ignore[no-any-return]


def id_functions() -> _Functions:
    """What is asked of block ids: custom_ops/include/paddle_kv/transfer/id_functions.h."""
    ask = getattr(ctypes.PyDLL(str(LIBRARY)), "paddle_kv_id_functions", None)
    if ask is None:  # built in place from earlier sources
        return {}
    ask.restype = ctypes.py_object
    return ask()  # type: ignore[no-any-return]


def signal_functions() -> _Functions:
    """What keeps signal handlers away: custom_ops/include/paddle_kv/transfer/signal_functions.h."""
    return _functions_of("signal")


def queue_functions() -> _Functions:
    """What submits transfers: custom_ops/include/paddle_kv/transfer/queue_functions.h."""
    return _functions_of("queue")


def tier_functions() -> _Functions:
    """What tiers do without the interpreter's lock: custom_ops/include/paddle_kv/tiers/tier_functions.h."""
    return _functions_of("tier")


def _functions_of(kind: str) -> _Functions:
    ask = getattr(ctypes.PyDLL(str(LIBRARY)), f"paddle_kv_{kind}_functions", None)
    if ask is None:
        raise ImportError(f"{LIBRARY} was built from earlier sources; build it again: python setup_ops.py build")
    ask.restype = ctypes.py_object
    return ask()  # type: ignore[no-any-return]


_load()
operators, facts = _python_functions()
# 3.x has the call in _C_ops, where programs that are being traced are captured too; 2.6 has it elsewhere only.
_captures_programs = hasattr(paddle._C_ops, "_run_custom_op")
_run = getattr(paddle._C_ops, "_run_custom_op", None) or _eager._run_custom_op

_PADDLE_DECORATION = re.compile(
    r"^.*?\((?:InvalidArgument|OutOfRange|Unimplemented|ResourceExhausted|External)\) ", re.S
)
_PADDLE_POSITION = re.compile(r"\s*(\[Hint:[^\n]*)?\(at [^\n]*:\d+\)\s*.*$", re.S)
_NO_PLUGIN_MEMORY = "CustomDevice error, the error code is : 2"  # cudaErrorMemoryAllocation
_CUDA_ERROR = re.compile(r"CUDA error (\w+) \((\d+)\)")


def _translated(error: Exception) -> Exception:
    """The same exception with our sentence alone, without Paddle's decoration; CudaError for a failed CUDA call."""
    message = _PADDLE_POSITION.sub("", _PADDLE_DECORATION.sub("", str(error), count=1))
    cuda = _CUDA_ERROR.search(message)
    if cuda:
        return CudaError(cuda[1], int(cuda[2]), message)
    if _NO_PLUGIN_MEMORY in message:
        return MemoryError(f"the device has not so much memory ({message.strip()})")
    return type(error)(message)


def call(name: str, *arguments: Any) -> Any:
    """Runs the operator ``paddle_kv_<name>`` on tensors, eagerly. Always positional and complete: Paddle dies of
    anything else. What the operator returns, as a list; what it writes in place is not in it, or is to be ignored."""
    run = operators.get(name)
    return _registered(name, *arguments) if run is None else _raising(run, *arguments)


def _registered(name: str, *arguments: Any) -> Any:
    return _raising(_run, PREFIX + name, *arguments)


def _raising(run: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return run(*arguments)
    except (ValueError, IndexError, NotImplementedError, MemoryError, OSError) as error:
        raise _translated(error) from None


def call_traceable(name: str, *arguments: Any) -> list[Any]:
    """:func:`call` that also works while a program is traced (``paddle.jit.to_static``, ``paddle.static``).

    The operator must have outputs: in-place ones, or plain ones with shape and dtype inference. Arguments are the
    inputs in the order of registration, then the attributes; None stands for an absent optional input.

    Returns:
        The outputs as one flat list; a list of tensors that is updated in place contributes each of its tensors. While
        tracing, only these stand for the updated tensors: a saved program drops an update whose result is not used.
        Eagerly only the new tensors.
    """
    eager = paddle.in_dynamic_mode()
    if not eager and not _captures_programs:
        return _append(PREFIX + name, arguments)
    outputs = (call if eager else _registered)(name, *arguments)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _append(op: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Adds the operator to the program that Paddle 2.6 is building: its direct call knows tensors only."""
    input_names, attribute_names, output_names = _op_info(op)
    output_to_input = _eager._get_custom_operator_inplace_map(op)  # {output index: input index}
    given = dict(zip(input_names, arguments[: len(input_names)], strict=True))
    attributes = dict(zip(attribute_names, arguments[len(input_names) :], strict=True))
    helper = _LayerHelper(op)
    outputs: dict[str, Any] = {}
    for index, output in enumerate(output_names):
        if index not in output_to_input:
            outputs[output] = helper.create_variable(dtype="float32")  # the operator's own inference corrects it
        elif given[input_names[output_to_input[index]]] is not None:
            outputs[output] = given[input_names[output_to_input[index]]]
    inputs = {key: value for key, value in given.items() if value is not None}
    helper.append_op(type=op, inputs=inputs, outputs=outputs, attrs=attributes)
    flat: list[Any] = []
    for value in outputs.values():
        flat.extend(value if isinstance(value, (list, tuple)) else [value])
    return flat
