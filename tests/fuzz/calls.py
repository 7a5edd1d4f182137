"""One sound call of each operator with random sizes, and what memory holds behind a call with any arguments.

``expected`` is asked only where the operator has accepted the arguments. It knows nothing of the operator: where it
cannot make sense of them, it raises, and the call counts as wrongly accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import paddle

from tests.fuzz.ground import ELEMENTS, Ground, array_of, bits
from tests.machine import item_bytes
from tests.ops.insert_conformance import CACHE_DTYPES, random_rows
from tests.reference import cache_convert, cache_insert, copy, permute, swap, topk
from tests.reference.float_formats import FORMATS, PLAIN_TYPES, dequantize, quantize

LAYOUTS = ["HND", "NHD", "packed"]
LARGER = 16

# address -> bytes that must be there afterwards; and the results that must come back, as bits, or None.
Outcome = tuple[list[tuple[int, np.ndarray]], list[np.ndarray] | None]


class EitherMayWin(Exception):
    """The arguments are the caller's error, of which the operator makes something, but nothing that is said."""


@dataclass
class Call:
    """``arguments`` by name, in the order of the signature; those behind ``*`` are in ``options``."""

    op: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    expected: Callable[[dict[str, Any]], Outcome]


def pick(random: np.random.Generator, choices: list[Any]) -> Any:
    return choices[int(random.integers(len(choices)))]


def form_of_ids(ids: list[int], ground: Ground) -> Any:
    return pick(ground.random, [ids, tuple(ids), np.array(ids, np.int64), np.array(ids, np.int32), ground.numbers(ids)])


def as_ids(ids: Any) -> list[int]:
    found = ids.numpy() if isinstance(ids, paddle.Tensor) else np.asarray(ids)
    if found.size == 0:
        return []
    assert found.ndim == 1 and found.dtype.kind in "iu", "not a list of integers"
    return [int(i) for i in found]


def as_pairs(pairs: Any) -> list[tuple[int, int]]:
    if isinstance(pairs, dict):
        flat = [(s, t) for s, of in pairs.items() for t in (as_ids(of) if np.ndim(of) else [of])]
        pairs = flat
    found = pairs.numpy() if isinstance(pairs, paddle.Tensor) else np.asarray(pairs)
    if found.size == 0:
        return []
    assert found.ndim == 2 and found.shape[1] == 2 and found.dtype.kind in "iu", "not pairs"
    return [(int(s), int(t)) for s, t in found]


def as_list(tensors: Any) -> list[paddle.Tensor]:
    listed = [tensors] if isinstance(tensors, paddle.Tensor) else list(tensors)
    assert all(isinstance(tensor, paddle.Tensor) for tensor in listed)
    return listed


def in_range(ids: list[int], size: int) -> list[int]:
    assert all(0 <= i < size for i in ids), f"ids {ids} of {size} blocks"
    return ids


def distinct(ids: list[int]) -> list[int]:
    assert len(set(ids)) == len(ids), "named twice"
    return ids


def written(tensor: paddle.Tensor, content: np.ndarray) -> tuple[int, np.ndarray]:
    assert tensor.is_contiguous()
    flat = np.ascontiguousarray(content).view(np.uint8).ravel()
    assert flat.size == int(np.prod(tensor.shape)) * tensor.element_size()
    return tensor.data_ptr(), flat


def bits_of_result(tensor: paddle.Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy()).view(np.uint8).ravel()


def some_shape(random: np.random.Generator) -> tuple[int, ...]:
    """Of one block: rank 2 to 4."""
    return tuple(int(size) for size in random.integers(1, 6, int(random.integers(2, 5))))


# ---- swap ----
def swap_cache(ground: Ground) -> Call:
    random = ground.random
    per_layer = random.random() < 0.5
    op = ("swap_cache_per_layer" if per_layer else "swap_cache_all_layers") + pick(random, ["", "_async"])
    blocks, host_blocks, count = (int(n) for n in random.integers(1, 9, 3))
    count = min(count, blocks, host_blocks)
    caches, hosts = [], []
    for _ in range(1 if per_layer else int(random.integers(1, 4))):
        caches.append(ground.tensor((blocks, *some_shape(random)), pick(random, ELEMENTS)))
        # Room for the blocks of any cache that may come in its place: a CPU cannot see where host memory ends.
        hosts.append(ground.host(host_blocks * bits(caches[-1]).shape[1] * LARGER))
    mode = int(random.integers(2))
    gpu_ids, cpu_ids = (random.permutation(n)[:count].tolist() for n in (blocks, host_blocks))
    rest = {
        "max_block_num_cpu": host_blocks,
        "swap_block_ids_gpu": form_of_ids(gpu_ids, ground),
        "swap_block_ids_cpu": form_of_ids(cpu_ids, ground),
        "rank": 0,
        "mode": mode,
    }
    addresses = [host.ctypes.data for host in hosts]
    if per_layer:
        arguments = {"cache_gpu": caches[0], "cache_cpu_ptr": addresses[0], **rest}
    else:
        arguments = {"cache_gpu_tensors": caches, "cache_cpu_ptrs": addresses, **rest}

    def expected(given: dict[str, Any]) -> Outcome:
        tensors = as_list(given["cache_gpu"] if per_layer else given["cache_gpu_tensors"])
        starts = [given["cache_cpu_ptr"]] if per_layer else as_ids(given["cache_cpu_ptrs"])
        assert len(tensors) == len(starts)
        device_ids, host_ids = as_ids(given["swap_block_ids_gpu"]), as_ids(given["swap_block_ids_cpu"])
        to_host = given["mode"] == swap.TO_HOST
        assert given["mode"] in (0, 1) and not isinstance(given["mode"], bool)
        distinct(host_ids if to_host else device_ids)
        in_range(host_ids, given["max_block_num_cpu"])
        outcome = []
        for tensor, start in zip(tensors, starts, strict=True):
            own = addresses.index(start)
            before = bits(tensor)
            in_range(device_ids, len(before))
            host = hosts[own][: given["max_block_num_cpu"] * before.shape[1]].reshape(-1, before.shape[1]).copy()
            device_after, host_after = swap.swapped(before, host, device_ids, host_ids, given["mode"])
            outcome += [written(tensor, device_after), (start, host_after.ravel())]
        return outcome, None

    return Call(op, arguments, {}, expected)


