"""Both ways to an operator, with tensors on the GPU."""

# The imported tests run here with this folder's `machine`.
from tests.ops.test_eager_call import *  # noqa: F403
