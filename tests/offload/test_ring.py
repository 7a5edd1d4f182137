"""A manager whose device cache is a ring of layer buffers: a prompt is prefilled by requests of growing length."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.integrations import ForwardPass
from paddle_kv.offload import KVOffloadManager

WAIT_S = 20.0
SIZE = 4
SPEC = KVCacheSpec(num_layers=6, num_kv_heads=1, head_dim=2, block_size=SIZE, dtype="float32")


class Model:
    """Key and value of a token are made of it, of its position and of the layer."""

    def __init__(self, layer_buffers: int) -> None:
        self.cache = DeviceCache(SPEC, 16, "cpu", layer_buffers=layer_buffers)
        self.pool = HostPool(SPEC, 32)
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.manager = KVOffloadManager(self.scheduler)
        self.wrong: list[str] = []

    def tokens_of(self, tokens: list[int], layer: int, name: str) -> np.ndarray:
        made = np.array([1000 * layer + 10 * token + position for position, token in enumerate(tokens)], np.float32)
        return made + (0.5 if name == "value" else 0.0)

    def prefill(self, tokens: list[int], table: list[int]) -> int:
        """Tokens that were computed."""
        computed = 0
        with self.manager.request(tokens, table) as request:
            while True:
                with ForwardPass(request.loads, request.saves, timeout_s=WAIT_S) as layers:
                    for layer in range(SPEC.num_layers):
                        with layers.layer(layer):
                            self.layer(layer, tokens, table, request.start)
                computed += len(tokens) - request.start
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
        self.scheduler.close(WAIT_S)
        self.pool.close()


@pytest.mark.parametrize("layer_buffers", [2, 3, 6])
def test_a_prompt_in_growing_requests(layer_buffers: int) -> None:
    model = Model(layer_buffers)
    tokens = list(range(3, 40))
    table = [9, 2, 11, 5, 3, 12, 7, 8, 1, 0]
    ends = [10, 11, 24, 37]
    computed = [model.prefill(tokens[:end], table) for end in ends]
    assert model.wrong == []
    assert computed == [10, 3, 16, 13]  # what lies behind the last full block is computed once more
    again = model.prefill(tokens, table[::-1])
    assert (again, model.wrong) == (1, [])
    model.close()
