"""The tests of concat_and_cache_mla once more, with all tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_concat_and_cache_mla import (  # noqa: F401
    test_blocks_that_are_written_are_told,
    test_caches_in_which_the_head_is_a_dimension,
    test_check_mode,
    test_dtypes_formats_and_sizes,
    test_no_tokens,
    test_other_mistakes,
    test_scales,
    test_shapes_that_do_not_fit,
    test_slices_of_one_projection,
    test_slots_outside_the_cache_are_never_written,
    test_slots_with_a_stride,
    test_token_counts,
)
