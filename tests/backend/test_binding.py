"""Which addresses and sizes the compiled library is told of a pair of pools, and by which call."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_kv.backend import binding, transfer_queue
from tests.schedule.rig import make_spec

SPEC = make_spec(num_kv_heads=2, layout="NHD", extra={})
NAMES = SPEC.tensor_names


class Memory:
    """Tensors a million bytes apart; a block lies in pieces of ``piece_bytes``."""

    spec = SPEC

    def __init__(self, start: int, stride_bytes: int, piece_bytes: int, **facts: Any) -> None:
        self.num_blocks = start // 10**9
        self.is_part = self.on_other_gpu = False
        self.in_host_memory = True
        self.block_bytes = dict.fromkeys(NAMES, 70)
        self._start, self._stride_bytes, self._piece_bytes = start, stride_bytes, piece_bytes
        self.__dict__.update(facts)

    def pointer(self, name: str, layer: int) -> int:
        return self._start + (layer * len(NAMES) + NAMES.index(name)) * 10**6

    def stride_bytes(self, name: str) -> int:
        return self._stride_bytes + NAMES.index(name)

    def piece_stride_bytes(self, name: str) -> int:
        return self._piece_bytes

    def moved_block_bytes(self, name: str) -> int:
        return self.block_bytes[name]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(binding, "call", lambda *given: found.append(given))
    monkeypatch.setattr(
        transfer_queue,
        "register_device_plan",
        lambda *given, on_other_gpu: found.append(("device", *given, on_other_gpu)),
    )
    return found


def test_whole_blocks(told: list[tuple[Any, ...]]) -> None:
    number = binding.register(Memory(3 * 10**9, 100, 10), Memory(5 * 10**9, 200, 20), 6)
    starts = [tensor * 10**6 for tensor in range(SPEC.num_layers * len(NAMES))]
    binding.release(number)
    on_device, on_host = ([base + start for start in starts] for base in (3 * 10**9, 5 * 10**9))
    assert told == [
        ("register_transfer_plan", number, 6, 3, 5, on_device, on_host, [100, 101], [200, 201], [70, 70]),
        ("release_transfer_plan", number),
    ]
    assert binding.register(Memory(10**9, 1, 1), Memory(10**9, 1, 1), -1) > number


@pytest.mark.parametrize("parts", [(True, False), (False, True), (True, True)])
def test_the_pieces_of_some_of_the_heads(told: list[tuple[Any, ...]], parts: tuple[bool, bool]) -> None:
    """A token is a piece, of which each side has its own distance to the next one."""
    cache, pool = (
        Memory(base, stride, piece, is_part=is_part)
        for base, stride, piece, is_part in zip((3 * 10**9, 5 * 10**9), (100, 200), (10, 20), parts, strict=True)
    )
    binding.register(cache, pool, -1)
    [(_, _, _, _, _, on_device, on_host, *strides, sizes)] = told
    tokens = SPEC.block_size
    for found, base, piece in ((on_device, 3 * 10**9, 10), (on_host, 5 * 10**9, 20)):
        assert found == [
            base + tensor * 10**6 + token * piece
            for tensor in range(SPEC.num_layers * len(NAMES))
            for token in range(tokens)
        ]
    assert strides == [[100] * tokens + [101] * tokens, [200] * tokens + [201] * tokens]
    assert sizes == [70 // tokens] * 2 * tokens


@pytest.mark.parametrize(
    ("device", "in_host_memory", "sizes", "on_device"),
    [
        (0, False, (70, 70), True),
        (0, False, (0, 70), True),
        (0, False, (0, 0), False),  # nothing is moved
        (0, True, (70, 70), False),
        (-1, False, (70, 70), False),
    ],
)
@pytest.mark.parametrize("on_other_gpu", [False, True])
def test_device_memory_on_both_sides(
    told: list[tuple[Any, ...]],
    device: int,
    in_host_memory: bool,
    sizes: tuple[int, int],
    on_device: bool,
    on_other_gpu: bool,
) -> None:
    there = Memory(
        10**9,
        100,
        10,
        in_host_memory=in_host_memory,
        on_other_gpu=on_other_gpu,
        block_bytes=dict(zip(NAMES, sizes, strict=True)),
    )
    binding.register(Memory(10**9, 100, 10), there, device)
    [call] = told
    assert call[0] == ("device" if on_device else "register_transfer_plan")
    assert call[2] == device
    if on_device:
        assert call[-1] is on_other_gpu
