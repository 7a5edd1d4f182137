"""The layer-by-layer pipeline on a GPU, with matrix products as the model: python examples/gpu_pipeline.py

A prefix comes back from host memory while the layers compute, each behind the wait for its part of the prefix, and the
blocks that a layer writes are saved while the next layers compute. Measured with CUDA events: computing alone, moving
alone, both layer by layer, and both with one wait for everything. At the end all bytes are compared, and also what each
layer saw of the prefix when its wait was over. Exit code 1 if anything differs.

The matrix products are CuPy's, so this also runs where Paddle has no kernels for the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

import cupy
import numpy as np
import paddle
from timeline import draw

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, Span, Transfer, devices, write_trace
from paddle_kv.schedule.trace import spans_of

TIMEOUT_S = 60.0
POISON = 0xDEDE


@dataclass(frozen=True)
class Result:
    """One way to run the layers. `total_ms` is the median over the repetitions."""

    way: str
    total_ms: float
    total_ms_min: float
    total_ms_max: float
    onload_gb_per_s: float
    offload_gb_per_s: float


@dataclass(frozen=True)
class Run:
    total_ms: float
    onload: Transfer | None
    offload: Transfer | None
    spans: list[Span]


class Pipeline:
    """The caches, the block ids, and the stand-in for a model: on `compute`, a stream of our own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.spec = KVCacheSpec(
            num_layers=options.layers,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            block_size=options.block_size,
            dtype="float16",
        )
        self.num_layers = options.layers
        prefix, fresh = (
            options.prefix // options.block_size,
            options.tokens // options.block_size,
        )
        random = np.random.default_rng(11)
        device_ids, host_ids = (
            random.permutation(prefix + fresh),
            random.permutation(prefix + fresh),
        )
        self.prefix_device, self.fresh_device = (
            device_ids[:prefix].tolist(),
            device_ids[prefix:].tolist(),
        )
        self.prefix_host, self.fresh_host = (
            host_ids[:prefix].tolist(),
            host_ids[prefix:].tolist(),
        )

        self.device = DeviceCache(self.spec, prefix + fresh, device="gpu:0")
        self.host = HostPool(self.spec, prefix + fresh)
        for words in host_words(self.host, self.prefix_host):
            words[:] = random.integers(0, 2**16, words.shape, np.uint16)

        self.compute = cupy.cuda.Stream(non_blocking=True)
        self.scheduler = LayerwiseScheduler(
            self.device, self.host, compute_stream=self.compute, record_layer_times=True
        )
        self.model = Model(self.device, self.prefix_device, self.fresh_device, options)

    def computing_alone(self) -> Run:
        return self._run(onload=False, offload=False)

    def onload_alone(self) -> Run:
        return self._run(onload=True, offload=False, compute=False)

    def offload_alone(self) -> Run:
        return self._run(onload=False, offload=True, compute=False)

    def layer_by_layer(self) -> Run:
        return self._run(onload=True, offload=True)

    def all_at_once(self) -> Run:
        """Waits for the whole prefix first, and saves when all is computed."""
        return self._run(onload=True, offload=True, layerwise=False)

    def _run(
        self,
        *,
        onload: bool,
        offload: bool,
        compute: bool = True,
        layerwise: bool = True,
    ) -> Run:
        self._poison()
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        around = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(self.num_layers)]
        first.record(self.compute)

        load = self.scheduler.onload(self.prefix_host, self.prefix_device) if onload else None
        save = None
        if offload and compute and layerwise:
            save = self.scheduler.offload(self.fresh_device, self.fresh_host, layerwise=True)
        if load and not layerwise:
            load.wait_on(self.compute)
        for layer, (before, after) in enumerate(around if compute else []):
            if load and layerwise:
                load.wait_layer(layer, stream=self.compute)
            before.record(self.compute)
            self.model.layer(layer, self.compute)
            after.record(self.compute)
            if save:
                save.mark_layer_written(layer, stream=self.compute)
        if offload and save is None:
            save = self.scheduler.offload(self.fresh_device, self.fresh_host)
        for transfer in (load, save):
            if transfer:
                transfer.wait_on(self.compute)
        last.record(self.compute)
        last.synchronize()
        for transfer in (load, save):
            if transfer:
                transfer.wait(TIMEOUT_S)

        spans = [
            Span("compute", layer, self._ms(before), self._ms(after))
            for layer, (before, after) in enumerate(around if compute else [])
        ]
        spans += spans_of(load) if load else []
        spans += spans_of(save) if save else []
        return Run(cupy.cuda.get_elapsed_time(first, last), load, save, spans)

    def _poison(self) -> None:
        """No run may live on what an earlier one has left behind, neither on the device nor on the host."""
        with self.compute:
            for name in self.spec.tensor_names:
                for layer in range(self.num_layers):
                    device_words(self.device.tensor(name, layer)).fill(POISON)
            self.model.seen.fill(0)
        for words in host_words(self.host, self.fresh_host):
            words.fill(POISON)
        self.compute.synchronize()

    def _ms(self, event: cupy.cuda.Event) -> float:
        """The event on the axis of `Transfer.layer_times_ms`."""
        return float(cupy.cuda.runtime.eventElapsedTime(self.scheduler.origin_event, event.ptr))

    def differences(self) -> Iterator[str]:
        """What is wrong after a run that has loaded, computed and saved."""
        for layer in range(self.num_layers):
            for number, name in enumerate(self.spec.tensor_names):
                cache = self.device.tensor(name, layer).numpy()
                loaded = np.stack([self.host.view(name, layer, block_id) for block_id in self.prefix_host])
                saved = np.stack([self.host.view(name, layer, block_id) for block_id in self.fresh_host])
                if cache[self.prefix_device].tobytes() != loaded.tobytes():
                    yield f"{name} of layer {layer}: the prefix on the device is not the prefix on the host"
                if saved.tobytes() != self.model.written(layer).get().tobytes():
                    yield f"{name} of layer {layer}: the saved blocks are not what the layer has written"
                if int(self.model.seen[layer, number]) != int(loaded.view(np.uint16).sum(dtype=np.uint64)):
                    yield f"{name} of layer {layer}: the layer did not see the whole prefix"

    def close(self) -> None:
        self.scheduler.close(TIMEOUT_S)
        self.host.close()


