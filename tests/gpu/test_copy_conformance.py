"""The tests of the copy family once more, with caches on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_copy_blocks import (  # noqa: F401
    TestWrongCaches,
    test_an_empty_mapping_moves_nothing,
    test_an_empty_tensor_moves_nothing,
    test_blocks_large_enough_to_be_cut,
    test_blocks_that_a_transfer_is_moving_are_reported,
    test_caches_of_different_length,
    test_dtypes_and_ranks,
    test_forms_of_the_mapping,
    test_ids_of_16_bits_and_of_more,
    test_ids_out_of_range,
    test_latent_caches_with_their_scales,
    test_many_caches_of_different_block_sizes,
    test_mappings_of_the_wrong_type,
    test_more_pairs_than_one_launch_holds,
    test_no_caches_at_all,
    test_odd_block_sizes_at_odd_addresses,
    test_one_source_many_targets,
    test_pairs_that_make_no_copy,
)
from tests.ops.test_copy_single_block import (  # noqa: F401
    test_block_sizes,
    test_dtypes,
    test_the_caches_are_returned,
    test_wrong_ids,
)
