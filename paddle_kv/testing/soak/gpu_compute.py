"""Writes and compares blocks on a GPU, with kernels of its own: what is checked uses nothing of what is tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from ...memory import DeviceCache, HostPool
from . import pattern
from .compute import Writers
from .mismatch import Mismatch, SoakFailure

THREADS = 128
RECORD_FIELDS = 9  # found, block, layer * tensors + tensor, word, expected, actual, writer, step, side
SIDES = ("device", "host")

SOURCE = f"""
typedef unsigned long long word_t;

__device__ word_t expected_word(word_t content, word_t row, word_t index) {{
  word_t mixed = content * {pattern.CONTENT_FACTOR:#x}ull + row * {pattern.ROW_FACTOR:#x}ull
               + index * {pattern.WORD_FACTOR:#x}ull;
  mixed ^= mixed >> 29;
  mixed *= {pattern.MIX_FACTOR:#x}ull;
  return mixed ^ (mixed >> 32);
}}

// table: address, block bytes and stride of each row. given: block ids, writers, contents[block][layer of the call].
extern "C" __global__ void visit(const word_t* table, long long tensors, long long first_row, const word_t* given,
                                 long long blocks, long long layers, word_t step, word_t side, word_t* record,
                                 bool write) {{
  const word_t block = given[blockIdx.x];
  const word_t content = given[2 * blocks + blockIdx.x * layers + blockIdx.y / tensors];
  const word_t row = first_row + blockIdx.y;
  const word_t block_bytes = table[3 * row + 1];
  unsigned char* start = reinterpret_cast<unsigned char*>(table[3 * row]) + block * table[3 * row + 2];
  const bool aligned = reinterpret_cast<word_t>(start) % 8 == 0;
  for (word_t word = threadIdx.x; word * 8 < block_bytes; word += blockDim.x) {{
    const word_t expected = expected_word(content, row, word);
    unsigned char* at = start + word * 8;
    const word_t size = block_bytes - word * 8 < 8 ? block_bytes - word * 8 : 8;
    if (write) {{
      if (aligned && size == 8) {{
        *reinterpret_cast<word_t*>(at) = expected;
      }} else {{
        for (word_t i = 0; i < size; ++i) at[i] = expected >> (8 * i);
      }}
      continue;
    }}
    word_t actual = 0;
    if (aligned && size == 8) {{
      actual = *reinterpret_cast<volatile word_t*>(at);
    }} else {{
      for (word_t i = 0; i < size; ++i) actual |= static_cast<word_t>(at[i]) << (8 * i);
    }}
    const word_t mask = size == 8 ? ~0ull : (1ull << (8 * size)) - 1;
    if ((actual ^ expected) & mask && atomicCAS(record, 0ull, 1ull) == 0) {{
      record[1] = block;
      record[2] = row;
      record[3] = word;
      record[4] = expected & mask;
      record[5] = actual;
      record[6] = given[blocks + blockIdx.x];
      record[7] = step;
      record[8] = side;
    }}
  }}
}}

extern "C" __global__ void delay(word_t nanoseconds) {{
  word_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {{
    __nanosleep(500);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  }} while (now - start < nanoseconds);
}}
"""


class GpuCompute:
    """As :class:`~paddle_kv.testing.soak.compute.Compute`; the device finds differences, ``flush`` raises them."""

    def __init__(self, cache: DeviceCache, pool: HostPool, describe: Callable[[int], str]) -> None:
        self._spec = spec = cache.spec
        self._cache = cache  # the kernels hold bare addresses
        self._describe = describe
        self._device = cupy.cuda.Device(cache.device_id)
        rows = [(name, layer) for layer in range(spec.num_layers) for name in spec.tensor_names]
        with self._device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
            module = cupy.RawModule(code=SOURCE)
            self._visit, self._delay = module.get_function("visit"), module.get_function("delay")
            sizes = {name: spec.tensor_block_bytes(name) for name in spec.tensor_names}
            device_rows = [[cache.tensor(name, layer).data_ptr(), sizes[name], sizes[name]] for name, layer in rows]
            host_rows = [[pool.pointer(name, layer), sizes[name], pool.stride_bytes(name)] for name, layer in rows]
            self._tables = [cupy.asarray(table, np.uint64) for table in (device_rows, host_rows)]
            self._record = cupy.zeros(RECORD_FIELDS, np.uint64)
            self._delay((1,), (1,), (np.uint64(0),))
            self._device.synchronize()

    def fill(self, blocks: np.ndarray, layers: range, contents: np.ndarray) -> None:
        self._launch(blocks, layers, contents, np.zeros(len(blocks), np.int64), 0, write=True)

    def check(self, blocks: np.ndarray, layers: range, contents: np.ndarray, writers: Writers, step: int) -> None:
        self._launch(blocks, layers, contents, writers, step)

    def check_host(self, blocks: np.ndarray, layers: range, contents: np.ndarray, writers: Writers, step: int) -> None:
        self._launch(blocks, layers, contents, writers, step, side=1)

    def _launch(
        self,
        blocks: np.ndarray,
        layers: range,
        contents: np.ndarray,
        writers: Any,
        step: int,
        *,
        side: int = 0,
        write: bool = False,
    ) -> None:
        if not len(blocks):
            return
        tensors = len(self._spec.tensor_names)
        given = np.concatenate([blocks, np.asarray(writers), contents.ravel()]).astype(np.uint64)
        with self._device, self.stream:
            self._visit(
                (len(blocks), len(layers) * tensors),
                (THREADS,),
                (
                    self._tables[side],
                    np.int64(tensors),
                    np.int64(layers.start * tensors),
                    cupy.asarray(given),
                    np.int64(len(blocks)),
                    np.int64(len(layers)),
                    np.uint64(step),
                    np.uint64(side),
                    self._record,
                    np.bool_(write),
                ),
            )

    def delay(self, microseconds: float) -> None:
        with self._device, self.stream:
            self._delay((1,), (1,), (np.uint64(microseconds * 1e3),))

    def flush(self) -> None:
        with self._device, self.stream:
            found, block, row, word, expected, actual, writer, step, side = (int(x) for x in self._record.get())
        if not found:
            return
        layer, tensor = divmod(row, len(self._spec.tensor_names))
        mismatch = Mismatch(
            SIDES[side],
            block,
            layer,
            self._spec.tensor_names[tensor],
            word * pattern.WORD_BYTES,
            expected.to_bytes(8, "little").hex(),
            actual.to_bytes(8, "little").hex(),
            step,
            self._describe(writer),
        )
        raise SoakFailure(str(mismatch), mismatch)

    def handles(self) -> dict[str, int]:
        with self._device:
            free, total = cupy.cuda.runtime.memGetInfo()
        return {"device_bytes": total - free}
