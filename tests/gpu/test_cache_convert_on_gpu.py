"""What only a GPU shows of the operators that convert caches: streams, capture into graphs, large memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.gpu.delay import busy, cupy_stream
from tests.machine import Machine, bits_of
from tests.ops.cache_conformance import Cache, Sequences, check_rows, sequences
from tests.ops.test_scatter_cache import as_tensor, random_rows
from tests.reference import cache_convert as reference
from tests.reference import float_formats

LONG_MS = 150.0
BEYOND_INT32 = 2**31 + 2**20


def test_tensors_on_different_devices(machine: Machine) -> None:
    cache = Cache(machine, 6, 2, 4, 8, "float32")
    used = sequences([7, 9], 6, 4)
    table, lengths = used.tensors(machine)
    tokens = as_tensor(machine, random_rows((16, 2, 8), 4), "float32")
    message = "block_table and cache are on different devices; both must be on one"
    with pytest.raises(ValueError, match=message):
        ops.gather_cache(cache.tensor, table.cpu(), lengths, total_tokens=16)
    with pytest.raises(ValueError, match="cu_seq_lens and cache are on different devices"):
        ops.scatter_cache(tokens, cache.tensor, table, lengths.cpu())
    with pytest.raises(ValueError, match="tokens and cache are on different devices"):
        ops.scatter_cache(tokens.cpu(), cache.tensor, table, lengths)
    starts = paddle.to_tensor(np.zeros(2, np.int64), place=paddle.CPUPlace())
    with pytest.raises(ValueError, match="starts and cache are on different devices"):
        ops.gather_cache(cache.tensor, table, lengths, total_tokens=16, starts=starts)
    with pytest.raises(ValueError, match="out and cache are on different devices"):
        ops.gather_cache(cache.tensor, table, lengths, out=tokens.cpu())
    strided = paddle.to_tensor(np.zeros((16, 2, 9), np.float32), place=paddle.CPUPlace())[:, :, :8]
    with pytest.raises(ValueError, match=rf"tokens is on .*cpu.*, cache on {re.escape(str(cache.tensor.place))}"):
        ops.scatter_cache(strided, cache.tensor, table, lengths)
    scale = paddle.to_tensor(np.ones(1, np.float32), place=paddle.CPUPlace())
    with pytest.raises(ValueError, match="scale and source are on different devices"):
        ops.convert_fp8(tokens, to="fp8", scale=scale)
    cache.check_untouched()


def scattering(machine: Machine) -> tuple[Cache, paddle.Tensor, np.ndarray, Sequences]:
    cache = Cache(machine, 9, 3, 4, 16, "float32")
    rows = random_rows((22, 3, 16), 4)
    return cache, as_tensor(machine, rows, "float32"), rows, sequences([9, 13], 9, 4)


def test_runs_on_the_stream_that_is_named(machine: Machine, paddle_stream: int, other_stream: Any) -> None:
    """On a stream that is kept busy nothing has been written yet; on another one it has."""
    cache, tokens, rows, used = scattering(machine)
    table, lengths = used.tensors(machine)
    ops.scatter_cache(tokens, cache.tensor, *sequences([0, 0], 9, 4).tensors(machine))  # loads the kernel
    machine.synchronize()
    busy(paddle_stream, LONG_MS)
    behind_paddle = cupy_stream(paddle_stream).record()
    ops.scatter_cache(tokens, cache.tensor, table, lengths, stream=other_stream)
    result = other_stream.record()
    result.synchronize()
    assert not behind_paddle.done, "it waited for Paddle's stream"
    cache.check(reference.scattered(rows, cache.hnd, used.table, used.lengths))


def test_waits_for_the_work_on_its_stream(machine: Machine, paddle_stream: int) -> None:
    """Without a stream it is ordered behind what writes its input on Paddle's."""
    import cupy

    values = paddle.to_tensor(np.ones(1 << 16, np.float32), place=machine.place)
    ops.convert_fp8(values, to="fp8")
    machine.synchronize()
    busy(paddle_stream, LONG_MS)
    cupy.cuda.runtime.memsetAsync(values.data_ptr(), 0, values.size * 4, paddle_stream)
    codes = ops.convert_fp8(values, to="fp8")
    machine.synchronize()
    assert not bits_of(codes).any()