def swap_cache_layout(ground: Ground) -> Call:
    random = ground.random
    blocks, positions, layers = (int(n) for n in random.integers(1, 7, 3))
    count, shape, dtype = min(blocks, positions), some_shape(random), pick(random, ELEMENTS)
    caches = [ground.tensor((blocks, *shape), dtype) for _ in range(layers)]
    host = ground.host(positions * layers * bits(caches[0]).shape[1] * LARGER)
    ids = [random.permutation(n)[:count].tolist() for n in (blocks, positions)]
    arguments = {
        "cache_gpu_tensors": caches,
        "cache_cpu_ptrs": host.ctypes.data,
        "cache_shape": [blocks, *shape],
        "gpu_block_ids": form_of_ids(ids[0], ground),
        # No tensor: one with other numbers in it would reach beyond the host memory, which a CPU cannot see.
        "cpu_block_ids": pick(random, [ids[1], tuple(ids[1]), np.array(ids[1], np.int32)]),
        "rank": 0,
        "mode": int(random.integers(2)),
    }

    def expected(given: dict[str, Any]) -> Outcome:
        tensors, device_ids = as_list(given["cache_gpu_tensors"]), as_ids(given["gpu_block_ids"])
        six = given["mode"] is None
        places = list(range(len(device_ids))) if six else as_ids(given["cpu_block_ids"])
        mode = given["rank"] if six else given["mode"]
        assert mode in (0, 1) and not isinstance(mode, bool) and len(device_ids) == len(places)
        assert len({tensor.dtype for tensor in tensors}) == 1
        before = [bits(tensor) for tensor in tensors]
        size = int(np.prod(as_ids(given["cache_shape"])[1:])) * tensors[0].element_size()
        assert all(one.shape[1] == size for one in before) and all(place >= 0 for place in places)
        for one in before:
            in_range(device_ids, len(one))
        distinct(places if mode == swap.TO_HOST else device_ids)
        end = (max(places, default=-1) + 1) * len(tensors) * size
        rows = host[:end].reshape(-1, size).copy()
        after, host_after = swap.swapped_layout(before, rows, device_ids, places, mode)
        pairs = zip(tensors, after, strict=True)
        return [*(written(tensor, one) for tensor, one in pairs), (host.ctypes.data, host_after.ravel())], None

    return Call("swap_cache_layout", arguments, {}, expected)


def transfer_blocks(ground: Ground) -> Call:
    random = ground.random
    shape, dtype = some_shape(random), pick(random, ELEMENTS)
    sizes = [int(n) for n in random.integers(1, 9, 2)]
    source, target = (ground.tensor((size, *shape), dtype) for size in sizes)
    count = int(random.integers(0, sizes[1] + 1))
    pairs = list(
        zip(random.integers(0, sizes[0], count).tolist(), random.permutation(sizes[1])[:count].tolist(), strict=True)
    )

    def expected(given: dict[str, Any]) -> Outcome:
        pairs = as_pairs(given["block_mapping"])
        source, target = given["source"], given["target"]
        assert source.dtype == target.dtype and source.shape[1:] == target.shape[1:]
        in_range([s for s, _ in pairs], source.shape[0])
        distinct(in_range([t for _, t in pairs], target.shape[0]))
        return [written(target, swap.transferred(bits(source), bits(target), pairs))], None

    return Call(
        "transfer_blocks", {"source": source, "target": target, "block_mapping": _pairs(pairs, ground)}, {}, expected
    )


def _pairs(pairs: list[tuple[int, int]], ground: Ground) -> Any:
    by_source: dict[int, list[int]] = {}
    for source, target in pairs:
        by_source.setdefault(source, []).append(target)
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return pick(ground.random, [pairs, by_source, array, array.astype(np.int32), [list(pair) for pair in pairs]])