class Model:
    """What a layer does to the cache and to the GPU: reads the prefix, multiplies, writes the new blocks.

    Attributes:
        seen: ``[layers, tensors]``, the sum of the 16-bit words that each layer has found in its prefix.
    """

    def __init__(
        self,
        device: DeviceCache,
        prefix: Sequence[int],
        fresh: Sequence[int],
        options: argparse.Namespace,
    ) -> None:
        spec = device.spec
        self._caches = [
            [device_words(device.tensor(n, layer)) for n in spec.tensor_names] for layer in range(spec.num_layers)
        ]
        self._prefix, self._fresh = cupy.array(prefix), cupy.array(fresh)
        shape = spec.block_shape("key")
        self._gathered = cupy.empty((len(prefix), *shape), cupy.uint16)
        self._fresh_words = cupy.random.randint(0, 2**16, (len(fresh), *shape)).astype(cupy.uint16)
        self.seen = cupy.zeros((spec.num_layers, len(spec.tensor_names)), cupy.uint64)
        self._products = options.products
        self._hidden = cupy.random.standard_normal((options.tokens, options.hidden), cupy.float32).astype(cupy.float16)
        self._result = cupy.empty_like(self._hidden)
        self._wide = cupy.empty((options.tokens, options.ffn), cupy.float16)
        self._up = cupy.random.standard_normal((options.hidden, options.ffn), cupy.float32).astype(cupy.float16)
        self._up /= np.float16(options.hidden**0.5)
        self._down = cupy.random.standard_normal((options.ffn, options.hidden), cupy.float32).astype(cupy.float16)
        self._down /= np.float16(options.ffn**0.5)
        cupy.cuda.Device().synchronize()  # all of this ran on CuPy's default stream

    def layer(self, layer: int, stream: cupy.cuda.Stream) -> None:
        """Enqueues the layer on the stream."""
        with stream:
            for number, cache in enumerate(self._caches[layer]):
                cupy.take(cache, self._prefix, axis=0, out=self._gathered)
                self.seen[layer, number] = self._gathered.sum(dtype=cupy.uint64)
            self._multiply(stream)
            for cache in self._caches[layer]:
                cache[self._fresh] = self.written(layer)

    def _multiply(self, stream: cupy.cuda.Stream) -> None:
        for _ in range(self._products):
            cupy.matmul(self._hidden, self._up, out=self._wide)
            cupy.matmul(self._wide, self._down, out=self._result)

    def written(self, layer: int) -> cupy.ndarray:
        """What the layer writes to the blocks of the new tokens, as keys and as values."""
        return self._fresh_words + cupy.uint16(layer)


def device_words(tensor: paddle.Tensor) -> cupy.ndarray:
    """A Paddle tensor of 16-bit elements as a CuPy array over the same memory."""
    size_bytes = 2 * int(np.prod(tensor.shape))
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), size_bytes, tensor, devices.device_of(tensor))
    return cupy.ndarray(tuple(tensor.shape), cupy.uint16, cupy.cuda.MemoryPointer(memory, 0))


