import pytest
from timeline import Recorder, draw, overlap_ms, total_ms

from paddle_kv.schedule.trace import Span


def spans(*intervals, lane="compute"):
    return [Span(lane, layer, start, end) for layer, (start, end) in enumerate(intervals)]


def test_recorder_takes_both_ends_from_its_clock():
    ticks = iter([1.0, 2.5, 3.0, 7.0])
    recorder = Recorder(lambda: next(ticks))
    with recorder.span("compute", 4):
        pass
    with recorder.span("wait", 5):
        pass
    assert recorder.spans == [Span("compute", 4, 1.0, 2.5), Span("wait", 5, 3.0, 7.0)]
    assert total_ms(recorder.spans) == 5.5


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], 0.0),
        ([(0.0, 1.0)], 0.0),  # before both
        ([(1.5, 3.0)], 0.5),  # cuts the first
        ([(0.0, 9.0)], 3.0),  # holds both
        ([(1.2, 1.3), (5.5, 6.5)], 0.6),  # one inside the first, one cuts the second
        ([(2.0, 4.0)], 0.0),  # touches both
    ],
)
def test_overlap(others, expected):
    assert overlap_ms(spans((1.0, 2.0), (4.0, 6.0)), spans(*others)) == pytest.approx(expected)
    assert overlap_ms(spans(*others), spans((1.0, 2.0), (4.0, 6.0))) == pytest.approx(expected)


def test_picture_has_a_bar_for_each_span(tmp_path, monkeypatch):
    from matplotlib import pyplot
    from matplotlib.axes import Axes

    bars = []
    original = Axes.barh
    monkeypatch.setattr(Axes, "barh", lambda *a, **k: bars.append((a[1], a[2], k["left"])) or original(*a, **k))
    lanes = spans((2.0, 3.0), (3.0, 5.0), lane="onload") + spans((3.0, 6.0)) + spans((6.0, 6.5), lane="wait")
    draw(lanes, tmp_path / "picture.png", "title")
    assert bars == [(0, 1.0, 0.0), (0, 2.0, 1.0), (1, 3.0, 1.0), (1, 0.5, 4.0)]
    assert pyplot.imread(tmp_path / "picture.png").shape[1] > 1000
    assert not pyplot.get_fignums()
