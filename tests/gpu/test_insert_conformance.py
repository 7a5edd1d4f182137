"""The tests of reshape_and_cache once more, with all tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_reshape_and_cache import (  # noqa: F401
    TestCheckMode,
    TestPadding,
    TestPrompts,
    TestScales,
    TestStrides,
    TestWholeRows,
    TestWrongArguments,
    test_blocks_that_a_transfer_is_moving_are_reported,
    test_caches_of_an_fp8_dtype,
    test_consecutive_slots,
    test_every_bit_pattern,
    test_head_sizes,
    test_heads_and_block_sizes,
    test_how_paddle_uint8_rounds_is_said,
    test_layouts_dtypes_and_formats,
    test_no_tokens,
    test_runs_of_slots_with_gaps,
    test_slots_of_32_bits_and_with_a_stride,
    test_slots_outside_the_cache_are_never_written,
    test_token_counts,
    test_two_hundred_thousand_tokens,
)
