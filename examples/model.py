"""A small decoder-only transformer with a paged KV cache: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Tokens are bytes and the weights are random with a fixed seed, so the text that it writes means nothing; but every token
depends on all cached keys and values, which is what the demo needs. Each layer is cut where a server has to act between
its parts: `project` needs nothing from the cache, `attend` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import functional

from paddle_kv import KVCacheSpec


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 8
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    ffn_size: int = 704
    vocab_size: int = 256
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    seed: int = 7

    def cache_spec(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype="float32",
        )


class Layer:
    """The weights of one layer."""

    def __init__(self, config: ModelConfig, random: np.random.Generator) -> None:
        hidden, query_size, kv_size = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        # Sharp attention: scores with a spread of 3 pick few positions, so one wrong cached vector changes the tokens.
        self.query = _weight(random, hidden, query_size, gain=3.0)
        self.key = _weight(random, hidden, kv_size)
        self.value = _weight(random, hidden, kv_size)
        self.output = _weight(random, query_size, hidden)
        self.gate = _weight(random, hidden, config.ffn_size)
        self.up = _weight(random, hidden, config.ffn_size)
        self.down = _weight(random, config.ffn_size, hidden)
        self.attention_norm = paddle.ones([hidden])
        self.ffn_norm = paddle.ones([hidden])


class Model:
    def __init__(self, config: ModelConfig) -> None:
        random = np.random.default_rng(config.seed)
        self.config = config
        self.embedding = paddle.to_tensor(
            random.standard_normal((config.vocab_size, config.hidden_size), dtype=np.float32)
        )
        self.layers = [Layer(config, random) for _ in range(config.num_layers)]
        self.final_norm = paddle.ones([config.hidden_size])
        self.head = _weight(random, config.hidden_size, config.vocab_size)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """``[tokens, hidden]``"""
        return functional.embedding(paddle.to_tensor(list(tokens), dtype="int64"), self.embedding)

    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query ``[tokens, heads, head_dim]``, key and value ``[tokens, kv_heads, head_dim]``, rotated where needed."""
        config, weights = self.config, self.layers[layer]
        count = hidden.shape[0]
        normed = self._rms_norm(hidden, weights.attention_norm)
        query = (normed @ weights.query).reshape([count, config.num_heads, config.head_dim])
        key = (normed @ weights.key).reshape([count, config.num_kv_heads, config.head_dim])
        value = (normed @ weights.value).reshape([count, config.num_kv_heads, config.head_dim])
        return self._rotate(query, positions), self._rotate(key, positions), value

    def attend(
        self, layer: int, hidden: Tensor, query: Tensor, keys: Tensor, values: Tensor, positions: Tensor
    ) -> Tensor:
        """The rest of the layer: attention over ``[kv_heads, length, head_dim]`` keys and values, then the SwiGLU block."""
        config, weights = self.config, self.layers[layer]
        count, length = query.shape[0], keys.shape[1]
        groups = config.num_heads // config.num_kv_heads
        grouped = query.transpose([1, 0, 2]).reshape([config.num_kv_heads, groups * count, config.head_dim])
        scores = paddle.matmul(grouped, keys, transpose_y=True) / math.sqrt(config.head_dim)
        scores = scores.reshape([config.num_kv_heads, groups, count, length])
        future = paddle.arange(length).unsqueeze(0) > positions.unsqueeze(1)
        scores = scores + future.astype("float32") * -1e30
        shares = functional.softmax(scores, axis=-1).reshape([config.num_kv_heads, groups * count, length])
        mixed = (shares @ values).reshape([config.num_heads, count, config.head_dim])
        hidden = hidden + mixed.transpose([1, 0, 2]).reshape([count, -1]) @ weights.output
        normed = self._rms_norm(hidden, weights.ffn_norm)
        return hidden + (functional.silu(normed @ weights.gate) * (normed @ weights.up)) @ weights.down

    def next_token(self, hidden: Tensor) -> int:
        """The most likely token after the last row of ``hidden``."""
        logits = self._rms_norm(hidden[-1:], self.final_norm) @ self.head
        return int(paddle.argmax(logits).item())

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        mean_square = (hidden * hidden).mean(axis=-1, keepdim=True)
        return hidden * paddle.rsqrt(mean_square + self.config.norm_epsilon) * weight

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """RoPE with the two halves of a head as the rotated pairs."""
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** (-paddle.arange(half, dtype="float32") / half)
        angles = (positions.astype("float32").unsqueeze(1) * frequencies).unsqueeze(1)
        cosine, sine = paddle.cos(angles), paddle.sin(angles)
        left, right = heads[..., :half], heads[..., half:]
        return paddle.concat([left * cosine - right * sine, right * cosine + left * sine], axis=-1)


def read_pages(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of the sequence whose blocks ``block_table`` names, as ``[kv_heads, length, head_dim]``.

    On a GPU this is what block_multihead_attention does inside its kernel. ``cache`` is ``[blocks, kv_heads, block_size,
    head_dim]``; only the named blocks are touched, so others may be in transfer meanwhile.
    """
    pages = paddle.gather(cache, block_table, axis=0)
    heads, head_dim = cache.shape[1], cache.shape[3]
    return pages.transpose([1, 0, 2, 3]).reshape([heads, -1, head_dim])[:, :length]


def _weight(random: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> Tensor:
    values = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / math.sqrt(rows))
    return paddle.to_tensor(values)
