"""Jobs of the wrong form are refused by a mover as a whole: nothing is started, and what was there stays there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.offload import Directory, Job, Mover, Namespace

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
NAN = float("nan")
KEYS = [b"a", b"b"]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Mover, Directory]]:
    scheduler = LayerwiseScheduler(DeviceCache(SPEC, 5, "cpu"), HostPool(SPEC, 8))
    with scheduler, Mover(scheduler) as mover:
        directory = Directory(8)
        directory.join(mover.hello())
        mover.submit([directory.plan_save(KEYS, [4, 2]).job])  # type: ignore[list-item]
        scheduler.drain(timeout_s=10)
        assert [outcome.failed for outcome in directory.complete(mover.finished())] == [()]
        yield mover, directory


WRONG = [
    *(("id", one, TypeError) for one in (None, "x", True, 1.5, [])),
    *(("kind", one, ValueError) for one in ("LOAD", None, 5, [])),
    *(("space", one, TypeError) for one in (None, 5)),
    *(("keys", one, TypeError) for one in (None, 5, ("a", "b"), [b"a", b"b"], "ab")),
    *(
        (name, one, TypeError)
        for name in ("host_slots", "device_ids")
        for one in (None, 5, [0, 1], (True, False), (0.0, 1.0), (NAN, 1), ("0", "1"))
    ),
    *((name, one, IndexError) for name in ("host_slots", "device_ids") for one in ((0, 8), (-1, 0), (0, 2**70))),
    ("host_slots", (0, 0), ValueError),
    ("keys", (b"a",), ValueError),
    *(("epochs", one, TypeError) for one in (None, 5, ("x",), (True,), [1])),
    *(("timeout_s", one, TypeError) for one in ("x", True, [])),
    *(("timeout_s", one, ValueError) for one in (NAN, float("inf"), 10**30)),
    *(("layerwise", one, TypeError) for one in ("x", None, 5)),
    *(("tier", one, TypeError) for one in (5, b"x")),
    *(("version", one, ValueError) for one in (0, 2, None, True, 1.0, "1")),
]


@pytest.mark.parametrize(("field", "value", "error"), WRONG)
def test_a_job_of_another_form_starts_nothing(
    pair: tuple[Mover, Directory], field: str, value: Any, error: type[Exception]
) -> None:
    mover, _ = pair
    good = Job(1, "save", Namespace(), (b"c", b"d"), (0, 1), (0, 1), (mover.epoch,))  # would write over what is there
    with pytest.raises(error, match=f"{field}|must have as many"):
        mover.submit([good, dataclasses.replace(good, **{field: value})])
    assert mover.finished() == []
    loaded = mover.submit([Job(2, "load", Namespace(), (b"a", b"b"), (0, 1), (0, 1), (mover.epoch,))])
    loaded.loads[0].wait(timeout_s=10)
    assert [result.failed for result in mover.finished()] == [()]


@pytest.mark.parametrize("jobs", [None, 5, "x", b"x", [None], [5]])
def test_what_is_no_list_of_jobs_is_named(pair: tuple[Mover, Directory], jobs: Any) -> None:
    with pytest.raises(TypeError, match=r"jobs is|Job is expected"):
        pair[0].submit(jobs)


@pytest.mark.parametrize("name", ["layerwise", "all_or_nothing"])
@pytest.mark.parametrize("value", [None, 5, "yes", []])
def test_a_directory_plans_no_job_that_a_mover_would_refuse(
    pair: tuple[Mover, Directory], name: str, value: Any
) -> None:
    before = pair[1].stats()
    with pytest.raises(TypeError, match=name):
        pair[1].plan_save([b"x"], [0], **{name: value})
    assert pair[1].stats() == before
