"""What stream= means, as far as it can be seen without a GPU: Paddle and CuPy are stood in for."""

from __future__ import annotations

import sys
from ctypes import c_void_p
from types import SimpleNamespace

import paddle
import pytest

from paddle_kv import streams

PADDLE_STREAM = 0x1000


class Place:
    def is_gpu_place(self) -> bool:
        return True

    def gpu_device_id(self) -> int:
        return 3


GPU_TENSOR = SimpleNamespace(place=Place())


class FakeCuPy:
    """Records which events are recorded and waited for, in order."""

    def __init__(self, current: int, capturing: bool = False) -> None:
        self.log: list[tuple[str, int, int]] = []
        self.current = SimpleNamespace(ptr=current, is_capturing=lambda: capturing)
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: self.current,
            Event=lambda disable_timing: SimpleNamespace(ptr=0xE),
            runtime=SimpleNamespace(
                eventRecord=lambda event, stream: self.log.append(("record", event, stream)),
                streamIsCapturing=lambda stream: capturing and stream == current,
                streamWaitEvent=lambda stream, event: self.log.append(("wait", event, stream)),
            ),
        )


@pytest.fixture(autouse=True)
def paddle_stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Paddle's current stream; the devices it was asked for."""
    asked: list[int] = []
    monkeypatch.setattr(streams, "paddle_stream", lambda device: asked.append(device) or PADDLE_STREAM)
    monkeypatch.setitem(sys.modules, "cupy", None)
    return asked


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (7, 7),
        (SimpleNamespace(ptr=0x2000), 0x2000),
        (SimpleNamespace(cuda_stream=0x3000), 0x3000),
        (SimpleNamespace(_as_parameter_=c_void_p(0x4000)), 0x4000),
        (SimpleNamespace(_as_parameter_=c_void_p(0)), 0),
    ],
)
def test_a_named_stream_is_used_as_it_is(
    stream: object, handle: int, monkeypatch: pytest.MonkeyPatch, paddle_stream: list[int]
) -> None:
    cupy = FakeCuPy(current=0x5000)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert streams.resolve(stream, GPU_TENSOR) == handle
    assert cupy.log == []
    assert paddle_stream == [], "a named stream gets no hidden ordering"


@pytest.mark.parametrize("stream", ["7", 7.0, True, object(), [7]])
def test_what_is_no_stream(stream: object) -> None:
    with pytest.raises(TypeError, match=r"stream is .*; an int handle, a CuPy stream or a Paddle stream is expected"):
        streams.resolve(stream, GPU_TENSOR)


def test_none_is_paddles_current_stream_of_the_tensors_device(paddle_stream: list[int]) -> None:
    assert streams.resolve(None, GPU_TENSOR) == PADDLE_STREAM
    assert paddle_stream == [3]


def test_none_with_cupy_on_its_default_stream_is_paddles(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCuPy(current=0)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert streams.resolve(None, GPU_TENSOR) == PADDLE_STREAM
    assert cupy.log == []


def test_none_inside_a_cupy_stream_waits_for_paddles_stream_first(
    monkeypatch: pytest.MonkeyPatch, paddle_stream: list[int]
) -> None:
    cupy = FakeCuPy(current=0x5000)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert streams.resolve(None, GPU_TENSOR) == 0x5000
    assert cupy.log == [("record", 0xE, PADDLE_STREAM), ("wait", 0xE, 0x5000)]
    assert paddle_stream == [3]


def test_none_inside_a_cupy_stream_under_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCuPy(current=0x5000, capturing=True)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(ValueError, match="being captured into a CUDA graph"):
        streams.resolve(None, GPU_TENSOR)
    assert cupy.log == [], "the capture is left as it was"


@pytest.mark.parametrize("stream", [None, 7, "ignored"])
def test_the_cpu_has_no_streams(stream: object, paddle_stream: list[int]) -> None:
    tensor = paddle.to_tensor([1.0], place=paddle.CPUPlace())
    assert streams.resolve(stream, tensor) == 0
    assert paddle_stream == []


def test_who_is_asked_whether_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not streams.is_capturing(0x2000)  # without CuPy
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy(0x2000, capturing=True))
    assert streams.is_capturing(0x2000) and not streams.is_capturing(0x3000)
