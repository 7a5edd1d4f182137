"""The tests of caches with strides once more, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_strided_caches import *  # noqa: F403
