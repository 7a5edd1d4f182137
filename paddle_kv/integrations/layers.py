"""Waits in front of each layer of a model, marks behind it: by hand, or by hooks on ``paddle.nn.Layer``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ..schedule.transfer import Transfer, transfer_list


class ForwardPass:
    """One pass of the model through its layers while transfers are under way.

    A layer runs after the same layer of all ``loads`` is on the device, and is saved by all ``saves`` (made with
    ``layerwise=True``) once it has run. On a GPU the host waits for neither.

    Args:
        loads: onloads whose blocks the pass reads or writes.
        saves: layerwise offloads of blocks that the pass fills.
        stream: the stream on which the model runs; None: the scheduler's compute stream.
        timeout_s: for the waits of the host, see :meth:`Transfer.wait_layer`.

    Raises:
        TypeError: ``loads`` or ``saves`` is not a list of transfers.
        ValueError: among the loads a layerwise offload whose layers are not marked (the pass would wait for marks that
            it makes later), or among the saves something else. The layerwise saves are cancelled.

    As a context manager it ends the saves: those that lack a layer, because the pass was left early or raised, are
    cancelled, or they would wait for that layer forever. The loads are the caller's: what was computed is valid only
    after ``wait()`` of each has returned.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.integrations import ForwardPass
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8))
        >>> load, save = scheduler.onload([2], [0]), scheduler.offload([1], [3], layerwise=True)
        >>> with ForwardPass([load], [save]) as layers:
        ...     for index in range(spec.num_layers):
        ...         with layers.layer(index):
        ...             pass  # write the new tokens to the cache, read the prefix from it
        >>> load.wait(), save.wait()
        (None, None)
        >>> scheduler.close()
    """

    def __init__(
        self,
        loads: Sequence[Transfer] = (),
        saves: Sequence[Transfer] = (),
        *,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        self._loads = transfer_list(loads, "loads")
        self._unfinished = transfer_list(saves, "saves")
        self._marked: set[int] = set()
        self._stream = stream
        self._timeout_s = timeout_s
        try:
            self._check_kinds()
        except ValueError:
            self.__exit__(None, None, None)
            raise

    def _check_kinds(self) -> None:
        for number, load in enumerate(self._loads):
            if load.unmarked_layers:
                raise ValueError(
                    f"loads[{number}] is a layerwise offload whose layers are not marked: {load}; name it in saves"
                )
        for number, save in enumerate(self._unfinished):
            if not save.layerwise:
                raise ValueError(f"saves[{number}] is not a layerwise offload: {save}; layerwise=True is expected")

    def before(self, layer: int) -> None:
        """Work submitted to the stream from now on sees this layer of all loads. Call it before the layer's cache is
        touched, be it to write the new tokens: a block in which the prefix ends belongs to both.

        Raises:
            As :meth:`Transfer.wait_layer`.
        """
        for load in self._loads:
            load.wait_layer(layer, stream=self._stream, timeout_s=self._timeout_s)

    def after(self, layer: int) -> None:
        """The work submitted to the stream so far has written this layer: it may be saved.

        Raises:
            As :meth:`Transfer.mark_layer_written`.
        """
        for save in self._unfinished:
            save.mark_layer_written(layer, stream=self._stream)
        self._marked.add(layer)

    @contextmanager
    def layer(self, layer: int) -> Iterator[None]:
        """:meth:`before` in front of the ``with`` block, :meth:`after` behind it unless it raises."""
        self.before(layer)
        yield
        self.after(layer)

    def __enter__(self) -> ForwardPass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for save in self._unfinished:
            if save.layerwise and len(self._marked) < save.num_layers:
                save.cancel()
        self._unfinished = []


class LayerHooks:
    """Hooks on the layers of a model: a call of ``layers[i]`` is layer i of the :meth:`forward_pass` that is running.
    Outside of one the model runs as if there were no hooks.

    The layers have to be called once per pass, by the thread that has opened it, in dygraph: a traced program
    (``paddle.jit.to_static``) and a replayed CUDA graph do not run Python hooks.

    Args:
        layers: ``paddle.nn.Layer`` objects in the order of the cache's layers, such as ``model.layers``: each that has
            a cache, once.

    Raises:
        TypeError: something else than layers.
        ValueError: a layer occurs twice.

    Example:
        >>> import paddle
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.integrations import LayerHooks
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8))
        >>> model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4))
        >>> hooks = LayerHooks(list(model))
        >>> load, save = scheduler.onload([2], [0]), scheduler.offload([1], [3], layerwise=True)
        >>> with hooks.forward_pass([load], [save]):
        ...     hidden = model(paddle.zeros([1, 4]))  # each layer waits for the load, then lets it be saved
        >>> load.wait(), save.wait()
        (None, None)
        >>> hooks.remove(); scheduler.close()
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._running: ForwardPass | None = None
        self._handles: list[Any] = []
        layers = list(layers)
        seen: dict[int, int] = {}
        for number, layer in enumerate(layers):
            if not callable(getattr(layer, "register_forward_pre_hook", None)):
                raise TypeError(f"layers[{number}] is {type(layer).__name__}; a paddle.nn.Layer is expected")
            if seen.setdefault(id(layer), number) != number:
                raise ValueError(f"layers[{number}] is layers[{seen[id(layer)]}] again; each layer is named once")
        self._num_layers = len(layers)
        for number, layer in enumerate(layers):
            self._handles.append(layer.register_forward_pre_hook(lambda *_, number=number: self._before(number)))
            self._handles.append(layer.register_forward_post_hook(lambda *_, number=number: self._after(number)))

    @contextmanager
    def forward_pass(
        self,
        loads: Sequence[Transfer] = (),
        saves: Sequence[Transfer] = (),
        *,
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> Iterator[ForwardPass]:
        """Call the model inside; arguments as of :class:`ForwardPass`. The saves are cancelled also where the pass
        cannot begin (RuntimeError, ValueError).

        Raises:
            RuntimeError: another pass is running, or there are loads and the hooks are removed.
            TypeError: ``loads`` or ``saves`` is not a list of transfers.
            ValueError: as :class:`ForwardPass`, or a transfer has another number of layers than there are hooks.
        """
        with ForwardPass(loads, saves, stream=stream, timeout_s=timeout_s) as running:
            self._check_ready(running._loads, running._unfinished)
            self._running = running
            try:
                yield running
            finally:
                self._running = None

    def _check_ready(self, loads: list[Transfer], saves: list[Transfer]) -> None:
        if self._running is not None:
            raise RuntimeError("a forward pass is running already; passes of one model come one after another")
        if loads and not self._handles:
            raise RuntimeError("the hooks are removed: nothing would wait for the loads")
        for transfer in (*loads, *saves):
            if transfer.num_layers != self._num_layers:
                raise ValueError(
                    f"the hooks are on {self._num_layers} layers, a transfer has {transfer.num_layers}; "
                    "each layer that has a cache needs its hook"
                )

    def remove(self) -> None:
        """Takes the hooks off the layers. Again: does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, layer: int) -> None:
        if self._running is not None:
            self._running.before(layer)

    def _after(self, layer: int) -> None:
        if self._running is not None:
            self._running.after(layer)
