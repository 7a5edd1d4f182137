"""What the processes of these tests import once, before they are made."""

import zlib  # noqa: F401  before Paddle

import paddle  # noqa: F401

import tests.peers.prefill  # noqa: F401
