"""Two processes, each with a pool and a manager of its own, agree on the prefix that both have."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paddle import distributed

from paddle_kv import LayerwiseScheduler
from paddle_kv.offload import KVOffloadManager, cache_salt, lookup_common, paddle_all_reduce_min
from tests.schedule.rig import WAIT_S, Rig, assert_same, cache_memory, moved

RANKS = 2
SAVED = (4, 6)  # blocks of the prompt that each rank has saved
DEVICE_IDS = [9, 2, 11, 5, 0, 7]
TARGETS = [1, 3, 4, 6, 8, 10]
PROCESSES = multiprocessing.get_context("spawn")


def make_manager(rig: Rig, rank: int) -> KVOffloadManager:
    return KVOffloadManager(LayerwiseScheduler(rig.cache, rig.pool), salt=cache_salt("m", tp_rank=rank, tp_size=RANKS))


def one_rank(rank: int, path: Path, make_reduce: Callable[[int, Any], Callable[[int], int]], shared: Any) -> None:
    reduce_min = make_reduce(rank, shared)
    rig = Rig()
    manager = make_manager(rig, rank)
    hashes = manager.block_hashes(np.arange(6 * rig.spec.block_size))
    manager.save(hashes[: SAVED[rank]], DEVICE_IDS[: SAVED[rank]]).wait(WAIT_S)
    found = []
    for prompt in (hashes, [b"nobody has it", *hashes], hashes[:3]):
        with lookup_common(manager, prompt, reduce_min) as lease:
            found.append(lease.num_blocks)
            if prompt is hashes:
                assert manager.stats()["pinned_blocks"] == min(SAVED)
                manager.onload(lease.hashes, TARGETS[: lease.num_blocks]).wait(WAIT_S)
    assert manager.stats()["pinned_blocks"] == 0
    expected = moved(rig.device, rig.device, DEVICE_IDS[: min(SAVED)], TARGETS[: min(SAVED)])
    assert_same(cache_memory(rig.cache), expected)
    manager.close()
    path.write_text(repr((found, hashes[0].hex())))


def by_pipe(rank: int, pipes: Any) -> Callable[[int], int]:
    def reduce_min(number: int) -> int:
        pipes[rank].send(number)
        assert pipes[rank].poll(4 * WAIT_S)  # the other process may still be importing Paddle
        return min(number, pipes[rank].recv())

    return reduce_min


def by_paddle(rank: int, ports: list[int]) -> Callable[[int], int]:
    os.environ.update(
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(RANKS),
        PADDLE_CURRENT_ENDPOINT=f"127.0.0.1:{ports[1 + rank]}",
        PADDLE_TRAINER_ENDPOINTS=",".join(f"127.0.0.1:{port}" for port in ports[1:]),
        PADDLE_MASTER=f"127.0.0.1:{ports[0]}",
        PADDLE_DISTRI_BACKEND="gloo",
    )
    import paddle

    paddle.set_device("cpu")
    paddle.distributed.init_parallel_env()
    return paddle_all_reduce_min()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.mark.parametrize("transport", ["pipe", "paddle"])
def test_ranks_agree_on_the_shortest_prefix(tmp_path: Path, transport: str) -> None:
    if transport == "pipe":
        make_reduce, shared = by_pipe, PROCESSES.Pipe()
    else:
        make_reduce, shared = by_paddle, free_ports(1 + RANKS)
    paths = [tmp_path / str(rank) for rank in range(RANKS)]
    processes = [
        PROCESSES.Process(target=one_rank, args=(rank, paths[rank], make_reduce, shared)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(5 * WAIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
    results = [eval(path.read_text()) for path in paths]
    assert [found for found, _ in results] == [[min(SAVED), 0, 3]] * RANKS
    assert results[0][1] != results[1][1]  # each has names of its own for its part of a block


def test_nothing_is_held_when_the_ranks_cannot_agree() -> None:
    rig = Rig()
    manager = make_manager(rig, 0)
    hashes = manager.block_hashes(np.arange(2 * rig.spec.block_size))
    manager.save(hashes, [3, 5]).wait(WAIT_S)

    def lost(number: int) -> int:
        raise ConnectionError("a rank is gone")

    with pytest.raises(ConnectionError) as caught:
        lookup_common(manager, hashes, lost)
    assert manager.stats()["pinned_blocks"] == 0, "although the exception keeps the frame"
    del caught
    with pytest.raises(ValueError, match=r"num_blocks = 7 must be in \[0, 2\]"):
        lookup_common(manager, hashes, lambda mine: 7)
    for wrong in (1.5, "2", None):
        with pytest.raises(TypeError, match=r"num_blocks is .*; an integer is expected"):
            lookup_common(manager, hashes, lambda mine, wrong=wrong: wrong)
    with pytest.raises(TypeError, match="all_reduce_min is 2; a function of a number is expected"):
        lookup_common(manager, hashes, 2)  # type: ignore[arg-type]
    assert manager.stats()["pinned_blocks"] == 0
    assert manager.evict(2) == 2
    manager.close()
    manager._scheduler.close()


def test_of_a_prompt_all_but_the_last_token_is_looked_up_on_every_rank() -> None:
    rig = Rig()
    manager = make_manager(rig, 0)
    hashes = manager.block_hashes(np.arange(3 * rig.spec.block_size))
    manager.save(hashes, [3, 5, 0]).wait(WAIT_S)
    asked = []
    with lookup_common(
        manager, hashes, lambda mine: asked.append(mine) or 1, num_tokens=3 * rig.spec.block_size
    ) as got:
        assert (asked, got.hashes) == ([2], hashes[:1])
    manager.close()
    manager._scheduler.close()


def test_the_smallest_number_of_the_group_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def all_reduce(value: Any, op: Any, group: Any) -> None:
        asked.append((int(value.numpy()[0]), op, group))
        value.set_value(np.array([3], np.int64))

    monkeypatch.setattr("paddle.distributed.all_reduce", all_reduce)
    group = SimpleNamespace(ranks=[0, 1])
    assert paddle_all_reduce_min(group)(7) == 3
    assert asked == [(7, distributed.ReduceOp.MIN, group)]
