"""A manager whose device cache is a ring of layer buffers: a prompt is prefilled by requests of growing length."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError
from paddle_kv.integrations import ForwardPass
from paddle_kv.offload import KVOffloadManager
from paddle_kv.offload.chunks import How
from paddle_kv.tiers import FilesEngine, Outcome, Read, Tier

WAIT_S = 20.0
SIZE = 4
SPEC = KVCacheSpec(num_layers=6, num_kv_heads=1, head_dim=2, block_size=SIZE, dtype="float32")


class Model:
    """Key and value of a token are made of it, of its position and of the layer."""

    def __init__(self, layer_buffers: int, engine: FilesEngine | None = None) -> None:
        self.cache = DeviceCache(SPEC, 16, "cpu", layer_buffers=layer_buffers)
        self.pool = HostPool(SPEC, 32, layout="block_first")
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.tier = Tier(engine, self.pool, model=b"model") if engine is not None else None
        self.manager = KVOffloadManager(self.scheduler, tier=self.tier)
        self.wrong: list[str] = []

    def tokens_of(self, tokens: list[int], layer: int, name: str) -> np.ndarray:
        made = np.array([1000 * layer + 10 * token + position for position, token in enumerate(tokens)], np.float32)
        return made + (0.5 if name == "value" else 0.0)

    def prefill(self, tokens: list[int], table: list[int]) -> list[int]:
        """How many tokens each run of the pass has computed."""
        computed = []
        with self.manager.request(tokens, table) as request:
            while True:
                self.wrong = []  # what a pass of which the load fails has seen counts for nothing
                with (
                    contextlib.suppress(TransferError),
                    ForwardPass(request.loads, request.saves, timeout_s=WAIT_S) as layers,
                ):
                    for layer in range(SPEC.num_layers):
                        with layers.layer(layer):
                            self.layer(layer, tokens, table, request.start)
                computed.append(len(tokens) - request.start)
                if request.wait(timeout_s=WAIT_S):
                    self.scheduler.drain(WAIT_S)  # the next request finds what is there
                    return computed

    def layer(self, layer: int, tokens: list[int], table: list[int], start: int) -> None:
        for name in SPEC.tensor_names:
            tensor = self.cache.tensor(name, layer)
            expected = self.tokens_of(tokens, layer, name)
            for position in range(len(tokens)):
                block, slot = table[position // SIZE], position % SIZE
                if position >= start:
                    tensor[block, 0, slot] = float(expected[position])
                elif float(tensor[block, 0, slot, 0]) != expected[position]:
                    self.wrong.append(f"{name} of layer {layer}, token {position}")

    def close(self) -> None:
        self.manager.close()
        if self.tier is not None:
            self.tier.close()
        self.scheduler.close(WAIT_S)
        self.pool.close()


@pytest.mark.parametrize("layer_buffers", [2, 3, 6])
def test_a_prompt_in_growing_requests(layer_buffers: int) -> None:
    model = Model(layer_buffers)
    tokens = list(range(3, 40))
    table = [9, 2, 11, 5, 3, 12, 7, 8, 1, 0]
    ends = [10, 11, 24, 37]
    computed = []
    for end in ends:
        computed += model.prefill(tokens[:end], table)
        assert model.wrong == []
    assert computed == [10, 3, 16, 13]  # what lies behind the last full block is computed once more
    again = model.prefill(tokens, table[::-1])
    assert (again, model.wrong) == ([1], [])
    model.close()


@pytest.mark.parametrize("how", ["load", "compute", "sooner", None])
def test_chunks_of_one_request_are_refused(how: How | None) -> None:
    """Nothing of a chunk stays on the device for the next one."""
    model = Model(2)
    with pytest.raises(ValueError, match="chunk_tokens = 8 must be None: the layers of the device cache share buffers"):
        model.manager.request(list(range(9)), [0, 1, 2], chunk_tokens=8, how=how)
    assert not model.scheduler.in_flight()
    model.close()


class Losing(FilesEngine):
    """The object of this number among those that are read does not come."""

    lost: int | None = None

    def read(self, items: Sequence[Read]) -> None:
        there = []
        for item in items:
            if self.lost == 0:
                item.ended(Outcome.FAILED)
            else:
                there.append(item)
            self.lost = None if not self.lost else self.lost - 1
        super().read(there)


@pytest.mark.parametrize(("layer_buffers", "computed"), [(2, [1, 37]), (6, [1, 25])])
def test_a_block_of_the_prefix_does_not_come(tmp_path: Path, layer_buffers: int, computed: list[int]) -> None:
    """Those before it have come, but on a ring they do not stay for the pass that is run again."""
    engine = Losing({tmp_path: 1 << 24})
    model = Model(layer_buffers, engine)
    tokens = list(range(3, 40))
    table = [9, 2, 11, 5, 3, 12, 7, 8, 1, 0]
    assert model.prefill(tokens, table) == [37]
    model.manager.flush(WAIT_S)
    assert model.manager.evict(32) == 9  # all of them lie in the tier
    engine.lost = 3
    assert model.prefill(tokens, table[::-1]) == computed
    assert model.wrong == []
    model.close()
