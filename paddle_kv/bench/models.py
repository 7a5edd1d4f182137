"""KV caches of known models, as one rank of a tensor-parallel deployment holds them."""

from __future__ import annotations

from ..layout import KVCacheSpec

# layers, KV heads, head size; DeepSeek-V3 keeps one latent vector (512 + 64) that tensor parallelism does not split.
_MODELS: dict[str, tuple[int, int, int]] = {
    "Llama-3.1-8B": (32, 8, 128),
    "Llama-3.1-70B": (80, 8, 128),
    "Qwen3-32B": (64, 8, 128),
    "DeepSeek-V3": (61, 1, 576),
}
NAMES = tuple(_MODELS)


def model_spec(name: str, *, tp: int, tokens_per_block: int, num_layers: int | None = None) -> KVCacheSpec:
    """The spec of one rank.

    Args:
        name: one of ``NAMES``.
        tp: ranks that share the KV heads.
        tokens_per_block: block size.
        num_layers: fewer layers than the model has, for a short run.

    Raises:
        ValueError: unknown name, KV heads that ``tp`` does not divide, or more layers than the model has.
    """
    if name not in _MODELS:
        raise ValueError(f"model = {name!r} must be one of {', '.join(NAMES)}")
    layers, heads, width = _MODELS[name]
    latent = name == "DeepSeek-V3"
    if tp < 1 or (not latent and heads % tp):
        raise ValueError(f"tp = {tp} must divide the {heads} KV heads of {name}")
    if num_layers is not None and not 1 <= num_layers <= layers:
        raise ValueError(f"layers = {num_layers} must be in [1, {layers}], the layers of {name}")
    return KVCacheSpec(
        num_layers=num_layers or layers,
        num_kv_heads=1 if latent else heads // tp,
        head_dim=width,
        block_size=tokens_per_block,
        dtype="bfloat16",
        latent=latent,
    )
