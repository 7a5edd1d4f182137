"""Host memory in which all layers of a token lie together, keys and values apart: blocks of one token at a stride."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, SIZE = 3, 5, 4, 2, 9
WAIT_S = 60


def tokens_of(blocks: list[int]) -> list[int]:
    return [block * BLOCK_SIZE + token for block in blocks for token in range(BLOCK_SIZE)]


@pytest.mark.parametrize("names", [("key", "value"), ("latent",)])
def test_every_token_of_every_layer(names: tuple[str, ...]) -> None:
    random = np.random.default_rng(1)
    latent = names == ("latent",)
    row = (SIZE,) if latent else (HEADS, SIZE)
    spec = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1 if latent else HEADS, head_dim=SIZE, block_size=1,
                       dtype="float32", layout="NHD", latent=latent)  # fmt: skip
    paged = {name: random.standard_normal((LAYERS, BLOCKS, BLOCK_SIZE, *row)).astype(np.float32) for name in names}
    tensors = {name: [paddle.to_tensor(layer, place=paddle.CPUPlace()) for layer in paged[name]] for name in names}
    cache = DeviceCache.adopt(
        spec, {name: [t.reshape([BLOCKS * BLOCK_SIZE, 1, *row]) for t in tensors[name]] for name in names}
    )
    for name in names:
        assert cache.tensor(name, 2).data_ptr() == tensors[name][2].data_ptr(), "a view"
    before = random.standard_normal((len(names), 7 * BLOCK_SIZE, LAYERS, *row)).astype(np.float32)
    memory = before.copy()
    pool = HostPool.adopt(
        spec,
        {name: [memory[i, 0, layer].ctypes.data for layer in range(LAYERS)] for i, name in enumerate(names)},
        7 * BLOCK_SIZE,
        strides_bytes={name: memory.strides[1] for name in names},
    )
    with LayerwiseScheduler(cache, pool) as scheduler:
        scheduler.offload(tokens_of([4, 1]), tokens_of([0, 6])).wait(WAIT_S)
        expected = before.copy()
        for i, name in enumerate(names):
            for device, host in ((4, 0), (1, 6)):
                expected[i, host * BLOCK_SIZE : (host + 1) * BLOCK_SIZE] = paged[name][:, device].swapaxes(0, 1)
        np.testing.assert_array_equal(memory, expected)
        scheduler.onload(tokens_of([6, 3]), tokens_of([2, 0])).wait(WAIT_S)
    for i, name in enumerate(names):
        after = paged[name].copy()
        for host, device in ((6, 2), (3, 0)):
            after[:, device] = expected[i, host * BLOCK_SIZE : (host + 1) * BLOCK_SIZE].swapaxes(0, 1)
        for layer, tensor in enumerate(tensors[name]):
            np.testing.assert_array_equal(tensor.numpy(), after[layer])
    pool.close()
