"""The operators, as functions on Paddle tensors."""

from .cache_write import (
    concat_and_cache_mla,
    convert_fp8,
    convert_layout,
    gather_cache,
    reshape_and_cache,
    reshape_and_cache_dynamic,
    scatter_cache,
)
from .copy import copy_blocks, copy_single_block, swap_blocks
from .memcpy import build_info, has_memcpy_batch_async, is_stub_build, memcpy_batch, vectorized_copy
from .permute import (
    block_from_operational,
    block_from_universal,
    cache_from_universal,
    operational_from_block,
    reshard_universal,
    universal_from_block,
    universal_from_cache,
)
from .swap import (
    swap_cache_all_layers,
    swap_cache_all_layers_async,
    swap_cache_layout,
    swap_cache_per_layer,
    swap_cache_per_layer_async,
    transfer_blocks,
)
from .topk import gather_topk_rows

__all__ = [
    "block_from_operational",
    "block_from_universal",
    "build_info",
    "cache_from_universal",
    "concat_and_cache_mla",
    "convert_fp8",
    "convert_layout",
    "copy_blocks",
    "copy_single_block",
    "gather_cache",
    "gather_topk_rows",
    "has_memcpy_batch_async",
    "is_stub_build",
    "memcpy_batch",
    "operational_from_block",
    "reshape_and_cache",
    "reshape_and_cache_dynamic",
    "reshard_universal",
    "scatter_cache",
    "swap_blocks",
    "swap_cache_all_layers",
    "swap_cache_all_layers_async",
    "swap_cache_layout",
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
    "transfer_blocks",
    "universal_from_block",
    "universal_from_cache",
    "vectorized_copy",
]
