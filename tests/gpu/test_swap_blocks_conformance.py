"""The tests of swap_blocks once more, with caches on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_swap_blocks import (  # noqa: F401
    test_a_block_that_would_be_exchanged_twice,
    test_an_empty_mapping_moves_nothing,
    test_dtypes_and_ranks,
    test_many_caches_of_different_block_sizes,
    test_more_pairs_than_one_launch_holds,
    test_odd_block_sizes_at_odd_addresses,
    test_twice_is_nothing,
)
