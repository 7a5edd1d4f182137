"""The tests of the swap operators once more, with caches on the GPU and page-locked host memory."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_swap_cache_all_layers import (  # noqa: F401
    test_a_tuple_of_caches_and_addresses_is_returned_as_it_is,
    test_empty_lists,
    test_every_dtype_block_size_and_cache_size_in_one_call,
    test_layer_counts,
    test_one_cache_may_be_saved_to_two_places,
    test_one_host_pool_may_be_loaded_into_two_caches,
)
from tests.ops.test_swap_cache_all_layers import (  # noqa: F401
    test_one_source_many_targets as test_one_source_many_targets_in_all_layers,
)
from tests.ops.test_swap_cache_layout import (  # noqa: F401
    test_dtypes,
    test_layers_with_more_blocks,
    test_no_blocks_move_nothing,
    test_one_source_has_many_targets,
    test_shapes,
    test_six_arguments_fill_positions_in_order,
    test_tensors_that_do_not_fit_each_other,
    test_wrong_arguments,
)
from tests.ops.test_swap_cache_per_layer import (  # noqa: F401
    test_a_cache_that_requires_a_gradient,
    test_a_pool_of_no_blocks,
    test_an_empty_list_moves_nothing,
    test_an_empty_list_with_any_address,
    test_dtypes_and_ranks,
    test_every_block,
    test_forms_of_ids,
    test_many_threads_at_once,
    test_neighbours_in_ascending_and_descending_order,
    test_numpy_integers_as_scalars_and_any_rank,
    test_odd_block_sizes_and_misaligned_addresses,
    test_one_source_many_targets,
)
from tests.ops.test_swap_errors import (  # noqa: F401
    TestEveryOperator,
    TestListsOfTensors,
    layers,
    test_traced_as_a_whole_it_is_refused,
)
