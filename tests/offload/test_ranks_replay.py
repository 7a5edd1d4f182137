from __future__ import annotations

from examples.two_ranks import Sizes
from paddle_kv.testing.prefixes.trace import Request
from tests.offload.ranks_replay import replay


def test_a_trace_goes_through_a_directory_and_two_ranks_bit_for_bit() -> None:
    requests = [Request(0.0, 512 * 9, list(range(number % 5, number % 5 + 9))) for number in range(40)]
    engine = replay(requests, 60, Sizes(64, 20, 16), "forkserver", settled=True)
    assert engine.wrong == 0
    assert engine.loaded_blocks > 0
    assert engine.loaded_blocks + engine.computed_blocks == 60 * 9
