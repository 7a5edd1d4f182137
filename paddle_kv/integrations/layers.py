"""Waits in front of each layer of a model, marks behind it: by hand, or by hooks on ``paddle.nn.Layer``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ..errors import CancelledError, TransferError
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
        ValueError: the pass would wait for marks that it makes later: among the loads a layerwise offload whose layers
            are not marked, a load that stands behind one of the saves, which was started before it, or two loads into
            one block of a cache with ``layer_buffers``. Or among the saves something else. The layerwise saves are
            cancelled.

    As a context manager it ends the saves: those that lack a layer, because the pass was left early or raised, are
    cancelled, or they would wait for that layer forever; so are loads into a ring of layer buffers that wait for one to
    be read. The loads are the caller's: what was computed is valid only after ``wait()`` of each has returned.

    A pass serves several requests, and keeps them apart. A load that fails takes with it the saves that were computed
    from it: those that :meth:`KVOffloadManager.save` was told so of, and such as nothing is known of. The others go on,
    and the end of the ``with`` block raises the failure, which names the load. Where none goes on it is raised at once.

    Attributes:
        failed_loads: number in ``loads`` -> what has failed, so far.

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
        self._loads = dict(enumerate(transfer_list(loads, "loads")))  # without those that have failed
        self._saves = dict(enumerate(transfer_list(saves, "saves")))
        self.failed_loads: dict[int, TransferError | CancelledError] = {}
        self._marked: set[int] = set()
        self._stream = stream
        self._timeout_s = timeout_s
        try:
            self._check_kinds()
        except ValueError:
            self._cancel(list(self._saves))
            raise

    def _check_kinds(self) -> None:
        for number, load in self._loads.items():
            if load.layerwise and load.unmarked_layers:
                raise ValueError(
                    f"loads[{number}] is a layerwise offload whose layers are not marked: {load}; name it in saves"
                )
            for other in load.stands_behind_last_of(list(self._loads.values())):
                raise ValueError(
                    f"loads[{number}] waits for all layers of loads[{other}], which was started before it and loads "
                    "into the same block of the layer buffers; load each block once"
                )
        for number, save in self._saves.items():
            if not save.layerwise:
                raise ValueError(f"saves[{number}] is not a layerwise offload: {save}; layerwise=True is expected")
            for other, load in self._loads.items() if save.unmarked_layers else ():
                if load.stands_behind(save):
                    raise ValueError(
                        f"loads[{other}] waits for the layers of saves[{number}], which was started before it "
                        "and reads a block that it writes; start the load first"
                    )

    def before(self, layer: int) -> None:
        """Work submitted to the stream from now on sees this layer of all loads. Call it before the layer's cache is
        touched, be it to write the new tokens: a block in which the prefix ends belongs to both.

        Raises:
            As :meth:`Transfer.wait_layer`; failures only where nothing is left that goes on.
        """
        for number, load in list(self._loads.items()):
            try:
                load.wait_layer(layer, stream=self._stream, timeout_s=self._timeout_s)
            except (TransferError, CancelledError) as error:
                self._fail(number, error)
        for number, save in list(self._saves.items()):
            if layer >= save.layer_buffers:  # the model is about to write where it reads an earlier layer
                self._wait_for_buffer(number, save, layer - save.layer_buffers)
        if self.failed_loads and not self._loads and not self._saves:
            self._raise()

    def _wait_for_buffer(self, number: int, save: Transfer, layer: int) -> None:
        try:
            save.wait_layer(layer, stream=self._stream, timeout_s=self._timeout_s)
        except (TransferError, CancelledError):  # it tells its owner
            del self._saves[number]

    def _fail(self, number: int, error: TransferError | CancelledError) -> None:
        load = self._loads.pop(number)._movement
        named = type(error)(f"loads[{number}]: {error}", layer=error.layer, block_ids=error.block_ids)
        named.__cause__ = error.__cause__
        self.failed_loads[number] = named
        origins = {other: save._movement.computed_from for other, save in self._saves.items()}
        self._cancel([other for other, known in origins.items() if known is None or load in known])

    def _raise(self) -> None:
        raise next(iter(self.failed_loads.values()))

    def _cancel(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            save = self._saves.pop(number)
            if save.layerwise and len(self._marked) < save.num_layers:
                save.cancel()

    def after(self, layer: int) -> None:
        """The work submitted to the stream so far has written this layer, and is through with it: it may be saved, and
        where the layers share buffers the next one may take its place. A save that has failed or was cancelled is
        passed over.

        Raises:
            IndexError, ValueError: as :meth:`Transfer.mark_layer_written`.
        """
        for number, save in list(self._saves.items()):
            try:
                save.mark_layer_written(layer, stream=self._stream)
            except (TransferError, CancelledError):  # it tells its owner
                del self._saves[number]
        for number, load in list(self._loads.items()):
            if load.layer_buffers < load.num_layers and not load.layerwise:
                try:
                    load.mark_layer_read(layer, stream=self._stream)
                except (TransferError, CancelledError) as failure:
                    self._fail(number, failure)
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
        self._cancel(list(self._saves))
        for load in self._loads.values():
            if load.unmarked_layers:
                load.cancel()
        if error is None and self.failed_loads:
            self._raise()


class LayerHooks:
    """Hooks on the layers of a model: a call of ``layers[i]`` is layer i of the :meth:`forward_pass` that is running in
    the same thread. Outside of one the model runs as if there were no hooks.

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
        self._of_thread = threading.local()
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
            RuntimeError: another pass is running in this thread, or there are loads and the hooks are removed.
            TypeError: ``loads`` or ``saves`` is not a list of transfers.
            ValueError: as :class:`ForwardPass`, or a transfer has another number of layers than there are hooks.
        """
        with ForwardPass(loads, saves, stream=stream, timeout_s=timeout_s) as running:
            self._check_ready(running)
            self._of_thread.running = running
            try:
                yield running
            finally:
                self._of_thread.running = None

    @property
    def _running(self) -> ForwardPass | None:
        return getattr(self._of_thread, "running", None)

    def _check_ready(self, given: ForwardPass) -> None:
        if self._running is not None:
            raise RuntimeError("a forward pass is running already in this thread; its passes come one after another")
        if given._loads and not self._handles:
            raise RuntimeError("the hooks are removed: nothing would wait for the loads")
        for transfer in (*given._loads.values(), *given._saves.values()):
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
