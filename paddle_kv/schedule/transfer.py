"""The handle that a scheduler's call returns: waiting, marking, cancelling, hearing of the end.

What it stands for is a :class:`~paddle_kv.schedule.movement.Movement`. The handle changes nothing itself: it asks for
sections (:mod:`paddle_kv.tracking.group`) and waits outside of every lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from numbers import Integral
from typing import Any

from ..backend.work import Event, Stream, TransferPlan
from ..errors import CancelledError, TransferError
from ..lists import listed
from ..timeouts import check_timeout
from ..tracking.group import change, note
from ..tracking.keeper import NO_END, Deadline, Waiter, log, nothing
from . import behind, hearing, marking, missing, settling, submission
from .movement import Movement, State
from .resources import Events
from .uses import holding


class Transfer:
    """A load or save: what the calls of a scheduler return, as long as anybody refers to it.

    Any thread may call, several at once. Once it has failed or was cancelled, every call but ``done``, ``cancel``,
    ``add_done_callback`` and the attributes raises :class:`~paddle_kv.TransferError` or
    :class:`~paddle_kv.CancelledError`, each call one of its own. ``await transfer`` is :meth:`wait` for asyncio.

    A layerwise save of which layers are not marked is cancelled when the last reference to it goes: nobody could mark
    them any more. A failure of which nobody has asked by then is written to the log ``paddle_kv``, once.

    Attributes:
        bytes: bytes that it moves.

    Example:
        >>> from paddle_kv import CancelledError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
        ...     save = scheduler.offload([2], [0], layerwise=True)
        ...     for layer in range(save.num_layers):
        ...         save.mark_layer_written(layer)  # behind the work that writes it
        ...     save.wait_on()  # work from here on may overwrite device block 2
        ...     save.wait(timeout_s=10)
        ...     aborted = scheduler.offload([3], [1], layerwise=True)
        ...     aborted.mark_layer_written(0)
        ...     aborted.cancel()  # layer 1 was never marked
        ...     try:
        ...         aborted.wait(timeout_s=10)
        ...     except CancelledError as error:
        ...         print(error.block_ids)
        ...     save.state.value, save.error, aborted.state.value, aborted.error is not None
        [1]
        ('done', None, 'cancelled', True)
    """

    _alone: Any = None  # of :mod:`.alone`, of one that was started so
    _movement: Movement

    def __init__(self, movement: Movement | None, alone: Any = None) -> None:
        if movement is None:
            self._alone = alone
        else:
            self._movement = movement
        known = movement or alone
        self.bytes: int = known.bytes
        self._scheduler = known.scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "_movement":  # whoever asks for it needs all of it
            alone = self._alone
            found = self.__dict__.get(name) if alone is None else alone.written_down()
            if found is not None:  # by another thread, perhaps, since it was not found
                return found
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        """Does not look at the device: a transfer that nobody has waited for or asked may be further than it says."""
        movement = self._movement
        blocks = len(movement.plan.device_ids)
        if movement.failure is not None:
            state = movement.failure.message
        elif movement.over:
            state = "done"
        else:
            state = f"in flight, {movement.num_unsubmitted} of {movement.plan.num_groups} parts to be submitted"
        return f"<{type(self).__name__}: {movement.direction} of {blocks} blocks, {self.bytes} bytes; {state}>"

    # ---- what the user calls ----
    def wait_layer(self, layer: int, *, stream: Any = None, timeout_s: float | None = None) -> None:
        """Work submitted to ``stream`` from now on runs after layer ``layer`` of this transfer.

        On a GPU the host does not wait for the copy: only, at most ``timeout_s``, until the library's thread has
        submitted it, which it does two or three calls of an engine ahead of the copies (and not before a layerwise
        offload that it depends on is marked). On the CPU backend the caller blocks until the layer is there. ``stream``
        is the compute stream of the scheduler if not given.

        A failure that is already known is raised; a later one is raised by :meth:`wait` and by every later call, so
        results are valid only after :meth:`wait` has returned. Nothing is waited for of a layer that it leaves out.

        Raises:
            IndexError: no such layer.
            ValueError: the layer was marked as read: another one takes its place in the layer buffer.
            TimeoutError: ``timeout_s`` is over.
            TransferError, CancelledError: the transfer failed or was cancelled.
        """
        layer = self._layer_index(layer)
        if timeout_s is not None:
            check_timeout(timeout_s)
        alone = self._alone
        if alone is not None and alone.wait_layer(layer, stream, timeout_s):
            return
        self._check_lies_there(layer)
        self._wait_layer(layer, self._scheduler.compute_stream(stream), timeout_s)

    def _check_lies_there(self, layer: int) -> None:
        movement = self._movement
        following = layer + movement.ring
        if not movement.ring or movement.layerwise or not movement.plan.num_groups:
            return
        if following in movement.to_mark and following not in movement.unmarked:
            movement.raise_if_failed()
            raise ValueError(
                f"layer = {layer} was marked as read: layer {following} takes its place in the layer buffer"
            )

    def _wait_layer(self, layer: int, queue: Stream, timeout_s: float | None) -> None:
        if not self._movement.plan.num_groups:
            self._wait_behind_others(lambda other, left_s: other._wait_layer(layer, queue, left_s), timeout_s)
            return
        movement = self._movement
        if movement.state is State.DONE:
            return
        group = movement.plan.group_of(layer)
        if group in movement.plan.left_out:
            movement.raise_if_failed()
            return
        self._wait_behind(queue, lambda: movement.events[group], {group}, timeout_s, layer)

    def wait_on(self, stream: Any = None, *, timeout_s: float | None = None) -> None:
        """Work submitted to ``stream`` from now on runs after the whole transfer: :meth:`wait_layer` for all layers.

        Raises:
            TimeoutError: ``timeout_s`` is over before the last layer was submitted (CPU backend: before it was there).
            TransferError, CancelledError: the transfer failed or was cancelled.
        """
        check_timeout(timeout_s)
        queue = self._scheduler.compute_stream(stream)
        movement = self._movement
        if not movement.plan.num_groups:
            self._wait_behind_others(lambda other, left_s: other.wait_on(queue, timeout_s=left_s), timeout_s)
            return
        groups = set(movement.plan.groups)
        self._wait_behind(
            queue, lambda: None if movement.num_unsubmitted else movement.last_event, groups, timeout_s, None
        )

    def mark_layer_written(self, layer: int, *, stream: Any = None) -> None:
        """Layer ``layer`` may be saved once the work submitted to ``stream`` so far is done.

        For ``offload(..., layerwise=True)`` only; each layer once, in any order. ``stream`` is the compute stream of
        the scheduler if not given.

        Raises:
            IndexError: no such layer.
            ValueError: the transfer is not a layerwise offload, or the layer is marked already.
            TransferError, CancelledError: the transfer failed or was cancelled.
        """
        layer = self._layer_index(layer)
        if not self._movement.layerwise:
            raise ValueError("mark_layer_written is for offload(..., layerwise=True); this transfer is not layerwise")
        text = "layer = {layer} is marked as written already; each layer is marked once"
        marking.mark(self._movement, layer, self._scheduler.compute_stream(stream), text)

    def mark_layer_read(self, layer: int, *, stream: Any = None) -> None:
        """The work submitted to ``stream`` so far is the last that uses layer ``layer`` where this load has put it: the
        next layer may come to lie there.

        For loads into a device cache with ``layer_buffers``; each layer once, in any order, and behind
        :meth:`mark_layer_written` of it, if what the model has written to blocks of this load is to be saved. Of the
        last layers, behind which none comes, it does nothing.

        Raises:
            IndexError: no such layer.
            ValueError: the transfer is no load into such a cache, or the layer is marked already.
            TransferError, CancelledError: the transfer failed or was cancelled.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> spec = KVCacheSpec(num_layers=5, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> cache = DeviceCache(spec, 3, "cpu", layer_buffers=2)
            >>> with LayerwiseScheduler(cache, HostPool(spec, 8)) as scheduler:
            ...     save = scheduler.offload([1], [0], layerwise=True)
            ...     for layer in range(5):
            ...         if layer >= 2:
            ...             save.wait_layer(layer - 2)  # which lay in the same buffer
            ...         cache.tensor("key", layer)[1] = layer + 1.0
            ...         save.mark_layer_written(layer)
            ...     load = scheduler.onload([0], [2])
            ...     for layer in range(5):
            ...         load.wait_layer(layer, timeout_s=10)
            ...         assert cache.tensor("key", layer)[2].max().item() == layer + 1.0
            ...         load.mark_layer_read(layer)
        """
        layer = self._layer_index(layer)
        movement = self._movement
        if not movement.ring or movement.direction != "onload":
            raise ValueError("mark_layer_read is for onloads into a device cache with layer_buffers; this is none")
        if layer + movement.ring < movement.plan.num_layers:
            text = "layer = {layer} is marked as read already; each layer is marked once"
            marking.mark(movement, layer + movement.ring, self._scheduler.compute_stream(stream), text)
        else:
            movement.raise_if_failed()

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until the transfer is over; then all of its data is in place.

        Raises:
            TimeoutError: ``timeout_s`` is over; the transfer goes on.
            TransferError, CancelledError: it failed or was cancelled; ``__cause__`` says what the device reported.
        """
        self.wait_over(timeout_s)
        if self._alone is None:  # else nothing has gone wrong
            self._movement.raise_if_failed()

    def wait_over(self, timeout_s: float | None = None) -> None:
        """:meth:`wait`, whatever its end: behind it nothing of the transfer touches memory any more.

        Raises:
            TimeoutError: ``timeout_s`` is over; the transfer goes on.
        """
        check_timeout(timeout_s)
        deadline = Deadline(timeout_s)
        alone = self._alone
        if alone is not None and alone.wait(deadline):
            return
        movement = self._movement
        movement.target.group.check_outside()
        if not movement.over:
            change(movement.target, functools.partial(settling.look, movement))
            hearing.hear(movement, deadline)
        if not self._wait_for(lambda: movement.over, deadline, movement.waiters):
            self._look()
            if not movement.over:
                if movement.num_unsubmitted and not movement.failed:
                    raise missing.not_submitted(movement, timeout_s, None)
                raise TimeoutError(f"the transfer was not over after timeout_s = {timeout_s}")

    def done(self) -> bool:
        """Whether the transfer is over: all data in place, failed, or cancelled with nothing of it running any more."""
        self._look()
        return self._movement.over

    def cancel(self) -> None:
        """Drops what the device has not been given: on a GPU within one call of an engine. The rest runs to its end.

        If anything was dropped, the transfer ends as cancelled: every later call raises, and its target blocks hold no
        usable data until they are rewritten. The blocks stay in use until the submitted part is done. A transfer that
        is submitted completely ends as if it had not been cancelled. A finalizer may call it too.
        """
        movement = self._movement
        if movement.group.inside:
            note(movement, functools.partial(_cancel, movement))
        else:
            change(movement, functools.partial(_cancel, movement))

    def add_done_callback(self, function: Callable[[Transfer], object]) -> None:
        """``function(transfer)`` is called once, when the transfer is over, whatever its end; soon, if it is already.

        It is called in a thread of the library, without a lock, one callback after the other: it may call the scheduler
        and its transfers, and should leave long work to others. One that waits for a transfer holds the later callbacks
        up, not the transfers. It must wait for nothing else: not for what another callback does, nor for a lock whose
        holder waits for a transfer, since the same thread hears of ends. What it raises is logged.

        Example:
            >>> import queue
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> over = queue.Queue()
            >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
            ...     scheduler.offload([2], [0]).add_done_callback(over.put)
            ...     over.get(timeout=10).state.value
            'done'
        """
        if not callable(function):
            raise TypeError(f"function is {function!r}; a function of the transfer is expected")
        change(self._movement, functools.partial(_add_callback, self._movement, functools.partial(function, self)))

    def __await__(self) -> Generator[Any, None, None]:
        """:meth:`wait` in a coroutine. If the awaiting task is cancelled, the transfer goes on."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self.add_done_callback(lambda _: _tell(loop, future))
        yield from future
        self._movement.raise_if_failed()

    @property
    def state(self) -> State:
        """How far it is, as far as it is known: does not look at the device."""
        return self._movement.state

    @property
    def error(self) -> TransferError | CancelledError | None:
        """What went wrong, as far as it is known; a new exception each time."""
        self._look()
        return self._movement.error()

    @property
    def num_layers(self) -> int:
        """Layers that it moves, each with a :meth:`wait_layer`."""
        return int(self._scheduler.device_cache.spec.num_layers)

    @property
    def layerwise(self) -> bool:
        """Whether each of its layers starts at :meth:`mark_layer_written`: ``offload(..., layerwise=True)``."""
        return self._movement.layerwise

    @property
    def unmarked_layers(self) -> list[int]:
        """Those that still have to be marked: of a layerwise offload as written, of a load into a cache with
        ``layer_buffers`` as read."""
        unmarked = sorted(self._movement.unmarked.copy())
        return unmarked if self._movement.layerwise else [layer - self._movement.ring for layer in unmarked]

    @property
    def layer_buffers(self) -> int:
        """As of its device cache; :attr:`num_layers` if each layer has memory of its own there."""
        return self._movement.ring or self.num_layers

    @property
    def plan(self) -> TransferPlan:
        """Which blocks it moves."""
        return self._movement.plan

    def stands_behind(self, other: Transfer) -> bool:
        """Whether a layer of this one can be submitted only behind the same layer of the other, because of their
        blocks."""
        movement = self._movement
        ask = functools.partial(behind.stands_behind, movement, other._movement)
        return bool(movement.depends_on and change(movement, ask))  # it never comes to stand behind more

    def stands_behind_last_of(self, others: Sequence[Transfer]) -> list[int]:
        """Numbers of those of which layers are not marked yet, and the last ones have to be submitted before the first
        ones of this one, because both use the same blocks of layer buffers."""
        movement = self._movement
        unmarked = [number for number, other in enumerate(others) if other is not self and other._movement.unmarked]
        if not unmarked or not movement.ring or not movement.depends_on:
            return []
        found = change(movement, functools.partial(behind.in_buffers, movement))
        return [number for number in unmarked if others[number]._movement in found]

    @property
    def failed(self) -> bool:
        """Whether something is known to have gone wrong; does not look at the device."""
        return self._movement.spoiled

    @property
    def elapsed_ms(self) -> float:
        """From the start of its first copy to the end of its last one; NaN until the transfer is over."""
        return self._movement.elapsed_ms

    @property
    def layer_times_ms(self) -> list[tuple[float, float]]:
        """Start and end of the copy of each layer that it moves, in their order, since the scheduler was made; it must
        have ``record_layer_times``."""
        return list(self._movement.layer_times_ms)

    # ---- waiting: outside of every lock ----
    def _look(self) -> None:
        movement = self._movement
        if not movement.over and not movement.group.inside:
            change(movement, functools.partial(settling.look, movement))

    def _wait_for(self, condition: Callable[[], bool], deadline: Deadline, waiters: list[Waiter]) -> bool:
        """Sleeps until the condition, which a change of this transfer brings about; False if the time is over."""
        movement = self._movement
        while not condition():
            waiter = Waiter()
            waiters.append(waiter)
            try:
                if condition():
                    return True
                if not movement.group.host.park(waiter, deadline.left_s()):
                    return condition()
            finally:
                with contextlib.suppress(ValueError):  # released meanwhile
                    waiters.remove(waiter)
        return True

    def _wait_behind_others(self, wait: Callable[[Transfer, float | None], object], timeout_s: float | None) -> None:
        """Of one that moves nothing: behind those that it stands behind, whatever their end."""
        deadline = Deadline(timeout_s)
        for movement in sorted(self._movement.depends_on, key=lambda one: one.number):
            other, told = movement.handle() or Transfer(movement), movement.told
            try:
                wait(other, deadline.left_s())
            except (TransferError, CancelledError):
                movement.told = told  # not to those whose it is
                other.wait_over(deadline.left_s())  # what was submitted of it still touches the blocks

    @holding(lambda names: names["self"]._scheduler)
    def _wait_behind(
        self,
        queue: Stream,
        event_of: Callable[[], Event | None],
        groups: set[int],
        timeout_s: float | None,
        layer: int | None,
    ) -> None:
        deadline = NO_END if timeout_s is None else Deadline(timeout_s)
        movement = self._movement
        movement.group.check_outside()

        def submitted() -> bool:
            if event_of() is None and movement.is_noted:
                change(movement, nothing)  # by a mark, perhaps
            return movement.over or movement.spoiled or event_of() is not None

        if event_of() is None and not self._wait_for(submitted, deadline, movement.layer_waiters):
            raise missing.not_submitted(movement, timeout_s, layer)
        event = event_of()
        held: tuple[Events, ...] = movement.held  # keeps the event until the end of this call
        try:
            movement.raise_if_failed()
            if movement.over:
                return
            self._scheduler.backend.wait_on_stream(queue, event, deadline.left_s())
        except TimeoutError:
            raise TimeoutError(f"a layer was not there after timeout_s = {timeout_s}") from None
        except (TransferError, CancelledError):
            raise
        except Exception:  # of the device, or of a signal handler: the device knows
            raise_if_device_failed(movement)
            raise
        finally:
            del held  # an exception would keep it with this frame
        movement.ordered.setdefault(queue, set()).update(groups)

    def _layer_index(self, layer: Any) -> int:
        num_layers = self._scheduler.device_cache.spec.num_layers
        if type(layer) is int and 0 <= layer < num_layers:  # the rule
            return layer
        if isinstance(layer, bool) or not isinstance(layer, Integral):  # tensors have an index, floats of theirs too
            raise TypeError(f"layer is {layer!r}; an integer is expected")
        found = int(layer)
        if not 0 <= found < num_layers:
            raise IndexError(f"layer = {found} must be in [0, {num_layers})")
        return found


def raise_if_device_failed(movement: Movement) -> None:
    """Outside of sections: raises what the device tells of it."""
    change(movement, functools.partial(settling.look_for_failure, movement))
    movement.raise_if_failed()


# ---- sections ----
def let_go(movement: Movement) -> None:
    """Nobody refers to the transfer any more."""
    if movement.over:
        settling.log_untold(movement)
    elif movement.unmarked and not movement.failed:  # marks on their way count
        _cancel(movement)


def _cancel(movement: Movement) -> None:
    settling.progress(submission.cancel(movement))
    settling.look(movement)


def _add_callback(movement: Movement, callback: Callable[[], object]) -> None:
    if movement.over:
        movement.group.host.tell(callback)
    else:
        movement.callbacks.append(callback)


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def wake_up() -> None:
        if not future.done():
            future.set_result(None)

    try:
        loop.call_soon_threadsafe(wake_up)
    except RuntimeError:
        log.debug("the event loop that awaited a transfer was closed before the transfer was over")


def transfer_list(given: Any, name: str) -> list[Transfer]:
    """An argument as a list, whatever iterates; TypeError unless all of it are transfers."""
    found = listed(given)
    if found is None or not all(isinstance(one, Transfer) for one in found):
        raise TypeError(f"{name} is {given!r}; a list of Transfer is expected")
    return found
