from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddle_kv import LayerwiseScheduler, Span, TransferError, write_trace
from paddle_kv.schedule.trace import read_trace, spans_of
from tests.schedule.rig import Copies, Rig

LAYERS = 5


def test_transfers_and_the_spans_of_a_model_come_back_as_they_were(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "still" / "trace.json"
    with LayerwiseScheduler(rig.cache, rig.pool, record_layer_times=True) as scheduler:
        save, load = scheduler.offload([3, 9], [11, 2]), scheduler.onload([7], [0])
        scheduler.drain()
        model = [Span("model", 0, 0.5, 1.25), Span("model", 3, 1.5, 2.0)]
        write_trace(path, [save, load], model)
        expected = [*model, *spans_of(save), *spans_of(load)]
        moments = [time for span in expected[2:] for time in (span.start_ms, span.end_ms)]
        assert min(moments) > 0 and max(moments) < scheduler.now_ms()
    back = read_trace(path)
    assert [(span.lane, span.layer) for span in back] == [
        *[("model", 0), ("model", 3)],
        *[(lane, layer) for lane in ("offload", "onload") for layer in range(LAYERS)],
    ]
    for span, other in zip(back, expected, strict=True):
        assert (span.start_ms, span.end_ms) == pytest.approx((other.start_ms, other.end_ms))
    every = json.loads(path.read_text())["traceEvents"]
    assert len({event["pid"] for event in every}) == 1, "the names of the lanes are those of this process"
    events = [event for event in every if event["ph"] == "X"]
    assert [event["args"]["transfer"] for event in events[2:]] == [0] * LAYERS + [1] * LAYERS
    assert events[-1]["args"]["transfer_bytes"] == load.bytes
    assert len({event["tid"] for event in events}) == 3


def test_a_transfer_of_nothing_has_no_spans(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool, record_layer_times=True) as scheduler:
        assert spans_of(scheduler.onload([], [])) == []


def test_a_transfer_without_times_is_refused(rig: Rig, copies: Copies, tmp_path: Path) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([3], [0])
        load.wait()
        with pytest.raises(ValueError, match="record_layer_times"):
            write_trace(tmp_path / "trace.json", [load])
    with LayerwiseScheduler(rig.cache, rig.pool, record_layer_times=True) as scheduler:
        copies.fail("offload", 2, OSError("lost"))
        save = scheduler.offload([3], [0])
        with pytest.raises(TransferError):
            save.wait()
        with pytest.raises(ValueError, match="has not failed"):
            spans_of(save)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_of_a_trace_are_named(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LayerwiseScheduler(rig.cache, rig.pool, record_layer_times=True) as scheduler:
        load = scheduler.onload([3], [0])
        load.wait()
        with pytest.raises(TypeError, match=r"transfers is <Transfer: onload of 1 blocks, .*; a list of Transfer is"):
            write_trace(path, load)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"transfers\[1\] is None; a Transfer is expected"):
            write_trace(path, [load, None])  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"spans\[0\] is \('model', 0, 0.0, 1.0\); a Span is expected"):
            write_trace(path, [load], [("model", 0, 0.0, 1.0)])  # type: ignore[list-item]
        assert not path.exists()
        write_trace(path, (one for one in [load]))
    assert len(spans_of(load)) == LAYERS
    assert sum(event["ph"] == "X" for event in json.loads(path.read_text())["traceEvents"]) == LAYERS
