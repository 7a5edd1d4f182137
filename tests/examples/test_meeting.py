"""Prompts that are served from both ends are those that are computed, wherever the ends meet."""

import threading

import pytest
from meeting import MeetingServer, check_meetings
from model import Model, ModelConfig

from paddle_kv.backend import binding

CHUNK = 32
PROMPT = bytes(range(200, 0, -1))


@pytest.fixture
def slow_loads(monkeypatch):
    """seconds of each layer of a block that is copied to the device."""
    delays = [0.0]
    copy = binding.copy

    def slow_copy(number, plan, layers):
        if plan.direction == "onload":
            threading.Event().wait(delays[0] * len(layers) * len(plan.device_ids))
        copy(number, plan, layers)

    monkeypatch.setattr(binding, "copy", slow_copy)
    return delays


def test_every_byte_is_the_same_wherever_they_meet(slow_loads):
    server = MeetingServer(Model(ModelConfig(num_layers=2)), block_size=16, blocks=64, chunk_tokens=CHUNK)
    computed = set()
    for number, slow_loads[0] in enumerate((0.0, 0.0005, 0.001, 0.002, 0.01)):
        met = server.serve_twice(bytes([number]) + PROMPT)
        assert met.differences == []
        assert met.found_tokens == 192
        computed.add(met.computed_tokens)
        server.manager.clear()
    assert len(computed) >= 2
    assert computed != {0, 192}
    server.close()


def test_a_byte_that_was_not_waited_for_is_found(slow_loads, monkeypatch):
    slow_loads[0] = 0.02
    monkeypatch.setattr("paddle_kv.offload.feeding.Meeting._is_done", lambda self, piece: True)
    assert check_meetings(Model(ModelConfig(num_layers=2)), [PROMPT], block_size=16, chunk_tokens=CHUNK, device="cpu")
