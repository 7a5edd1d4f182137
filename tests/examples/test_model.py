"""The model against a straightforward NumPy one in float64, and its paged cache."""

import time

import numpy as np
import paddle
import pytest
from model import Model, ModelConfig, read_pages
from serving import blocks_for, run_chunk
from timeline import Recorder

from paddle_kv import DeviceCache

CONFIG = ModelConfig(num_layers=3, hidden_size=24, num_heads=6, num_kv_heads=2, head_dim=10, ffn_size=40, seed=5)
BLOCK_SIZE = 7
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 45)]


@pytest.fixture(scope="module")
def model():
    return Model(CONFIG)


def serve(model, chunk_sizes, table):
    """The cache and the next token after each chunk."""
    cache = DeviceCache(CONFIG.cache_spec(BLOCK_SIZE), 1 + max(table), device="cpu")
    predictions, position = [], 0
    for size in chunk_sizes:
        chunk = TOKENS[position : position + size]
        predictions.append(run_chunk(model, cache, table, position, chunk, Recorder(time.perf_counter)))
        position += size
    return cache, predictions


def numpy_model(model, tokens):
    """Keys and values of all layers as [tokens, kv_heads, head_dim], and the most likely next token."""

    def weight(tensor):
        return tensor.numpy().astype(np.float64)

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * weight(gain)

    def rotate(x):
        half = CONFIG.head_dim // 2
        angle = np.arange(len(x))[:, None, None] * CONFIG.rope_theta ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    x, count, caches = weight(model.embedding)[tokens], len(tokens), []
    for layer in model.layers:
        normed = norm(x, layer.attention_norm)
        query = rotate((normed @ weight(layer.query)).reshape(count, CONFIG.num_heads, -1))
        key = rotate((normed @ weight(layer.key)).reshape(count, CONFIG.num_kv_heads, -1))
        value = (normed @ weight(layer.value)).reshape(count, CONFIG.num_kv_heads, -1)
        caches.append((key, value))
        heads = []
        for head in range(CONFIG.num_heads):
            of = head // (CONFIG.num_heads // CONFIG.num_kv_heads)
            scores = query[:, head] @ key[:, of].T / np.sqrt(CONFIG.head_dim)
            shares = np.exp(np.where(np.tri(count, dtype=bool), scores, -np.inf))
            heads.append(shares / shares.sum(-1, keepdims=True) @ value[:, of])
        x = x + np.concatenate(heads, -1) @ weight(layer.output)
        normed = norm(x, layer.ffn_norm)
        gate = normed @ weight(layer.gate)
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ weight(layer.up))) @ weight(layer.down)
    return caches, int(np.argmax(norm(x[-1], model.final_norm) @ weight(model.head)))


@pytest.mark.parametrize("chunk_sizes", [(45,), (1, 44), (20, 1, 1, 6, 17)])
def test_against_numpy(model, chunk_sizes):
    table = [9, 2, 5, 11, 0, 7, 3]
    cache, predictions = serve(model, chunk_sizes, table)
    expected, token = numpy_model(model, TOKENS)
    block_table = paddle.to_tensor(table)
    for layer, (key, value) in enumerate(expected):
        for name, want in (("key", key), ("value", value)):
            got = read_pages(cache.tensor(name, layer), block_table, len(TOKENS)).numpy()
            np.testing.assert_allclose(got.swapaxes(0, 1), want, rtol=1e-4, atol=1e-5)
    assert predictions[-1] == token


def test_same_bits_in_whatever_blocks_the_cache_is(model):
    tables = [list(range(7)), [6, 13, 1, 0, 8, 4, 10]]
    (first, first_tokens), (second, second_tokens) = (serve(model, (30, 1, 14), table) for table in tables)
    assert first_tokens == second_tokens
    for layer in range(CONFIG.num_layers):
        for name in ("key", "value"):
            pages = [
                read_pages(cache.tensor(name, layer), paddle.to_tensor(table), len(TOKENS)).numpy()
                for cache, table in ((first, tables[0]), (second, tables[1]))
            ]
            assert pages[0].tobytes() == pages[1].tobytes()


def test_tokens_depend_on_the_oldest_cached_values(model):
    table = list(range(7))
    cache, _ = serve(model, (44,), table)
    answers = set()
    for shift in (0.0, 3.0, -3.0, 9.0):
        cache.tensor("value", 0)[0] = cache.tensor("value", 0)[0] + shift
        answers.add(run_chunk(model, cache, table, 44, TOKENS[44:], Recorder(time.perf_counter)))
    assert len(answers) > 1


def test_blocks_for():
    spec = CONFIG.cache_spec(BLOCK_SIZE)
    assert [blocks_for(tokens, spec) for tokens in (0, 1, 7, 8, 14, 15)] == [0, 1, 1, 2, 2, 3]
