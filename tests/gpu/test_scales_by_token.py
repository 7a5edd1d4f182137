"""The tests of a scale for each token and head once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_scales_by_token import *  # noqa: F403
