"""Waits and marks inside a captured CUDA graph, which a host call cannot stand in front of.

A gate is a kernel of the graph that looks at a number: the *turn* to which its layer has come. Arming gives the next
replay a new turn, and each layer comes to it behind the loads of that replay; a mark tells the turn of its replay in
the same way. Turns only grow, so no gate is ever closed again, and a replay without a turn of its own finds all of
them open.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from ..backend.protocol import Gates as DeviceGates
from ..backend.work import Event, Stream
from ..timeouts import check_time, check_timeout
from ..tracking.alarms import Alarms
from ..tracking.group import change
from . import by_marks, settling, submission
from .movement import Failure, Follower, Movement, State
from .transfer import Transfer, transfer_list


class Gates:
    """What :meth:`LayerwiseScheduler.gates` returns: layer waits and layer marks of the graphs that are launched on one
    compute stream.

    While a graph is captured, :meth:`wait` in front of a layer and :meth:`mark` behind it become part of it
    (:meth:`mark_and_wait` where they follow each other); before a launch :meth:`arm` says which loads the next replay
    waits for and which saves it marks. Any number of graphs may share the gates, for example one for each batch size,
    as long as their launches and the calls of ``arm`` are made in one order on one stream. Replays that were armed one
    after the other may be in flight together. A replay for which ``arm`` was not called finds its gates open. On the
    CPU backend a "replay" is code that calls ``wait`` and ``mark`` again.

    Gates live until their scheduler is closed: no graph that has them may be launched after that.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> cache, pool = DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)
        >>> pool.view("key", 1, 6)[:] = 3.0
        >>> with LayerwiseScheduler(cache, pool) as scheduler:
        ...     gates = scheduler.gates(timeout_s=10)
        ...     def replay():  # on a GPU: capture this once, launch the graph each time
        ...         for layer in range(spec.num_layers):
        ...             gates.wait(layer)
        ...             cache.tensor("key", layer)[4] = cache.tensor("key", layer)[2] * 2
        ...             gates.mark(layer)
        ...     load, save = scheduler.onload([6], [2]), scheduler.offload([4], [7], layerwise=True)
        ...     gates.arm(loads=[load], saves=[save])
        ...     replay()
        ...     load.wait(timeout_s=10)  # before results are trusted
        ...     save.wait(timeout_s=10)
        >>> pool.view("key", 1, 7).max().item()
        6.0
    """

    def __init__(self, scheduler: Any, timeout_s: float) -> None:
        self._scheduler = scheduler
        self._timeout_s = check_time(timeout_s)
        check_timeout(timeout_s, positive=True)
        self._num_layers: int = scheduler.device_cache.spec.num_layers
        self._load_turn = self._save_turn = 0
        self._waiting: deque[_Replay] = deque()  # some of their layers have not been let through
        self._armed_saves: dict[Movement, int] = {}  # not over; the turn of each
        self._alarms = Alarms("paddle_kv-gates-deadlines")
        self._gates: DeviceGates = scheduler.group.host.call(self._open)

    def _open(self) -> DeviceGates:
        scheduler = self._scheduler
        change(scheduler, scheduler.check_open)
        gates: DeviceGates = scheduler.backend.create_gates(self._num_layers, self._timeout_s)
        try:
            change(scheduler, functools.partial(self._register, gates))
        except BaseException:
            gates.close()
            raise
        return gates

    def _register(self, gates: DeviceGates) -> None:
        self._scheduler.check_open()
        self._scheduler.resources.closers.append(functools.partial(_close, self._alarms, gates))
        self._scheduler.on_close.append(self._end)

    def wait(self, layer: int, *, stream: Any = None) -> None:
        """Work that is submitted to ``stream`` from now on, or captured behind this call, runs behind layer ``layer``
        of the loads for which its replay is armed.

        A launch of one small kernel; it changes nothing on the host. A gate that has waited for the ``timeout_s`` of
        the gates gives up: its replay goes on, the other gates of the replay wait no more, and those of its loads that
        have not arrived fail.

        Args:
            layer: which; in the graph the layers come in ascending order.
            stream: an int handle, a CuPy or Paddle stream; None is the scheduler's compute stream.

        Raises:
            TypeError, IndexError: no such layer.
            ClosedError: the scheduler is closed.
        """
        self._gates.wait(self._checked(layer), self._named(stream))

    def mark(self, layer: int, *, stream: Any = None) -> None:
        """Layer ``layer`` of the saves for which the replay is armed may be copied once the work that was submitted to
        ``stream``, or captured, before this call is done.

        A launch of one small kernel. Arguments and errors: see :meth:`wait`.
        """
        self._gates.mark(self._checked(layer), self._named(stream))

    def mark_and_wait(self, layer: int, *, stream: Any = None) -> None:
        """:meth:`mark` of layer ``layer`` and :meth:`wait` in front of the one behind it, where nothing comes between
        them: one kernel in place of two. Of the last layer, :meth:`mark`.

        Arguments and errors: see :meth:`wait`.
        """
        layer, queue = self._checked(layer), self._named(stream)
        if layer + 1 < self._num_layers:
            self._gates.mark_and_wait(layer, queue)
        else:
            self._gates.mark(layer, queue)

    def arm(self, *, loads: Iterable[Transfer] = (), saves: Iterable[Transfer] = (), stream: Any = None) -> None:
        """The next graph that is launched on ``stream`` waits at its gates for the loads and marks the saves.

        A load may be in any state, also one of which nothing is submitted yet. A save is marked by that replay alone:
        do not call its ``mark_layer_written``. Launch the graph on ``stream`` behind this call: a save of which not all
        layers were marked ``timeout_s`` after this call fails. Replays before it are not touched by it.

        After the replay the loads tell whether they have arrived: ``wait()`` before results are trusted. A load that
        fails or is cancelled opens its gates at once, as ``close`` does.

        Args:
            loads: transfers of this scheduler in either direction; a layer waits for the same layer of each.
            saves: ``offload(..., layerwise=True)`` of which no layer is marked.
            stream: the one on which the graph is launched; None is the scheduler's compute stream.

        Raises:
            TypeError: something else than a transfer.
            ValueError: a transfer of another scheduler or named twice, a save that is not layerwise or is marked, a
                load that can come only behind one of the saves.
            TransferError, CancelledError: one of them has failed already. Nothing is armed then.
            ClosedError, CaptureError: the scheduler is closed; the stream is being captured.
        """
        given_loads, given_saves = transfer_list(loads, "loads"), transfer_list(saves, "saves")
        for name, given in (("loads", given_loads), ("saves", given_saves)):
            if any(one._scheduler is not self._scheduler for one in given):
                raise ValueError(f"{name} has a transfer of another scheduler")
            if len({id(one._movement) for one in given}) < len(given):
                raise ValueError(f"{name} has a transfer twice")
        for save in given_saves:
            if not save.layerwise:
                raise ValueError("saves has a transfer that is not an offload(..., layerwise=True)")
            if any(load is save or load.stands_behind(save) for load in given_loads):
                raise ValueError("loads has a transfer that can come only behind one of the saves: it would never come")
        queue = self._scheduler.compute_stream(stream)
        movements_of = [one._movement for one in given_loads], [one._movement for one in given_saves]
        change(self._scheduler, functools.partial(self._arm, *movements_of, queue))
        for save in given_saves:
            save._movement.raise_if_failed()

    def _named(self, stream: Any) -> Any:
        return self._scheduler.default_stream if stream is None else stream

    def _checked(self, layer: Any) -> int:
        if isinstance(layer, bool) or not isinstance(layer, Integral):
            raise TypeError(f"layer is {layer!r}; an integer is expected")
        found = int(layer)
        if not 0 <= found < self._num_layers:
            raise IndexError(f"layer = {found} must be in [0, {self._num_layers})")
        self._scheduler.check_open()
        return found

    # ---- sections ----
    def _arm(self, loads: list[Movement], saves: list[Movement], queue: Stream) -> None:
        self._scheduler.check_open()
        for movement in (*loads, *saves):
            movement.raise_if_failed()
        saves = [save for save in saves if save.plan.num_groups]
        for save in saves:
            by_marks.end(save)
            if len(save.unmarked) < save.plan.num_layers:
                raise ValueError("saves has a transfer of which a layer is marked already")
        # One that moves nothing stands for those that it is behind.
        awaited = [one for load in loads for one in ([load] if load.plan.num_groups else load.depends_on)]
        awaited = [one for one in awaited if not one.over]
        load_turn, save_turn = self._load_turn + bool(awaited), self._save_turn + bool(saves)
        if not awaited and not saves:
            return
        self._gates.arm(queue, load_turn, save_turn)
        self._load_turn, self._save_turn = load_turn, save_turn
        if saves:
            self._mark_all(saves, save_turn)
        if awaited:
            replay = _Replay(self, load_turn, awaited)
            self._waiting.append(replay)
            for load in awaited:
                load.followers.append(replay)
            self.let_through()

    def _mark_all(self, saves: list[Movement], turn: int) -> None:
        """The marks that the replay will write are the marks of these saves."""
        events = [[save.unmarked[layer] for save in saves] for layer in range(self._num_layers)]
        for save in saves:
            save.unmarked.clear()
        try:
            self._gates.record_marks(turn, events)
        except Exception as error:  # noqa: BLE001  an event that is not recorded would be no wait
            for save in saves:
                failure = Failure.of(f"the gates of an offload could not be armed: {error}", 0, error)
                settling.progress(submission.fail(save, failure))
            self._gates.pass_marks(turn)
            return
        for position, save in enumerate(saves):
            self._armed_saves[save] = turn
            save.followers.append(_MarkedByReplay(self._armed_saves))
            save.marks[:] = [of_layer[position] for of_layer in events]
            save.ready = list(save.plan.groups)
        late = functools.partial(change, self._scheduler, functools.partial(self._end_late, turn))
        self._alarms.add(time.monotonic() + self._timeout_s, late)
        settling.progress(saves)

    def let_through(self) -> None:
        """Hands on which layers have come, in the order in which the replays look: what stands behind a later one must
        not keep an earlier one waiting."""
        while self._waiting and self._waiting[0].let_through(self._gates):
            self._waiting.popleft()

    def given_up(self, turn: int) -> Failure | None:
        """Why the loads of that turn that have not arrived hold what nobody waited for."""
        layer = self._gates.given_up(turn)
        if layer is None:
            return None
        message = f"onload failed: the gate of layer {layer} in a graph gave up after timeout_s = {self._timeout_s}"
        return Failure(State.FAILED, message, layer)

    def _end_late(self, turn: int) -> None:
        late = [save for save, armed in self._armed_saves.items() if armed == turn]
        self._drop(late, f"no graph marked its layers within timeout_s = {self._timeout_s} of the gates")

    def _end(self) -> None:
        """The scheduler is about to be closed, and its transfers were cancelled."""
        self._drop(list(self._armed_saves), "the scheduler was closed before a graph had marked its layers")

    def _drop(self, saves: Iterable[Movement], message: str) -> None:
        """Of these some layers may never be marked. What is on the device already waits for that, and is let go."""
        turns = {save: self._armed_saves[save] for save in saves if not self._is_marked(save)}
        for save in turns:
            self._scheduler.backend.cancel(save.stream, save.number)
            settling.progress(submission.fail(save, Failure(State.FAILED, f"offload failed: {message}")))
        if turns:
            self._gates.pass_marks(max(turns.values()))

    def _is_marked(self, save: Movement) -> bool:
        """The marks come in order."""
        try:
            return bool(self._scheduler.backend.is_complete(save.marks[-1]))
        except Exception:  # noqa: BLE001  the device is lost: nothing waits there any more
            return True


def _close(alarms: Alarms, gates: DeviceGates) -> None:
    """Not a method: what a scheduler holds on its device refers to nothing above."""
    try:
        alarms.close()
    finally:
        gates.close()


class _Replay(Follower):
    """A replay that waits for loads, and up to which layer its gates know what they wait for."""

    def __init__(self, gates: Gates, turn: int, loads: list[Movement]) -> None:
        self._gates = gates
        self._turn = turn
        self._loads = loads
        self._next_layer = 0

    def let_through(self, gates: DeviceGates) -> bool:
        """Whether that was all."""
        num_layers = self._loads[0].plan.num_layers
        waits: list[list[Event]] = []
        for layer in range(self._next_layer, num_layers):
            of_layer = self._waits_of(layer)
            if of_layer is None:
                break
            waits.append(of_layer)
        if waits:
            first, self._next_layer = self._next_layer, self._next_layer + len(waits)
            gates.let_through(first, self._turn, waits)
        return self._next_layer == num_layers

    def _waits_of(self, layer: int) -> list[Event] | None:
        """Events behind which the layer is there, or will never be; None while one is not known."""
        found: list[Event] = []
        for load in self._loads:
            group = load.plan.group_of(layer)
            if load.over or group in load.plan.left_out:
                continue
            event = load.events[group]
            if event is not None:
                found.append(event)
            elif not load.failed:
                return None
        return found

    def submitted(self, movement: Movement, groups: range) -> None:
        self._gates.let_through()

    def failed(self, movement: Movement) -> None:
        self._gates.let_through()

    def loss_of(self, movement: Movement) -> Failure | None:
        return self._gates.given_up(self._turn)


class _MarkedByReplay(Follower):
    """A save is over: nobody has to look after its marks."""

    def __init__(self, armed: dict[Movement, int]) -> None:
        self._armed = armed

    def ended(self, movement: Movement) -> None:
        del self._armed[movement]
