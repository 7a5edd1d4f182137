"""The tests of reshape_and_cache_dynamic once more, with all tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_reshape_and_cache_dynamic import (  # noqa: F401
    TestWrongArguments,
    test_head_sizes,
    test_layouts_formats_and_dtypes,
    test_many_tokens,
    test_no_tokens,
    test_rows_of_zeros_and_of_what_is_not_finite,
    test_slices_of_a_fused_qkv_and_inner_strides,
    test_slots_outside_the_caches,
)
