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
from .swap import (
    swap_cache_all_layers,
    swap_cache_all_layers_async,
    swap_cache_per_layer,
    swap_cache_per_layer_async,
    transfer_blocks,
)

__all__ = [
    "concat_and_cache_mla",
    "convert_fp8",
    "convert_layout",
    "copy_blocks",
    "copy_single_block",
    "gather_cache",
    "reshape_and_cache",
    "reshape_and_cache_dynamic",
    "scatter_cache",
    "swap_blocks",
    "swap_cache_all_layers",
    "swap_cache_all_layers_async",
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
    "transfer_blocks",
]