# ---- copy ----
def copy_family(ground: Ground) -> Call:
    random = ground.random
    op = pick(random, ["copy_blocks", "swap_blocks", "copy_single_block"])
    blocks = int(random.integers(2, 9))
    layers = int(random.integers(1, 4))
    as_lists = random.random() < 0.6

    def caches() -> Any:
        made = [ground.tensor((blocks, *some_shape(random)), pick(random, ELEMENTS)) for _ in range(layers)]
        return made if as_lists else made[0]

    keys, values = caches(), None if random.random() < 0.2 else caches()
    order = random.permutation(blocks).tolist()
    if op == "copy_single_block":
        ids = {"source_block_id": order[0], "target_block_id": order[1]}
    else:
        half = blocks // 2
        count = int(random.integers(0, half + 1))
        sources = order[:half][:count] if op == "swap_blocks" else random.choice(order[:half], count).tolist()
        ids = {"block_mapping": _pairs(list(zip(sources, order[half:][:count], strict=True)), ground)}
    names = ("key_caches", "value_caches") if op == "copy_blocks" else ("key_cache", "value_cache")

    def expected(given: dict[str, Any]) -> Outcome:
        tensors = as_list(given[names[0]]) + ([] if given[names[1]] is None else as_list(given[names[1]]))
        if not tensors:
            return [], None
        if op == "copy_single_block":
            pairs = [(int(given["source_block_id"]), int(given["target_block_id"]))]
        else:
            pairs = as_pairs(given["block_mapping"])
        sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
        distinct(targets)
        if op == "swap_blocks":
            distinct(sources + targets)
        assert not set(sources) & set(targets)
        reference = copy.exchanged if op == "swap_blocks" else copy.copied
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert len(set(addresses)) == len(addresses), "caches overlap"
        outcome = []
        for tensor in tensors:
            in_range(sources + targets, tensor.shape[0])
            outcome.append(written(tensor, reference(bits(tensor), pairs)))
        return outcome, None

    return Call(op, {names[0]: keys, names[1]: values, **ids}, {}, expected)


# ---- cache_write: in ----
def hnd_of(tensor: paddle.Tensor, layout: str) -> np.ndarray:
    """Unsigned integers, [blocks, heads, block size, head size]."""
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[tensor.element_size()]
    return cache_convert.from_layout(array_of(tensor).view(kind), layout)


def back(hnd: np.ndarray, layout: str, kind: str) -> np.ndarray:
    return cache_convert.to_layout(hnd, layout, kind)


def back_into(cache: paddle.Tensor, hnd: np.ndarray, layout: str) -> np.ndarray:
    """In the layout of the cache; the x of packed keys is the caller's choice."""
    if layout == "packed" and cache.ndim == 5:
        x = cache.shape[-1]
        return hnd.reshape(*hnd.shape[:3], -1, x).transpose(0, 1, 3, 2, 4)
    return back(hnd, layout, "value")


def rows_of(tensor: paddle.Tensor) -> np.ndarray:
    """The tokens as numbers of their own type."""
    array = array_of(tensor)
    return array.view(ml_dtypes.bfloat16) if str(tensor.dtype).endswith("bfloat16") else array


