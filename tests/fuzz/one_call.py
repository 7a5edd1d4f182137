"""Runs call number ``index`` of a seed and judges it."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_kv import ops
from tests.fuzz.calls import FAMILIES, Call, EitherMayWin, bits_of_result
from tests.fuzz.ground import Ground
from tests.fuzz.mutate import mutated

TYPED = (ValueError, TypeError, IndexError, NotImplementedError, MemoryError)
SOUND_SHARE = 0.4  # of the calls stay as they were made


@dataclass(frozen=True)
class Verdict:
    """``kind``: "exact", "refused" (``text`` is the error), "either", or what is wrong (``text`` has the call too)."""

    op: str
    kind: str
    text: str = ""

    @property
    def wrong(self) -> bool:
        return self.kind not in ("exact", "refused", "either")


def call_of(seed: int, index: int) -> tuple[Call, dict[str, Any], Ground, bool]:
    """The call, what it is given, the memory that it may see, and whether it is as it was made."""
    random = np.random.default_rng([seed, index])
    ground = Ground(random)
    call = FAMILIES[int(random.integers(len(FAMILIES)))](ground)
    given = {**call.arguments, **call.options}
    sound = random.random() < SOUND_SHARE
    if not sound:
        for position in random.permutation(len(given))[: int(random.integers(1, 3))]:
            name = list(given)[int(position)]
            given[name] = mutated(given[name], ground, name)
    return call, given, ground, sound


def run(seed: int, index: int, announce: Callable[[str], None] | None = None) -> Verdict:
    """``announce`` is told the call before it is made, which may end the process."""
    call, given, ground, sound = call_of(seed, index)
    if announce is not None:
        announce(written(call, given))
    ground.snapshot()
    return _judge(call, given, ground, sound)


def _judge(call: Call, given: dict[str, Any], ground: Ground, sound: bool) -> Verdict:
    def wrong(kind: str, error: object = "") -> Verdict:
        return Verdict(call.op, kind, f"{written(call, given)} {error!r}")

    outcome: Any = None
    try:  # before the call: it may overwrite what it reads
        outcome = call.expected(given)
    except EitherMayWin:
        outcome = "either"
    except Exception as error:  # noqa: BLE001  the reference can make nothing of it
        outcome = error
    ordered = [given[name] for name in call.arguments]
    options = {name: given[name] for name in call.options}
    try:
        result = getattr(ops, call.op)(*ordered, **options)
    except TYPED as error:
        if ground.changed():
            return wrong("moved before it was refused", error)
        if sound:
            return wrong("refused a sound call", error)
        if not any(name in str(error) for name in given):
            return wrong("refused without naming an argument", error)
        return Verdict(call.op, "refused", repr(error))
    except Exception as error:  # noqa: BLE001  what must not come out
        return wrong("untyped error", error)
    if outcome == "either":
        return Verdict(call.op, "either")
    if isinstance(outcome, Exception):
        return wrong("accepted what has no meaning", outcome)
    targets, expected = outcome
    for address, content in targets:
        ground.expect(address, content)
    if ground.changed():
        return wrong("wrong memory")
    if expected is not None:
        results = result if isinstance(result, list) else [result]
        found = [bits_of_result(tensor) for tensor in results]
        same = len(found) == len(expected) and all(map(np.array_equal, found, expected))
        if not same:
            return wrong("wrong result")
    return Verdict(call.op, "exact")


def written(call: Call, given: dict[str, Any]) -> str:
    return f"{call.op}({', '.join(f'{name}={_shown(value)}' for name, value in given.items())})"


def _shown(value: Any) -> str:
    if isinstance(value, paddle.Tensor):
        with contextlib.suppress(Exception):
            return f"<{value.dtype} {value.shape} strides {value.get_strides()}>"
        return "<Tensor()>"
    if isinstance(value, list) and value and isinstance(value[0], paddle.Tensor):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} {value.tolist()}>"
    return reprlib.repr(value)
