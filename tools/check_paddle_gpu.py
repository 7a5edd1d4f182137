"""Exits with 0 if an operator of Paddle itself gives the right answer on the GPU.

A Paddle that was not compiled for the GPU's architecture may return zeros without any error. A process of its own,
because Paddle 2.6 ends the process where a GPU cannot be used.
"""

import sys
import zlib  # noqa: F401  before Paddle, which exports its own deflate

import numpy as np
import paddle

if paddle.device.cuda.device_count() == 0:
    sys.exit("Paddle sees no GPU")
left = np.arange(1000, dtype="float32")
sums = paddle.to_tensor(left, place=paddle.CUDAPlace(0)) + paddle.to_tensor(left, place=paddle.CUDAPlace(0))
product = paddle.to_tensor(np.eye(32, dtype="float32") * 3, place=paddle.CUDAPlace(0)).matmul(
    paddle.to_tensor(np.ones((32, 32), "float32"), place=paddle.CUDAPlace(0))
)
sys.exit(not ((sums.numpy() == 2 * left).all() and (product.numpy() == 3).all()))
