"""The tests of the permute and memcpy families once more, on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_memcpy import (  # noqa: F401
    TestErrors as TestMemcpyErrors,
)
from tests.ops.test_memcpy import (  # noqa: F401
    test_a_source_may_be_read_more_than_once,
    test_empty_lists,
    test_every_alignment_of_both_sides,
    test_forms_of_lists,
    test_one_large_piece_among_small_ones,
    test_one_size_for_all,
    test_pieces_of_no_bytes,
    test_sizes_of_all_magnitudes_in_one_list,
)
from tests.ops.test_permute_blocks import (  # noqa: F401
    test_a_result_is_allocated_where_the_chunks_are,
    test_addresses_for_chunks,
    test_dtypes,
    test_forms_of_addresses,
    test_misaligned_addresses,
    test_nothing_to_do,
    test_one_chunk_may_be_read_more_than_once,
    test_operational_takes_chunks_of_any_rank,
    test_operational_there_and_back,
    test_universal_there_and_back,
)
from tests.ops.test_permute_cache import (  # noqa: F401
    TestErrors as TestCacheErrors,
)
from tests.ops.test_permute_cache import (  # noqa: F401
    TestReshard,
    test_a_block_may_be_read_twice,
    test_a_latent_cache,
    test_an_empty_list_of_ids,
    test_caches_of_different_lengths,
    test_forms_of_ids,
    test_many_layers_and_blocks,
)
from tests.ops.test_permute_cache import test_dtypes as test_dtypes_of_caches  # noqa: F401
from tests.ops.test_permute_errors import (  # noqa: F401
    test_addresses,
    test_counts,
    test_layouts,
    test_memory_that_overlaps,
    test_number_of_chunks,
    test_out_of_the_right_size_but_without_memory,
    test_shape_and_dtype_of_the_dense_tensor,
    test_shapes_and_dtypes_of_chunks,
    test_tensors_that_are_not_contiguous,
    test_the_case_works_when_nothing_is_changed,
    test_types,
)
