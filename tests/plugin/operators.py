"""Calls of every operator with tensors in memory that the CPU must not touch; a program of its own, as it may end.

    python -m tests.plugin.operators COUNT [DEVICE_TYPE]

Sound calls of the fuzzer, each with some of its tensors moved to the plugin's device: one alone, then all. Without a
GPU a call is refused, and nothing changes, or it is done rightly (ids are read back where no cache is on the device).
A call that is refused is refused again, in the same words, by the registered operator.
Prints each call before it is made, and at last how often each outcome was seen.
"""

from __future__ import annotations

import collections
import functools
import json
import sys
import warnings
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Iterator
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import paddle

paddle.set_device("cpu")

from paddle_kv import CudaError, ops  # noqa: E402
from tests.fuzz.both_ways import registered_only, said, without_addresses  # noqa: E402
from tests.fuzz.calls import FAMILIES, Call, bits_of_result  # noqa: E402
from tests.fuzz.ground import Ground  # noqa: E402
from tests.fuzz.one_call import TYPED, written  # noqa: E402


def tensors_in(call: Call) -> list[tuple[str, int | None]]:
    """Where the tensors of a call are: the argument, and the place in its list."""
    found: list[tuple[str, int | None]] = []
    for name, value in {**call.arguments, **call.options}.items():
        if isinstance(value, paddle.Tensor):
            found.append((name, None))
        elif isinstance(value, list):
            found += [(name, i) for i, entry in enumerate(value) if isinstance(entry, paddle.Tensor)]
    return found


def with_on_device(call: Call, moved: list[tuple[str, int | None]], place: Any) -> dict[str, Any]:
    """The same call with these tensors on the device, contiguous."""
    given = {**call.arguments, **call.options}
    made = {name: list(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, i in moved:
        tensor = made[name] if i is None else made[name][i]
        there = tensor.contiguous()._copy_to(place, True)
        if i is None:
            made[name] = there
        else:
            made[name][i] = there
    return made


def calls(count: int, place: Any) -> Iterator[tuple[Call, dict[str, Any], Ground]]:
    for number in range(count):
        for family in FAMILIES:
            seed = [number, FAMILIES.index(family)]
            where = tensors_in(family(Ground(np.random.default_rng(seed))))
            for moved in [*([one] for one in where[:6]), *([where] if len(where) > 1 else [])]:
                ground = Ground(np.random.default_rng(seed))
                call = family(ground)
                yield call, with_on_device(call, moved, place), ground


def done_rightly(call: Call, ground: Ground, result: Any) -> bool:
    targets, expected = call.expected({**call.arguments, **call.options})
    for address, content in targets:
        ground.expect(address, content)
    results = result if isinstance(result, list) else [result]
    same = expected is None or all(map(np.array_equal, map(bits_of_result, results), expected))
    return same and not ground.changed()


def main() -> None:
    place = paddle.CustomPlace(sys.argv[2] if len(sys.argv) > 2 else "cuda_like", 0)
    seen: collections.Counter[str] = collections.Counter()
    operators = set()
    for call, given, ground in calls(int(sys.argv[1]), place):
        print(written(call, given), flush=True)
        ground.snapshot()
        arguments = [given[name] for name in call.arguments]
        run = functools.partial(getattr(ops, call.op), *arguments, **{name: given[name] for name in call.options})
        said_now = ""
        try:
            result = run()
            outcome = "done"
        except CudaError as error:
            outcome, said_now = error.name, str(error)
        except TYPED as error:
            outcome, said_now = type(error).__name__, str(error)
        if said_now:
            with registered_only():
                again = said(run)[1]
            if again != without_addresses(said_now):
                sys.exit(f"{said_now!r} and, registered, {again!r}")
        if not done_rightly(call, ground, result) if outcome == "done" else ground.changed():
            sys.exit(f"{outcome}, but memory holds something else")
        operators.add(call.op)
        seen[outcome] += 1
    print(json.dumps({"outcomes": seen, "operators": sorted(operators)}))


if __name__ == "__main__":
    main()