def plain(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def slots_of(given: Any, blocks: int, block_size: int) -> np.ndarray:
    slots = given.numpy()
    assert slots.ndim == 1 and slots.dtype.kind == "i"
    valid = slots[(slots >= 0) & (slots < blocks * block_size)]
    if len(np.unique(valid)) < len(valid):
        raise EitherMayWin
    return slots


def scale_of(given: Any, heads: int) -> np.ndarray:
    if given is None:
        return np.float32(1)
    value = given.numpy() if isinstance(given, paddle.Tensor) else np.float32(given)
    assert value.dtype == np.float32 or not isinstance(given, paddle.Tensor)
    value = np.asarray(value, np.float32).reshape(-1)
    assert value.size in (1, heads)
    return value[0] if value.size == 1 else value[:, None]


def scale_of_rows(given: Any, heads: int, starts: np.ndarray, tokens: int) -> np.ndarray:
    """As :func:`scale_of`, or with the scale of its sequence for each token."""
    if not isinstance(given, paddle.Tensor) or tuple(given.shape) != (len(starts) - 1, heads):
        return scale_of(given, heads)
    assert given.dtype == paddle.float32
    sequence = np.searchsorted(starts, np.arange(tokens), "right") - 1
    by: np.ndarray = given.numpy()[np.clip(sequence, 0, len(starts) - 2)][..., None]
    return by


def strided_rows(shape: tuple[int, ...], dtype: str, ground: Ground) -> paddle.Tensor:
    """Contiguous, or a slice of something wider."""
    random = ground.random
    wide = (*shape[:-1], shape[-1] + int(random.integers(1, 4))) if random.random() < 0.4 else shape
    values = random_rows(wide, dtype, int(random.integers(2**31)))
    tensor = ground.tensor(wide, dtype, values=values)
    return tensor if wide == shape else tensor[..., : shape[-1]]


def _slots(ground: Ground, tokens: int, total: int) -> paddle.Tensor:
    random = ground.random
    slots = np.full(tokens, -1, np.int64)
    slots[: min(tokens, total)] = random.permutation(total)[:tokens]
    slots[random.random(tokens) < 0.15] = -(2**33)
    dtype = pick(random, ["int64", "int64", "int32"])
    return ground.numbers(np.maximum(random.permutation(slots), -(2**31)), dtype)


def _scale(ground: Ground, heads: int) -> Any:
    random = ground.random
    numbers = random.uniform(0.01, 4.0, heads).astype(np.float32)
    return pick(
        random, [None, float(numbers[0]), ground.numbers(numbers[:1], "float32"), ground.numbers(numbers, "float32")]
    )


def reshape_and_cache(ground: Ground) -> Call:
    random = ground.random
    dynamic = random.random() < 0.35
    layout, dtype = pick(random, LAYOUTS), pick(random, ["float16", "bfloat16", "float32"])
    form = pick(random, ["fp8_e4m3", "fp8_e5m2", "int8"]) if dynamic else pick(random, ["auto", "auto", *FORMATS])
    cache_dtype = CACHE_DTYPES.get(form, dtype)
    blocks, heads, block_size = (int(n) for n in random.integers(1, 6, 3))
    unit = 16 // item_bytes(cache_dtype) if layout == "packed" else 1
    widths = [unit * int(random.integers(1, 4)), int(random.integers(1, 20))]
    tokens = int(random.integers(1, 12))
    names = ("key", "value")
    rows = {
        name: strided_rows((tokens, heads, width), dtype, ground) for name, width in zip(names, widths, strict=True)
    }
    caches = {}
    for name, width in zip(names, widths, strict=True):
        shape = back(
            np.zeros((blocks, heads, block_size, width), np.dtype(f"u{item_bytes(cache_dtype)}")), layout, name
        ).shape
        caches[f"{name}_cache"] = ground.tensor(shape, cache_dtype)
    arguments = {**rows, **caches}
    options: dict[str, Any] = {"layout": layout, "kv_cache_dtype": form}
    if dynamic:
        for letter in "kv":
            arguments[f"{letter}_scale_cache"] = ground.tensor((blocks, heads, block_size), "float32")
    elif form != "auto":
        options |= {"k_scale": _scale(ground, heads), "v_scale": _scale(ground, heads)}
    if not dynamic and random.random() < 0.3:
        options["padded"] = True
    arguments["slot_mapping"] = _slots(ground, tokens, blocks * block_size)

    def expected(given: dict[str, Any]) -> Outcome:
        form, layout = given["kv_cache_dtype"], given["layout"]
        outcome = []
        for name in names:
            cache, tokens = given[f"{name}_cache"], given[name]
            hnd, wide = hnd_of(cache, layout), rows_of(tokens)
            slots = slots_of(given["slot_mapping"], hnd.shape[0], hnd.shape[2])
            wide = wide[: len(slots)]
            assert wide.shape == (len(slots), hnd.shape[1], hnd.shape[3])
            if form == "auto":
                stored = plain(wide)
            elif dynamic:
                scales = cache_insert.scales_of_rows(wide, form)
                stored = quantize(wide, scales[..., None], form)
                scale_cache = given[f"{name[0]}_scale_cache"]
                after = array_of(scale_cache).copy()
                for token, block, position in cache_insert.placed(slots, hnd):
                    after[block, :, position] = scales[token]
                outcome.append(written(scale_cache, after))
            else:
                stored = quantize(wide, scale_of(given.get(f"{name[0]}_scale"), hnd.shape[1]), form)
            assert stored.dtype == hnd.dtype
            outcome.append(written(cache, back_into(cache, cache_insert.inserted(stored, hnd, slots), layout)))
        return outcome, None

    return Call("reshape_and_cache_dynamic" if dynamic else "reshape_and_cache", arguments, options, expected)


def concat_and_cache_mla(ground: Ground) -> Call:
    random = ground.random
    dtype, form = pick(random, ["float16", "bfloat16", "float32"]), pick(random, ["auto", "auto", *FORMATS])
    blocks, block_size, rank, rope, tokens = (int(n) for n in random.integers(1, 9, 5))
    arguments = {
        "kv_c": strided_rows((tokens, rank), dtype, ground),
        "k_pe": strided_rows((tokens, rope), dtype, ground),
        "kv_cache": ground.tensor((blocks, block_size, rank + rope), CACHE_DTYPES.get(form, dtype)),
        "slot_mapping": _slots(ground, tokens, blocks * block_size),
    }
    options: dict[str, Any] = {"kv_cache_dtype": form}
    if form != "auto":
        options["scale"] = _scale(ground, 1)

    def expected(given: dict[str, Any]) -> Outcome:
        cache, form = given["kv_cache"], given["kv_cache_dtype"]
        if len(cache.shape) == 4:  # with the head as a dimension: tests/ops/test_latent_cache.py
            raise EitherMayWin
        wide = np.concatenate([rows_of(given["kv_c"]), rows_of(given["k_pe"])], axis=1)
        hnd = hnd_of(cache, "HND")[:, None]
        slots = slots_of(given["slot_mapping"], hnd.shape[0], hnd.shape[2])
        assert wide.shape == (len(slots), hnd.shape[3])
        stored = plain(wide) if form == "auto" else quantize(wide, scale_of(given.get("scale"), 1), form)
        assert stored.dtype == hnd.dtype or form == "int8"
        return [written(cache, cache_insert.inserted(stored[:, None], hnd, slots)[:, 0])], None

    return Call("concat_and_cache_mla", arguments, options, expected)


# ---- cache_write: out and between ----
def _sequences(ground: Ground, blocks: int, block_size: int) -> tuple[paddle.Tensor, paddle.Tensor, int]:
    random = ground.random
    sequences = int(random.integers(1, 4))
    width = max(1, blocks // sequences)
    ids = np.full(sequences * width, -1)
    ids[: min(blocks, ids.size)] = random.permutation(blocks)[: ids.size]
    lengths = random.integers(0, width * block_size + 1, sequences)
    dtypes = [pick(random, ["int32", "int64"]) for _ in range(2)]
    table = ground.numbers(ids.reshape(sequences, width), dtypes[0])
    starts = ground.numbers(np.concatenate([[0], np.cumsum(lengths)]), dtypes[1])
    return table, starts, int(lengths.sum())


def gather_or_scatter(ground: Ground) -> Call:
    random = ground.random
    gather = random.random() < 0.5
    layout, kind = pick(random, LAYOUTS), pick(random, ["key", "value"])
    form = pick(random, ["auto", "auto", *FORMATS]) if gather else "auto"
    dtype = CACHE_DTYPES.get(form, pick(random, ELEMENTS))
    blocks, heads, block_size = (int(n) for n in random.integers(1, 6, 3))
    width = (
        16 // item_bytes(dtype) * int(random.integers(1, 3))
        if layout == "packed" and kind == "key"
        else int(random.integers(1, 20))
    )
    shape = back(np.zeros((blocks, heads, block_size, width), np.dtype(f"u{item_bytes(dtype)}")), layout, kind).shape
    cache = ground.tensor(shape, dtype)
    table, starts, total = _sequences(ground, blocks, block_size)
    shared = {"cache": cache, "block_table": table, "cu_seq_lens": starts}

    def sequences_of(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        if len(given["cache"].shape) == 3:  # became that of an MLA model: tests/ops/test_latent_cache.py
            raise EitherMayWin
        table, starts = given["block_table"].numpy(), given["cu_seq_lens"].numpy()
        assert table.ndim == 2 and starts.shape == (len(table) + 1,) and table.dtype.kind == starts.dtype.kind == "i"
        if (np.diff(starts) < 0).any():
            raise EitherMayWin
        return table, starts

    if not gather:
        if dtype in ("uint8", "int8"):
            tokens = ground.tensor((max(total, 1), heads, width), dtype)
        else:
            tokens = strided_rows((max(total, 1), heads, width), dtype, ground)

        def after_scatter(given: dict[str, Any]) -> Outcome:
            rows, cache = given["tokens"], given["cache"]
            assert rows.dtype == cache.dtype
            if 0 in rows.shape:
                return [], None
            table, starts = sequences_of(given)
            hnd, layout = hnd_of(cache, given["layout"]), given["layout"]
            used = [slot[1:] for slot in cache_convert.slots(table, starts, rows.shape[0], *hnd.shape[:3:2])]
            if len(set(used)) < len(used):
                raise EitherMayWin
            assert tuple(rows.shape[1:]) == hnd.shape[1::2]
            after = cache_convert.scattered(array_of(rows).view(hnd.dtype), hnd, table, starts)
            return [written(cache, back_into(cache, after, layout))], None

        return Call("scatter_cache", {"tokens": tokens, **shared}, {"layout": layout}, after_scatter)

    options: dict[str, Any] = {"total_tokens": total, "layout": layout, "kv_cache_dtype": form}
    if form != "auto":
        by_sequence = random.uniform(0.01, 4.0, (int(table.shape[0]), heads)).astype(np.float32)
        scale = _scale(ground, heads) if random.random() < 0.7 else ground.numbers(by_sequence, "float32")
        options |= {"scale": scale, "out_dtype": pick(random, [None, *PLAIN_TYPES])}

    def after_gather(given: dict[str, Any]) -> Outcome:
        table, starts = sequences_of(given)
        hnd, form = hnd_of(given["cache"], given["layout"]), given["kv_cache_dtype"]
        rows = cache_convert.gathered(hnd, table, starts, int(given["total_tokens"]))
        if form != "auto":
            out = given.get("out_dtype")
            out = "float32" if out is None else str(out).removeprefix("paddle.")
            values = dequantize(rows, scale_of_rows(given.get("scale"), hnd.shape[1], starts, len(rows)), form, out)
            held = np.zeros(len(rows), bool)
            held[[token for token, _, _ in cache_convert.slots(table, starts, len(rows), *hnd.shape[:3:2])]] = True
            values[~held] = 0
            return [], [values.view(np.uint8).ravel()]
        return [], [np.ascontiguousarray(rows).view(np.uint8).ravel()]

    return Call("gather_cache", shared, options, after_gather)


def convert_fp8(ground: Ground) -> Call:
    random = ground.random
    to, fp8 = pick(random, ["fp8", *PLAIN_TYPES]), pick(random, ["e4m3", "e5m2"])
    shape = some_shape(random)
    if to == "fp8":
        dtype = pick(random, list(PLAIN_TYPES))
        source = ground.tensor(shape, dtype, values=random_rows(shape, dtype, int(random.integers(2**31))))
    else:
        source = ground.tensor(shape, "uint8")
    scale = pick(random, [1.0, 0.25, float(random.uniform(0.01, 9)), ground.numbers([1.5], "float32")])

    def expected(given: dict[str, Any]) -> Outcome:
        form = f"fp8_{given.get('fp8_format', 'e4m3')}"
        source, by = given["source"], scale_of(given.get("scale", 1.0), 1)
        if given["to"] == "fp8":
            assert str(source.dtype).removeprefix("paddle.") in PLAIN_TYPES
            return [], [quantize(rows_of(source), by, form).ravel()]
        codes = array_of(source).view(np.uint8)
        assert codes.shape == tuple(source.shape)
        return [], [np.ascontiguousarray(dequantize(codes, by, form, given["to"])).view(np.uint8).ravel()]

    return Call("convert_fp8", {"source": source}, {"to": to, "fp8_format": fp8, "scale": scale}, expected)


def convert_layout(ground: Ground) -> Call:
    random = ground.random
    dtype, kind = pick(random, ELEMENTS), pick(random, ["key", "value"])
    source_layout, target_layout = (pick(random, LAYOUTS) for _ in range(2))
    blocks, heads, block_size = (int(n) for n in random.integers(1, 6, 3))
    width = 16 // item_bytes(dtype) * int(random.integers(1, 3))
    hnd = np.zeros((blocks, heads, block_size, width), np.dtype(f"u{item_bytes(dtype)}"))
    cache = ground.tensor(back(hnd, source_layout, kind).shape, dtype)

    def expected(given: dict[str, Any]) -> Outcome:
        assert given["kind"] in ("key", "value")
        if given["source_layout"] == given["target_layout"]:
            return [], [bits(given["cache"]).ravel()]
        hnd = hnd_of(given["cache"], given["source_layout"])
        assert given["source_layout"] in LAYOUTS and given["target_layout"] in LAYOUTS
        return [], [back(hnd, given["target_layout"], given["kind"]).view(np.uint8).ravel()]

    options = {"kind": kind, "source_layout": source_layout, "target_layout": target_layout}
    return Call("convert_layout", {"cache": cache}, options, expected)


# ---- permute ----
def block_stack(ground: Ground) -> Call:
    random = ground.random
    op = pick(
        random, ["universal_from_block", "block_from_universal", "operational_from_block", "block_from_operational"]
    )
    layout, dtype = pick(random, ["NHD", "HND"]), pick(random, ELEMENTS)
    blocks, layers, outer = (int(n) for n in random.integers(1, 4, 3))
    tokens, heads, width = (int(n) for n in random.integers(1, 6, 3))
    inner = (tokens, heads, width) if layout == "NHD" else (heads, tokens, width)
    chunks = [ground.tensor(inner, dtype) for _ in range(blocks * layers * outer)]
    universal = "universal" in op
    dense_shape = (
        (blocks, heads, layers, outer, tokens, width) if universal else (blocks, layers, outer, tokens * heads * width)
    )
    options: dict[str, Any] = {"inner_layout": layout} if universal else {}
    if op.endswith("_block"):
        arguments: dict[str, Any] = {"chunks": chunks}
        options |= {"num_layers": layers, "num_outer": outer}
        if random.random() < 0.5:
            options["out"] = ground.tensor(dense_shape, dtype)
    else:
        arguments = {"universal" if universal else "operational": ground.tensor(dense_shape, dtype), "chunks": chunks}

    def plain_chunks(given: dict[str, Any]) -> list[np.ndarray]:
        chunks = as_list(given["chunks"])
        assert len({(str(chunk.dtype), tuple(chunk.shape)) for chunk in chunks}) == 1 and not isinstance(
            given["chunks"], paddle.Tensor
        )
        return [plain(array_of(chunk)) for chunk in chunks]

    def expected(given: dict[str, Any]) -> Outcome:
        if given["chunks"] == []:  # nothing to do for a tensor of no blocks
            assert 0 in next(given[name].shape for name in ("out", "universal", "operational") if name in given)
            return [], None
        own_layout = given.get("inner_layout", "NHD")
        if op.endswith("_block"):
            stack = plain_chunks(given)
            per_block = given["num_layers"] * given.get("num_outer", 2)
            assert len(stack) % per_block == 0
            if universal:
                dense = permute.universal_from_block(stack, given["num_layers"], given.get("num_outer", 2), own_layout)
            else:
                dense = permute.operational_from_block(stack, given["num_layers"], given.get("num_outer", 2))
            flat = np.ascontiguousarray(dense).view(np.uint8).ravel()
            out = given.get("out")
            if out is None:
                return [], [flat]
            assert tuple(out.shape) == dense.shape and out.dtype == as_list(given["chunks"])[0].dtype
            return [written(out, flat)], None
        dense = plain(array_of(given["universal" if universal else "operational"]))
        chunks = as_list(given["chunks"])
        plain_chunks(given)
        assert len({chunk.data_ptr() for chunk in chunks}) == len(chunks)
        if universal:
            stack = permute.block_from_universal(dense, own_layout)
        else:
            stack = list(dense.reshape(-1, dense.shape[-1]))
        return [written(chunk, content) for chunk, content in zip(chunks, stack, strict=True)], None

    return Call(op, arguments, options, expected)


def paged_universal(ground: Ground) -> Call:
    random = ground.random
    op = pick(random, ["universal_from_cache", "cache_from_universal"])
    layout, dtype = pick(random, ["NHD", "HND"]), pick(random, ELEMENTS)
    blocks, layers = int(random.integers(1, 6)), int(random.integers(1, 4))
    heads, tokens, width = (int(n) for n in random.integers(1, 5, 3))
    latent = random.random() < 0.3
    inner = (heads, tokens, width) if layout == "HND" else (tokens, heads, width)
    keys = [ground.tensor((blocks, *inner), dtype) for _ in range(layers)]
    values = None if latent else [ground.tensor((blocks, *inner), dtype) for _ in range(layers)]
    ids = random.permutation(blocks)[: int(random.integers(1, blocks + 1))].tolist()
    dense_shape = (len(ids), heads, layers, 1 if latent else 2, tokens, width)
    arguments = {"key_caches": keys, "value_caches": values, "block_ids": form_of_ids(ids, ground)}
    options: dict[str, Any] = {"layout": layout}
    if op == "cache_from_universal":
        arguments = {"universal": ground.tensor(dense_shape, dtype), **arguments}
    elif random.random() < 0.5:
        options["out"] = ground.tensor(dense_shape, dtype)

    def expected(given: dict[str, Any]) -> Outcome:
        ids, layout = as_ids(given["block_ids"]), given.get("layout", "HND")
        keys = as_list(given["key_caches"])
        values = None if given["value_caches"] is None else as_list(given["value_caches"])
        caches = keys + (values or [])
        if not ids:
            return [], None
        assert len({(str(cache.dtype), tuple(cache.shape[1:])) for cache in caches}) == 1
        assert values is None or len(values) == len(keys)
        for cache in caches:
            in_range(ids, cache.shape[0])
        arrays = [plain(array_of(cache)) for cache in caches]
        arrays = [array[:, None] if array.ndim == 3 and layout == "HND" else array for array in arrays]
        arrays = [array[:, :, None] if array.ndim == 3 else array for array in arrays]
        outer = 1 if values is None else 2
        if op == "universal_from_cache":
            stack = permute.stack_of_cache(arrays[: len(keys)], None if values is None else arrays[len(keys) :], ids)
            dense = permute.universal_from_block(stack, len(keys), outer, layout)
            flat = np.ascontiguousarray(dense).view(np.uint8).ravel()
            out = given.get("out")
            if out is None:
                return [], [flat]
            assert tuple(out.shape) == dense.shape and out.dtype == keys[0].dtype
            return [written(out, flat)], None
        distinct(ids)
        assert len({cache.data_ptr() for cache in caches}) == len(caches)
        universal = given["universal"]
        assert universal.dtype == keys[0].dtype and universal.shape[0] == len(ids)
        assert tuple(universal.shape[2:4]) == (len(keys), outer)
        stack = permute.block_from_universal(plain(array_of(universal)), layout)
        after = [array.copy() for array in arrays]
        for position, block in enumerate(ids):
            for layer in range(len(keys)):
                for kind in range(outer):
                    chunk = stack[permute.chunk_index(position, layer, kind, len(keys), outer)]
                    after[kind * len(keys) + layer][block] = chunk
        return [written(cache, content) for cache, content in zip(caches, after, strict=True)], None

    return Call(op, arguments, options, expected)


def reshard_universal(ground: Ground) -> Call:
    random = ground.random
    blocks, heads, layers, outer, tokens, width = (int(n) for n in random.integers(1, 5, 6))
    dtype, ranks = pick(random, ELEMENTS), int(random.integers(1, 4))
    parts = [ground.tensor((blocks, heads, layers, outer, tokens, width), dtype) for _ in range(ranks)]
    target = pick(random, [n for n in range(1, heads * ranks + 1) if heads * ranks % n == 0])

    def expected(given: dict[str, Any]) -> Outcome:
        parts = as_list(given["parts"])
        assert len({(str(part.dtype), tuple(part.shape)) for part in parts}) == 1
        result = permute.reshard_universal([plain(array_of(part)) for part in parts], int(given["target_tp"]))
        return [], [np.ascontiguousarray(part).view(np.uint8).ravel() for part in result]

    return Call("reshard_universal", {"parts": parts, "target_tp": target}, {}, expected)


# ---- memcpy ----
def memcpy_family(ground: Ground) -> Call:
    random = ground.random
    op = pick(random, ["vectorized_copy", "memcpy_batch"])
    count = int(random.integers(1, 9))
    sizes = random.integers(0, 40, count).tolist() if random.random() < 0.7 else [int(random.integers(1, 40))] * count
    source, target = ground.host(40 * count), ground.host(40 * count)
    offsets = [random.permutation(count) * 40 + random.integers(0, 1, count) for _ in range(2)]
    pointers = [
        (memory.ctypes.data + offset).tolist() for memory, offset in zip((source, target), offsets, strict=True)
    ]
    arguments = {
        "source_pointers": pick(random, [pointers[0], np.array(pointers[0]), tuple(pointers[0])]),
        "target_pointers": pick(random, [pointers[1], np.array(pointers[1])]),
        "sizes": sizes[0] if len(set(sizes)) == 1 and random.random() < 0.5 else sizes,
    }
    options = {"mode": pick(random, ["fallback", "loop"])} if op == "memcpy_batch" else {}

    def expected(given: dict[str, Any]) -> Outcome:
        sources, targets = as_ids(given["source_pointers"]), as_ids(given["target_pointers"])
        lengths = as_ids(given["sizes"]) if np.ndim(given["sizes"]) else [int(given["sizes"])] * len(sources)
        assert len(sources) == len(targets) == len(lengths)
        assert all(length >= 0 for length in lengths)
        outcome, taken = [], set()
        for start, end, length in zip(sources, targets, lengths, strict=True):
            if not length:
                continue
            assert end not in taken, "targets overlap"
            taken.add(end)
            first = start - source.ctypes.data
            assert first >= 0 and first + length <= source.size
            outcome.append((end, source[first : first + length].copy()))
        return outcome, None

    return Call(op, arguments, options, expected)


# ---- topk ----
def gather_topk_rows(ground: Ground) -> Call:
    random = ground.random
    batch, k, width, block_size, blocks, host_blocks = (int(n) for n in random.integers(1, 6, 6))
    num_slots, max_tokens = k + int(random.integers(4)), int(random.integers(1, 30))
    resident = ground.tensor((batch, num_slots, width), pick(random, ELEMENTS))
    row_bytes = width * resident.element_size()
    stride = block_size * row_bytes + pick(random, [0, 0, 8, row_bytes])
    host = ground.host(host_blocks * stride + LARGER * block_size * row_bytes)
    state = topk.State.empty(bits(resident).reshape(batch, num_slots, row_bytes), max_tokens)
    for filling in range(2):  # not from the beginning
        topk.gathered(state, random.integers(-1, max_tokens, (batch, k)), np.zeros((batch, max_tokens), np.int32),
                      np.full((1, max_tokens, row_bytes), filling, np.uint8))  # fmt: skip
    state.fresh[:] = random.integers(0, 2, batch)
    integers = ("slot_of_token", "token_of_slot", "lru_order", "fresh")
    scratch = paddle.to_tensor(np.zeros((batch, num_slots + 5 * k), np.int32), place=paddle.CPUPlace())  # of no meaning
    arguments: dict[str, Any] = {
        "token_ids": ground.numbers(random.integers(-2, max_tokens + 2, (batch, k)), "int32"),
        "block_table": ground.numbers(random.integers(-1, host_blocks + 1, (batch, blocks)), "int32"),
        "host_pointer": host.ctypes.data,
        "num_host_blocks": host_blocks,
        "block_stride_bytes": stride,
        "block_size": block_size,
        "resident": resident,
        **{name: ground.numbers(getattr(state, name), "int32") for name in integers},
        "scratch": scratch,
    }
    options = {"out": ground.tensor((batch, k, width), str(resident.dtype).removeprefix("paddle."))}

    def expected(given: dict[str, Any]) -> Outcome:
        numbers = {name: given[name].numpy() for name in ("token_ids", "block_table", *integers)}
        assert all(array.dtype == np.int32 for array in numbers.values())
        rows, out = given["resident"], given["out"]
        before = bits(rows).reshape(*rows.shape[:2], -1)
        now = topk.State(before, *(numbers[name] for name in integers))
        assert given["scratch"].dtype == paddle.int32
        if given["scratch"] is not scratch or not is_a_state(now):
            raise EitherMayWin
        count, size = given["num_host_blocks"], given["block_size"]
        assert given["host_pointer"] == host.ctypes.data or count == 0
        assert given["block_stride_bytes"] == stride and count >= 0
        assert size >= 1 and size * before.shape[2] <= stride
        blocks = host[: count * stride].reshape(count, stride)[:, : size * before.shape[2]]
        assert len(numbers["token_ids"]) == len(numbers["block_table"]) == len(before)
        result, _ = topk.gathered(now, numbers["token_ids"], numbers["block_table"],
                                  blocks.reshape(count, size, before.shape[2]))  # fmt: skip
        after = [written(given[name], getattr(now, name)) for name in ("resident", *integers)]
        if out is None:
            return after, [result.ravel()]
        assert out.dtype == rows.dtype and out.shape[:2] == given["token_ids"].shape
        return [*after, written(out, result)], None

    return Call("gather_topk_rows", arguments, options, expected)


def is_a_state(state: topk.State) -> bool:
    """Else rows are undefined, but no memory outside of the tensors is touched (tests/ops/test_gather_topk_rows.py)."""
    assert state.token_of_slot.shape == state.lru_order.shape == state.resident.shape[:2]
    assert len(state.slot_of_token) == len(state.fresh) == len(state.resident)
    order = np.arange(state.lru_order.shape[1])
    for slots, tokens in zip(state.slot_of_token, state.token_of_slot, strict=True):
        of_slots = {int(s): t for t, s in enumerate(slots) if s >= 0}
        if {s: int(t) for s, t in enumerate(tokens) if t >= 0} != of_slots or min(*slots, *tokens, -1) < -1:
            return False
        if np.count_nonzero(slots >= 0) != len(of_slots):
            return False
    return bool((np.sort(state.lru_order, axis=1) == order).all())


FAMILIES: list[Callable[[Ground], Call]] = [
    swap_cache,
    swap_cache_layout,
    transfer_blocks,
    copy_family,
    reshape_and_cache,
    concat_and_cache_mla,
    gather_or_scatter,
    convert_fp8,
    convert_layout,
    block_stack,
    paged_universal,
    reshard_universal,
    memcpy_family,
    gather_topk_rows,
]
