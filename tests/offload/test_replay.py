from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv.testing.prefixes.optimum import optimal_hits
from paddle_kv.testing.prefixes.replay import OPTIMUM, Costs, Run, replay
from paddle_kv.testing.prefixes.trace import Request, read_trace
from tests.reference.policies import ArcReference, LruReference, S3FifoReference
from tests.reference.prefix_cache import best_hits, policy_run

COSTS = Costs(block_bytes=1000, num_layers=4, link_bytes_per_s=10_000.0, prefill_tokens_per_s=512.0)
REFERENCES: dict[str, Any] = {"lru": LruReference, "arc": ArcReference, "s3fifo": S3FifoReference}
policies = pytest.mark.parametrize("name", list(REFERENCES))


def prompts_of(rng: random.Random, count: int, branches: int, length: int) -> list[list[int]]:
    """Paths of a tree: equal ids, equal prefixes."""
    names: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(count):
        path: tuple[int, ...] = ()
        prompt = []
        for _ in range(rng.randint(1, length)):
            path = (*path, min(int(rng.paretovariate(1.0)) - 1, branches - 1))
            prompt.append(names.setdefault(path, len(names)))
        prompts.append(prompt)
    return prompts


def requests_of(prompts: list[list[int]], gap_s: float = 1.0) -> list[Request]:
    return [Request(number * gap_s, 512 * len(prompt), prompt) for number, prompt in enumerate(prompts)]


def assert_same_run(name: str, capacity: int, prompts: list[list[int]]) -> Run:
    run = replay(requests_of(prompts), name, capacity, COSTS)
    assert (run.hits, run.saved_blocks, run.evicted_blocks) == policy_run(REFERENCES[name](capacity), prompts, capacity)
    return run


@policies
@pytest.mark.parametrize("capacity", [12, 40, 200])
def test_hits_are_those_of_a_plain_simulation(name: str, capacity: int) -> None:
    prompts = prompts_of(random.Random(capacity), 400, 5, 12)
    run = assert_same_run(name, capacity, prompts)
    assert 0 < run.hit_blocks < run.num_blocks == sum(map(len, prompts))


# Not only prefixes: blocks that recur inside a prompt and elsewhere in others, empty prompts, more than the capacity.
any_prompts = st.lists(
    st.one_of(
        st.lists(st.integers(0, 40), max_size=12),
        st.builds(lambda first, length: list(range(first, first + length)), st.integers(0, 60), st.integers(0, 30)),
    ),
    max_size=60,
)


@policies
@given(capacity=st.integers(1, 30), prompts=any_prompts)
def test_hits_are_those_of_a_plain_simulation_for_any_prompts(
    name: str, capacity: int, prompts: list[list[int]]
) -> None:
    assert_same_run(name, capacity, prompts)


@policies
@pytest.mark.parametrize("capacity", [1, 2, 9, 33])
@pytest.mark.parametrize("blocks_per_slot", [1.5, 3])
def test_hits_are_those_of_a_plain_simulation_when_ghosts_return(
    name: str, capacity: int, blocks_per_slot: float
) -> None:
    """Most blocks were evicted a moment ago: the lists of ghosts turn over many times."""
    rng = random.Random(capacity)
    blocks = int(blocks_per_slot * capacity) + 1
    prompts = [[rng.randrange(blocks) for _ in range(rng.randint(0, 7))] for _ in range(9000)]
    assert assert_same_run(name, capacity, prompts).evicted_blocks > 1000


@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 4))
def test_the_optimum_is_the_best_of_all_choices(seed: int, capacity: int) -> None:
    prompts = prompts_of(random.Random(seed), 6, 3, 3)
    hits, *_ = optimal_hits(requests_of(prompts), capacity)
    assert sum(hits) == best_hits(tuple(map(tuple, prompts)), capacity)


def test_the_optimum_evicts_only_what_it_would_have_used_again() -> None:
    prompts = [[1], [1], [2], [2], [3], [4], [3], [4]]
    assert optimal_hits(requests_of(prompts), 1) == ([0, 1, 0, 1, 0, 0, 1, 0], 3, 0)  # 4 is never let in
    assert optimal_hits(requests_of([[1], [2], [2], [1]]), 1) == ([0, 0, 1, 0], 2, 1)


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_no_policy_beats_the_optimum(policy: str) -> None:
    requests = requests_of(prompts_of(random.Random(5), 300, 4, 10))
    for capacity in (10, 60, 5000):
        best = replay(requests, OPTIMUM, capacity, COSTS)
        run = replay(requests, policy, capacity, COSTS)
        assert run.hit_blocks <= best.hit_blocks
        assert (run.hit_blocks == best.hit_blocks) == (capacity == 5000)
        assert run.saved_blocks - run.evicted_blocks <= capacity


