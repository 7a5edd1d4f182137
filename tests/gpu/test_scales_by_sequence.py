"""The tests of a scale for each sequence and head once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_scales_by_sequence import *  # noqa: F403