def host_words(host: HostPool, block_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """The 16-bit words of the blocks in host memory, all tensors and layers."""
    for name in host.spec.tensor_names:
        for layer in range(host.spec.num_layers):
            for block_id in block_ids:
                yield host.view(name, layer, block_id).view(np.uint16)


def measure(way: str, run: Callable[[], Run], repetitions: int) -> tuple[Result, Run]:
    """The result, and the last run, after one that warms up."""
    run()
    runs = [run() for _ in range(repetitions)]
    times_ms = [one.total_ms for one in runs]
    return Result(
        way,
        statistics.median(times_ms),
        min(times_ms),
        max(times_ms),
        statistics.median(rate_gb_per_s(one.onload) for one in runs),
        statistics.median(rate_gb_per_s(one.offload) for one in runs),
    ), runs[-1]


def rate_gb_per_s(transfer: Transfer | None) -> float:
    """While it was copying: the pauses of a layerwise transfer do not count."""
    if transfer is None:
        return 0.0
    return transfer.bytes / 1e6 / sum(end_ms - start_ms for start_ms, end_ms in transfer.layer_times_ms)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    pipeline = Pipeline(options)
    ways = {
        "computing alone": pipeline.computing_alone,
        "onload alone": pipeline.onload_alone,
        "offload alone": pipeline.offload_alone,
        "all at once": pipeline.all_at_once,
        "layer by layer": pipeline.layer_by_layer,
    }
    results, runs, found = [], {}, []
    for way, run in ways.items():
        print(f"{way} ...", flush=True)
        result, runs[way] = measure(way, run, options.repetitions)
        results.append(result)
        if runs[way].onload and runs[way].offload:
            found += [f"{way}: {line}" for line in pipeline.differences()]
    pipeline.close()
    print_results(results, pipeline, options)
    write_outputs(results, runs, found, options)
    if found:
        print("FAILED\n  " + "\n  ".join(found), file=sys.stderr)
        return 1
    print("All bytes are right, and each layer saw all of its prefix.")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64, help="tokens per block")
    parser.add_argument(
        "--prefix",
        type=int,
        default=16384,
        help="tokens that come back from host memory",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="new tokens")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--products", type=int, default=2, help="pairs of matrix products per layer")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder of the results, traces and pictures",
    )
    return parser.parse_args(arguments)


def print_results(results: Sequence[Result], pipeline: Pipeline, options: argparse.Namespace) -> None:
    layer_mib = [len(ids) * pipeline.spec.block_bytes / 2**20 for ids in (pipeline.prefix_host, pipeline.fresh_host)]
    print(
        f"\n{options.layers} layers; each loads {layer_mib[0]:.1f} MiB, computes {2 * options.products} products "
        f"[{options.tokens}, {options.hidden}] x [{options.hidden}, {options.ffn}], and saves {layer_mib[1]:.1f} MiB.\n"
    )
    print(f"{'':18}{'median ms':>10}{'min':>10}{'max':>10}{'onload GB/s':>14}{'offload GB/s':>14}")
    for result in results:
        rates = "".join(
            f"{rate:14.1f}" if rate else f"{'-':>14}" for rate in (result.onload_gb_per_s, result.offload_gb_per_s)
        )
        print(f"{result.way:18}{result.total_ms:10.2f}{result.total_ms_min:10.2f}{result.total_ms_max:10.2f}{rates}")
    of = {result.way: result.total_ms for result in results}
    moving = of["onload alone"] + of["offload alone"]
    exposed = of["layer by layer"] - of["computing alone"]
    print(
        f"\nMoving alone takes {moving:.2f} ms. Layer by layer it lengthens the computation by {exposed:.2f} ms, "
        f"all at once by {of['all at once'] - of['computing alone']:.2f} ms.\n"
    )


def write_outputs(
    results: Sequence[Result],
    runs: dict[str, Run],
    found: Sequence[str],
    options: argparse.Namespace,
) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = {name: value for name, value in vars(options).items() if isinstance(value, int)}
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    record = {
        "device": device,
        "sizes": sizes,
        "results": [asdict(result) for result in results],
        "differences": list(found),
    }
    (options.out / "gpu_pipeline.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"Figures: {options.out / 'gpu_pipeline.json'}")
    for way in ("layer by layer", "all at once"):
        name = f"gpu_{way.replace(' ', '_')}"
        write_trace(options.out / f"{name}.json", spans=runs[way].spans)
        print(f"Trace: {options.out / name}.json (open in ui.perfetto.dev)")
        try:
            draw(runs[way].spans, options.out / f"{name}.png", f"{way}, {device}")
            print(f"Picture: {options.out / name}.png")
        except ImportError:
            print("No picture: matplotlib is not installed (elsewhere: python examples/timeline.py TRACE PICTURE)")


if __name__ == "__main__":
    sys.exit(main())