def test_times_of_the_three_ways() -> None:
    """Blocks take 1 s to compute and 0.1 s to load; four layers."""
    requests = [
        Request(10.0, 4 * 512, [0, 1, 2, 3]),
        Request(11.0, 6 * 512, [0, 1, 2, 3, 4, 5]),
        Request(40.0, 512, [0]),
    ]
    run = replay(requests, "lru", 9, COSTS)
    assert run.hits == [0, 4, 1]
    one_token = 1 / 512
    assert run.waits_s("recompute", requests) == pytest.approx([4, 3 + 6, 1])
    assert run.waits_s("whole", requests) == pytest.approx([4, 3 + 0.4 + 2, 0.1 + one_token])
    assert run.waits_s("layerwise", requests) == pytest.approx([4, 3 + 0.4 / 4 + 2, 0.1 + one_token / 4])
    assert run.transfer_s == pytest.approx(0.5)
    assert run.hidden_s == pytest.approx(0.3 + one_token * 3 / 4)


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    fields = {"input_length": 700, "output_length": 3, "hash_ids": [4, 9]}
    path = write_lines(tmp_path / "trace.jsonl", {"timestamp": 1500, **fields}, "", {"timestamp": 20, **fields})
    assert read_trace(path) == [Request(0.02, 700, [4, 9]), Request(1.5, 700, [4, 9])]
    assert read_trace(path, 1) == [Request(1.5, 700, [4, 9])]


def test_what_else_stands_in_a_trace_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"timestamp": 3, "input_length": 700, "output_length": 0, "hash_ids": [4, 9, 4]}\r\n'
        b"\r\n  \n"
        b'{"hash_ids": [], "model": {"name": "\xc3\xa4"}, "input_length": 5, "timestamp": 2.5}\n'
        b' {"timestamp": 3, "input_length": 0, "hash_ids": [36893488147419103232, -1]} \n'
        b'{"timestamp": 3, "input_length": 9, "output_length": null, "hash_ids": [0]}'
    )
    assert read_trace(path) == [
        Request(0.0025, 5, []),
        Request(0.003, 700, [4, 9, 4]),
        Request(0.003, 0, [1 << 65, -1]),
        Request(0.003, 9, [0]),
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "no JSON (Expecting property name enclosed in double quotes, column 2)"),
        ("[]", "a JSON list instead of an object"),
        ('{"timestamp": 0}', "no field input_length"),
        ({"timestamp": 0, "input_length": -1, "hash_ids": []}, "input_length = -1 must be an integer of at least 0"),
        ({"timestamp": 0, "input_length": 5.5, "hash_ids": []}, "input_length = 5.5 must be"),
        ({"timestamp": 0, "input_length": None, "hash_ids": []}, "input_length = None must be"),
        ({"timestamp": -1, "input_length": 5, "hash_ids": [1]}, "timestamp = -1 must be a number of at least 0"),
        ({"timestamp": "0", "input_length": 5, "hash_ids": [1]}, "timestamp = '0' must be"),
        ({"timestamp": float("nan"), "input_length": 5, "hash_ids": [1]}, "timestamp = nan must be"),
        ({"timestamp": 10**400, "input_length": 5, "hash_ids": [1]}, "too large"),
        ({"timestamp": 0, "input_length": 5, "hash_ids": [1.5]}, "hash_ids must be a list of integers"),
        ({"timestamp": 0, "input_length": 5, "hash_ids": 1}, "hash_ids must be a list of integers"),
        (b"\x1f\x8b\x08\x00", "can't decode byte 0x8b"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: Any, what: str) -> None:
    good = json.dumps({"timestamp": 0, "input_length": 5, "hash_ids": [1]}).encode()
    path = tmp_path / "trace.jsonl"
    bad = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path.write_bytes(good + b"\n\n" + bad + b"\n" + good)
    with pytest.raises(ValueError, match=f"line 3: .*{re.escape(what)}.*; a request of a trace is expected"):
        read_trace(path)
    assert len(read_trace(path, 1)) == 1


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no requests"):
        read_trace(write_lines(tmp_path / "trace.jsonl", ""))


def test_costs_are_positive() -> None:
    with pytest.raises(ValueError, match="link_bytes_per_s = 0"):
        Costs(1, 1, 0, 1)
    with pytest.raises(ValueError, match="capacity_blocks = 0"):
        replay([], "lru", 0, COSTS)