def test_capture_into_a_graph(machine: Machine, other_stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids are read when the graph runs: it writes to the blocks that the table names then."""
    import cupy

    cache, tokens, rows, used = scattering(machine)
    table, lengths = used.tensors(machine)
    ops.scatter_cache(tokens, cache.tensor, *sequences([0, 0], 9, 4).tensors(machine))  # loads the kernel
    machine.synchronize()
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")  # nothing may wait for a stream that is captured
    other_stream.begin_capture()
    ops.scatter_cache(tokens, cache.tensor, table, lengths, stream=other_stream)
    graph = other_stream.end_capture()
    machine.synchronize()
    cache.check_untouched()
    expected = cache.hnd
    for seed in (0, 5):
        changed = sequences([9, 13], 9, 4, seed=seed).table
        cupy.cuda.runtime.memcpy(table.data_ptr(), changed.ctypes.data, changed.nbytes, 1)
        graph.launch(other_stream)
        expected = reference.scattered(rows, expected, changed, used.lengths)
        cache.check(expected)


def test_a_cache_and_rows_beyond_32_bit_offsets(machine: Machine) -> None:
    """All blocks in reverse order: every row of more than 2 GiB has another place."""
    heads, block_size, head_size = 4, 64, 128
    blocks = BEYOND_INT32 // (heads * block_size * head_size) + 1
    block = np.random.default_rng(0).integers(0, 256, (heads, block_size, head_size), np.uint8)
    hnd = np.empty((blocks, heads, block_size, head_size), np.uint8)
    hnd[:] = block
    hnd[:, 0, 0, :8] = np.arange(blocks, dtype=np.int64)[:, None].view(np.uint8)
    cache = paddle.to_tensor(hnd, place=machine.place)
    table = np.arange(blocks)[None, ::-1]
    used = Sequences(table, np.array([0, blocks * block_size]))
    rows = ops.gather_cache(cache, *used.tensors(machine), total_tokens=used.tokens)
    expected = hnd[::-1].transpose(0, 2, 1, 3).reshape(used.tokens, heads, head_size)
    assert (rows.numpy() == expected).all()

    used = Sequences(np.arange(blocks)[None], np.array([0, used.tokens]))
    ops.scatter_cache(rows, cache, *used.tensors(machine))
    assert (cache.numpy() == hnd[::-1]).all()
    packed = ops.convert_layout(cache, kind="value", source_layout="HND", target_layout="packed")
    assert (packed.numpy() == hnd[::-1].transpose(0, 1, 3, 2)).all()


def test_converting_beyond_32_bit_counts(machine: Machine) -> None:
    patterns = np.arange(65536, dtype=np.uint16).view(np.float16)
    count = BEYOND_INT32 + 5
    source = paddle.to_tensor(np.resize(patterns, count), place=machine.place)
    codes = ops.convert_fp8(source, to="fp8", scale=0.3)
    expected = float_formats.quantize(patterns, 0.3, "fp8_e4m3")
    result = bits_of(codes).ravel()
    whole = count // 65536 * 65536
    assert (result[:whole].reshape(-1, 65536) == expected).all()
    np.testing.assert_array_equal(result[whole:], expected[: count - whole])
    del source, result
    back = ops.convert_fp8(codes, to="float16", scale=0.3)
    decoded = float_formats.dequantize(expected, 0.3, "fp8_e4m3", "float16").view(np.uint16)
    result = back.numpy().view(np.uint16)
    assert (result[:whole].reshape(-1, 65536) == decoded).all()
    np.testing.assert_array_equal(result[whole:], decoded[: count - whole])


@pytest.mark.parametrize(("form", "scale"), [("e4m3", 0.3), ("e4m3", 1.0), ("e5m2", 7.0), ("e5m2", 1e30)])
def test_a_fifth_of_all_float32_to_fp8(machine: Machine, form: str, scale: float) -> None:
    """What they become the CPU kernels say, which are tested against NumPy."""
    bits = np.arange(0, 2**32, 5, dtype=np.uint32).view(np.float32)
    by = {"to": "fp8", "fp8_format": form, "scale": scale}
    results = [
        bits_of(ops.convert_fp8(paddle.to_tensor(bits, place=place), **by))
        for place in (machine.place, paddle.CPUPlace())
    ]
    assert (results[0] == results[1]).all()


@pytest.mark.parametrize("form", float_formats.FORMATS)
def test_every_code_with_many_scales(machine: Machine, form: str) -> None:
    """One head for each scale, among them the extreme ones."""
    random = np.random.default_rng(0).integers(0, 2**32, 500, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scales = np.concatenate([random, [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-45, 3e38]]).astype(np.float32)
    codes = np.ascontiguousarray(np.broadcast_to(np.arange(256, dtype=np.uint8), (1, len(scales), 1, 256)))
    stored = codes.view(np.int8) if form == "int8" else codes
    used = sequences([1], 1, 1)
    for out_dtype in float_formats.PLAIN_TYPES:
        results = []
        for place in (machine.place, paddle.CPUPlace()):
            here = Machine(place, machine.allocate_host, machine.synchronize)
            results.append(ops.gather_cache(
                paddle.to_tensor(stored, place=place), *used.tensors(here), total_tokens=1, kv_cache_dtype=form,
                out_dtype=out_dtype, scale=paddle.to_tensor(scales, place=place),
            ))  # fmt: skip
        kind: Any = float_formats.bits_type(out_dtype)
        check_rows(machine, results[0], results[1].numpy().view(kind), out_dtype)
