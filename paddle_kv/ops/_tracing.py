"""How the operators behave while Paddle turns Python into a program (``paddle.jit.to_static``, ``paddle.static``).

There are two tracers. The one that rewrites source (``full_graph=True``) runs a function with variables in the place of
tensors; the operators then become part of the program. The one that reads bytecode (the default) knows only a part of
Python, turns integers that change into variables, and guesses the structure of a result; so it is told to stop at our
functions, which then run in dygraph between two pieces of program, but for those marked :func:`capturable`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import paddle

from .._paddle import private

Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")

_paddle: Any = paddle  # parts of it are not declared for type checkers
_psdb = private("jit.sot", "psdb")
_TRACER_CAN_LET_GO = "recursive" in inspect.signature(_psdb.fallback).parameters
_VARIABLES = (_paddle.static.Variable, _paddle.pir.Value)  # of a program: 2.6, 3.x


def tracing() -> bool:
    """Whether Paddle is building a program: then tensors are variables without memory."""
    return not paddle.in_dynamic_mode()


def is_variable(value: Any) -> bool:
    """A variable of a program that is being built."""
    return isinstance(value, _VARIABLES)


def traceable(function: Function) -> Function:
    """Marks a public function that asks :func:`tracing` itself: Paddle must not rewrite its source."""

    @functools.wraps(function)
    def stopping(*arguments: Any, **named: Any) -> Any:
        _psdb.breakgraph()  # does nothing, but to the bytecode tracer
        return function(*arguments, **named)

    return cast(Function, _paddle.jit.not_to_static(stopping))


def capturable(function: Function) -> Function:
    """As :func:`traceable`, for a function that the bytecode tracer may take into its program as it is.

    Its result must have the same structure in every call, and it must take no integers.
    """
    unified = getattr(getattr(paddle.jit, "marker", None), "unified", traceable)
    return cast(Function, unified(function))


# Having stopped at our functions the bytecode tracer would go on with what they call.
private("base.core", "eval_frame_skip_file_prefix")((f"{Path(__file__).resolve().parent.parent}{os.sep}",))


def refuse_tracing(op: str) -> None:
    """Operators that carry addresses or stream handles make no sense in a saved program."""
    if not paddle.in_dynamic_mode():
        raise NotImplementedError(f"{op} carries memory addresses or a stream handle and works in dygraph only")


def dygraph_only(op: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public operator for which :func:`refuse_tracing` holds.

    A tracer that can leave a call to Python (to_static of Paddle 3 without full_graph) is told to do so, which it only
    heeds in the frame that it enters first.
    """
    name = op.__name__.removeprefix("_orig_")  # to_static decorates the function again, under another name

    @functools.wraps(op)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if _TRACER_CAN_LET_GO:
            _psdb.fallback(recursive=True)
        refuse_tracing(name)
        return op(*args, **kwargs)

    return checked
