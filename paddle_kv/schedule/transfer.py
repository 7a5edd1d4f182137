"""One load or save: the handle that a scheduler's call returns.

A transfer moves its layers in groups. A group is *submitted* (enqueued on the transfer stream, with an event behind it)
as soon as its layers are marked (layerwise offload) and the same layers of all transfers that it depends on are
submitted. So every event that anybody waits for has been recorded. What is not submitted can still be *dropped*: by
``cancel`` or by a failure.

Two ends have to be told apart. A transfer is *over* for its user when its own submitted work is done; its events are
given back then. It is *retired*, and its blocks are given back, when in addition (if groups were dropped) the transfers
that it depended on are retired: later ones that wait for this one inherit their order.

State changes under ``hazards.lock``; host waits happen outside of it.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..backend.protocol import Event, LayerWork, Stream
from ..errors import TransferError
from ..tracking import hazards
from .plan import TransferPlan, check_timeout

if TYPE_CHECKING:
    from .scheduler import LayerwiseScheduler

POLL_S = 0.001  # how often a wait for something that is not submitted looks again


class Transfer:
    """A load or save: what the calls of a scheduler return, as long as anybody refers to it.

    Any thread may call, several at once. Once it has failed or was cancelled, every call but ``done``, ``cancel`` and
    the attributes raises the same :class:`~paddle_kv.TransferError`.

    Attributes:
        bytes: bytes that it moves.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError
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
        ...     except TransferError as error:
        ...         print(error, error.layer, error.block_ids)
        ...     save.done(), save.error, aborted.done(), aborted.error is not None
        offload was cancelled before layer 1 was moved 1 [1]
        (True, None, True, True)
    """

    def __init__(self, scheduler: LayerwiseScheduler, plan: TransferPlan, stream: Stream, *, layerwise: bool) -> None:
        self.bytes: int = len(plan.device_ids) * scheduler._bytes_per_block
        self._scheduler = scheduler  # keeps the pools: their memory must not go away under a copy
        self._plan = plan
        num_groups = plan.num_groups
        self._stream = stream
        self._marks: list[Event | None] | None = [None] * plan.num_layers if layerwise else None
        self._marked: list[int] = [] if layerwise else list(range(num_groups))  # groups not submitted, ascending
        self._after: list[Event] = []  # events that come before the first layer: the compute stream's
        self._depends_on: set[Transfer] = set()
        self._reads_from: set[Transfer] = set()  # those of them whose result is read
        self._dependents: list[Transfer] = []
        self._events: list[Event | None] = [None] * num_groups  # one a group, None until submitted
        self._num_unsubmitted = num_groups
        self._starts: list[tuple[Event, range]] = []  # one a submission
        self._last_event: Event | None = None
        self._fence_event: Event | None = None  # behind a submission that failed half way
        self._held_events: list[Event] = []  # all of the above and the marks
        self._host_waits = 0  # threads that look at an event outside of the lock: it must not be re-used meanwhile
        self._waiting: dict[Stream, set[int]] = {}  # stream -> groups that its later work waits for
        self._error: TransferError | None = None
        self._dropped = False
        self._cancelled = False
        self._over = False
        self._retired = False
        self._elapsed_ms = float("nan")
        self._layer_times_ms: list[tuple[float, float]] = []

    def __repr__(self) -> str:
        """Does not look at the device: a transfer that nobody has waited for or asked may be further than it says."""
        blocks = len(self._plan.device_ids)
        if self._error is not None:
            state = str(self._error)
        elif self._over:
            state = "done"
        else:
            state = f"in flight, {self._num_unsubmitted} of {self._plan.num_groups} parts to be submitted"
        return f"<{type(self).__name__}: {self._plan.direction} of {blocks} blocks, {self.bytes} bytes; {state}>"

    # ---- what the user calls ----
    def wait_layer(self, layer: int, *, stream: Any = None, timeout_s: float | None = None) -> None:
        """Work submitted to ``stream`` from now on runs after layer ``layer`` of this transfer.

        On a GPU the host does not wait for the copy: only, at most ``timeout_s``, until it has been submitted (it is at
        once, unless it depends on a layerwise offload whose layers are not marked yet). On the CPU backend the caller
        blocks until the layer is there. ``stream`` is the compute stream of the scheduler if not given.

        A failure that is already known is raised; a later one is raised by :meth:`wait` and by every later call, so
        results are valid only after :meth:`wait` has returned.

        Raises:
            IndexError: no such layer.
            TimeoutError: ``timeout_s`` is over.
            TransferError: the transfer failed or was cancelled.
        """
        layer = self._layer_index(layer)
        check_timeout(timeout_s)
        queue = self._scheduler._compute_stream(stream)
        started = time.monotonic()
        if not self._plan.num_groups:
            return
        with hazards.changed:
            self._raise_if_failed()
            group = self._plan.group_of(layer)
            while self._events[group] is None:
                self._sleep_until_changed(started, timeout_s, layer)
                self._raise_if_failed()
            if self._over:
                return
            event = self._events[group]
            self._host_waits += 1
        self._wait_behind(queue, event, {group}, started, timeout_s)

    def mark_layer_written(self, layer: int, *, stream: Any = None) -> None:
        """Layer ``layer`` may be saved once the work submitted to ``stream`` so far is done.

        For ``offload(..., layerwise=True)`` only; each layer once, in any order. ``stream`` is the compute stream of
        the scheduler if not given.

        Raises:
            IndexError: no such layer.
            ValueError: the transfer is not a layerwise offload, or the layer is marked already.
            TransferError: the transfer failed or was cancelled.
        """
        layer = self._layer_index(layer)
        if self._marks is None:
            raise ValueError("mark_layer_written is for offload(..., layerwise=True); this transfer is not layerwise")
        queue = self._scheduler._compute_stream(stream)
        with hazards.changed:
            self._raise_if_failed()
            if self._marks[layer] is not None:
                raise ValueError(f"layer = {layer} is marked as written already; each layer is marked once")
            if self._over:
                return
            event = self._take_event()
            self._scheduler._backend.record(event, queue)
            self._marks[layer] = event  # only now: waiting for an event that is not recorded would be no wait
            group = self._plan.group_of(layer)
            layers = self._plan.layers_of(group)
            if None not in self._marks[layers.start : layers.stop]:
                bisect.insort(self._marked, group)
                self._advance()
            self._raise_if_failed()

    def wait_on(self, stream: Any = None, *, timeout_s: float | None = None) -> None:
        """Work submitted to ``stream`` from now on runs after the whole transfer: :meth:`wait_layer` for all layers.

        Raises:
            TimeoutError: ``timeout_s`` is over before the last layer was submitted (CPU backend: before it was there).
            TransferError: the transfer failed or was cancelled.
        """
        check_timeout(timeout_s)
        queue = self._scheduler._compute_stream(stream)
        started = time.monotonic()
        with hazards.changed:
            self._raise_if_failed()
            while not self._all_submitted:
                self._sleep_until_changed(started, timeout_s)
                self._raise_if_failed()
            if self._over:
                return
            event = self._last_event
            self._host_waits += 1
        self._wait_behind(queue, event, set(range(self._plan.num_groups)), started, timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until the transfer is over; then all of its data is in place.

        Raises:
            TimeoutError: ``timeout_s`` is over; the transfer goes on.
            TransferError: it failed or was cancelled; ``__cause__`` is what the device reported (CudaError).
        """
        check_timeout(timeout_s)
        started = time.monotonic()
        while True:
            with hazards.changed:
                self._look()
                if self._over:
                    self._raise_if_failed()
                    return
                if not self._all_submitted and not self._dropped:
                    self._sleep_until_changed(started, timeout_s)
                    continue
                event = self._last_event
                self._host_waits += 1
            left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started))
            try:
                with contextlib.suppress(Exception):  # poll() keeps it as the transfer's error
                    self._scheduler._backend.wait(event, left)
            finally:
                self._end_host_wait()
            with hazards.lock:
                self._look()
                over = self._over
            if not over:  # the time is, or a transfer whose result it reads is not
                if timeout_s is not None and time.monotonic() - started >= timeout_s:
                    raise TimeoutError(f"the transfer was not over after timeout_s = {timeout_s}")
                time.sleep(POLL_S)

    def done(self) -> bool:
        """Whether the transfer is over: all data in place, failed, or cancelled with nothing of it running any more."""
        with hazards.lock:
            self._look()
            return self._over

    def cancel(self) -> None:
        """Drops the layers that are not submitted. What is submitted runs to its end.

        If anything was dropped, the transfer ends as cancelled: every later call raises, and its target blocks hold no
        usable data until they are rewritten. The blocks stay in use until the submitted part is done. A transfer that
        is submitted completely ends as if it had not been cancelled.
        """
        with hazards.changed:
            if not self._all_submitted and not self._dropped:
                layer = next(i for i in range(self._plan.num_layers) if self._events[self._plan.group_of(i)] is None)
                self._cancelled = True
                self._drop(self._failure(f"{self._plan.direction} was cancelled before layer {layer} was moved", layer))
            self.poll()

    @property
    def error(self) -> BaseException | None:
        """What went wrong, as far as it is known."""
        with hazards.lock:
            self._look()
            return self._error

    @property
    def num_layers(self) -> int:
        """Layers that it moves, each with a :meth:`wait_layer`."""
        return self._plan.num_layers

    @property
    def layerwise(self) -> bool:
        """Whether each of its layers starts at :meth:`mark_layer_written`: ``offload(..., layerwise=True)``."""
        return self._marks is not None

    @property
    def unmarked_layers(self) -> list[int]:
        """Those of a layerwise offload that still have to be marked."""
        return [] if self._marks is None else [layer for layer, mark in enumerate(self._marks) if mark is None]

    @property
    def plan(self) -> TransferPlan:
        """Which blocks it moves."""
        return self._plan

    @property
    def stream_name(self) -> str:
        """Where it runs, for reports; "" when it is over."""
        return str(getattr(self._stream, "ptr", self._stream or ""))

    @property
    def failed(self) -> bool:
        """Whether something is known to have gone wrong; does not look at the device."""
        return self._error is not None

    @property
    def elapsed_ms(self) -> float:
        """From the start of its first copy to the end of its last one; NaN until the transfer is over."""
        return self._elapsed_ms

    @property
    def layer_times_ms(self) -> list[tuple[float, float]]:
        """Start and end of each layer's copy since the scheduler was made; it must have ``record_layer_times``."""
        return list(self._layer_times_ms)

    # ---- submission (under the lock) ----
    @property
    def _all_submitted(self) -> bool:
        return not self._num_unsubmitted

    def _advance(self) -> None:
        """Submits what is ready, here and in the transfers that wait for it."""
        passed: set[Transfer] = set()
        queue = [self]
        for transfer in queue:  # grows meanwhile; a long chain of transfers must not recurse
            if transfer._submit_ready() or (transfer._dropped and transfer not in passed):
                passed.add(transfer)
                queue.extend(transfer._dependents)

    def _submit_ready(self) -> bool:
        """Submits its groups that are ready, consecutive ones by one call. Whether there were any."""
        submitted = False
        for first, waits in [] if self._dropped else self._ready_runs():
            if not self._submit(first, waits):
                break
            submitted = True
        if submitted:
            hazards.changed.notify_all()
        return submitted

    def _ready_runs(self) -> list[tuple[int, list[list[Event]]]]:
        """Runs of groups that can be submitted: the first one, and what each has to wait for on the device."""
        others = self._others() if self._depends_on else []
        if self._marked and self._marks is None and not others and self._last_event is None:
            return [(0, [self._after.copy(), *([] for _ in self._marked[1:])])]  # the rule: all at once
        runs: list[tuple[int, list[list[Event]]]] = []
        next_group = -1
        for group in self._marked:
            waits = self._waits_of(group, others) if others or self._marks is not None else []
            if waits is None:
                continue
            if group != next_group:
                runs.append((group, []))
            runs[-1][1].append(waits)
            next_group = group + 1
        if runs and self._last_event is None:  # the stream keeps the order behind the first
            runs[0][1][0].extend(self._after)
        return runs

    def _others(self) -> list[Transfer]:
        """Those whose layers have to be submitted before the same layers of this one, and be waited for."""
        found = list(self._depends_on)
        seen = set(found)
        for before in found:  # grows meanwhile
            if before._dropped and not before._all_submitted:  # what it would have waited for
                found.extend(before._depends_on - seen)
                seen |= before._depends_on
        # The order of the stream is enough for one that is submitted as a whole on the same stream.
        return [
            before
            for before in found
            if not before._retired and not (before._all_submitted and (before._over or before._stream is self._stream))
        ]

    def _waits_of(self, group: int, others: list[Transfer]) -> list[Event] | None:
        """What the group has to wait for on the device; None while something of it is not recorded yet."""
        layers = self._plan.layers_of(group)
        waits: list[Event] = [] if self._marks is None else self._marks[layers.start : layers.stop]
        for before in others:
            per_event = before._plan.layers_per_event
            events = before._events[layers.start // per_event : (layers.stop - 1) // per_event + 1]
            if None in events:
                if not before._dropped:
                    return None
                events = [event for event in (*events, before._fence_event) if event is not None]
            if not before._over and before._stream is not self._stream:
                waits.extend(events)
        return waits

    def _submit(self, first: int, waits: list[list[Event]]) -> bool:
        backend = self._scheduler._backend
        groups = range(first, first + len(waits))
        try:
            start, *records = self._take_events(1 + len(groups))
            work = LayerWork(self._plan, groups.start, groups.stop, waits, start, records, self._scheduler._engine)
            backend.copy_layers(self._scheduler._resources.binding, work, self._stream)
        except BaseException as error:  # whatever it is, the transfer carries it
            self._fence()
            layer = self._plan.layers_of(first).start
            self._drop(self._failure(f"{self._plan.direction} failed at layer {layer}: {error}", layer, error))
            if not isinstance(error, Exception):
                raise
            return False
        self._starts.append((start, groups))
        self._events[groups.start : groups.stop] = records
        self._num_unsubmitted -= len(groups)
        at = self._marked.index(first)
        del self._marked[at : at + len(groups)]
        self._last_event = records[-1]
        return True

    def _fence(self) -> None:
        """Part of a failed submission may run: an event behind all of it says when it has stopped touching memory."""
        try:
            event = self._take_event()
            self._scheduler._backend.record(event, self._stream)
        except Exception:  # noqa: BLE001  the device is lost: nothing runs there any more
            return
        self._last_event = self._fence_event = event

    def _hold(self, compute: Stream) -> None:
        """Work submitted to the compute stream from now on runs behind what was submitted of the transfer."""
        backend = self._scheduler._backend
        with contextlib.suppress(Exception):  # a second failure; the device is lost
            with hazards.lock:
                event = self._last_event
                if event is None or self._over:
                    return
                if compute is not None:
                    backend.wait_on_stream(compute, event, None)
                    return
                self._host_waits += 1
            try:
                backend.wait(event, None)
            finally:
                self._end_host_wait()

    def _take_event(self) -> Event:
        return self._take_events(1)[0]

    def _take_events(self, count: int) -> list[Event]:
        self._scheduler._resources.take_events(count, self._held_events)
        return self._held_events[-count:]

    def _give_back_events(self) -> None:
        self._scheduler._resources.give_back(self._held_events)
        self._held_events, self._after, self._starts = [], [], []
        self._stream = None

    # ---- failure (under the lock) ----
    def _failure(self, message: str, layer: int | None, cause: BaseException | None = None) -> TransferError:
        error = TransferError(message, layer=layer, block_ids=self._plan.target_ids.tolist())
        error.__cause__ = cause
        return error

    def _drop(self, error: TransferError) -> None:
        """Nothing more is submitted; the targets are poisoned; what reads the result fails too."""
        ordered: list[Transfer] = []
        failed = [(self, error)]
        for transfer, own_error in failed:  # grows meanwhile
            if transfer._error is None:
                transfer._error = own_error
            transfer._dropped = True
            transfer._target_domain.poison(transfer._plan.target_ids, transfer, transfer._error)
            for dependent in transfer._dependents:
                if transfer not in dependent._reads_from:
                    ordered.append(dependent)
                elif not dependent._dropped:
                    message = f"it reads blocks of a transfer that failed ({error})"
                    failed.append((dependent, dependent._failure(message, None, error)))
        for transfer in ordered:
            transfer._advance()
        hazards.changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # of every earlier raise, with the frames that it keeps alive

    # ---- the end (under the lock) ----
    def poll(self) -> None:
        """Looks at the device and moves on to "over" and "retired". Those that it depends on have to come first."""
        if self._retired:
            return
        if not self._over and (self._all_submitted or self._dropped):
            self._look_at_device()
        if not self._over or self._host_waits:
            return
        self._give_back_events()
        if not self._dropped or all(before._retired for before in self._depends_on):
            self._retire()

    def _look(self) -> None:
        """poll(), behind that of the transfers whose result it reads."""
        if self._reads_from:
            hazards.collect()
        else:
            self.poll()

    def is_on(self, stream: Stream) -> bool:
        """Whether it still moves on this stream."""
        return self._stream is stream

    @property
    def is_settled(self) -> bool:
        """Over, and all events given back."""
        return self._over and not self._held_events

    def is_ordered_before(self, stream: int | None, layer: int) -> bool:
        if layer >= 0 and self._marks is not None and self._marks[layer] is None:
            return True  # it reads the layer only after the mark that is still to come
        groups = range(self._plan.num_groups) if layer < 0 else [self._plan.group_of(layer)]
        return self._over or self._waiting.get(stream, set()).issuperset(groups)

    def _look_at_device(self) -> None:
        backend = self._scheduler._backend
        try:
            if self._last_event is not None:
                # A failure is reported by all events behind it of its submission. Those of earlier layers may lie on
                # another stream than the last one and pass a moment later; until then a GPU tells no times.
                ends = [self._events[groups[-1]] for _, groups in self._starts]
                asked = self._events if self._scheduler._record_layer_times else ends
                if not backend.is_complete(self._last_event, *(event for event in asked if event is not None)):
                    return
        except Exception as error:  # noqa: BLE001  found out by asking: the copies failed
            layer = self._first_failed_layer()
            self._drop(self._failure(f"{self._plan.direction} failed at layer {layer}: {error}", layer, error))
        else:
            if self._error is None and not all(source._over for source in self._reads_from):
                return  # a failure of theirs would be one of this transfer
        if self._scheduler._observer is not None:
            mismatch = self._scheduler._observer.over(self, self._error)
            if mismatch is not None and self._error is None:
                self._drop(self._failure(str(mismatch), None, mismatch))
        self._over = True
        if self._error is not None:
            self._scheduler._counters["cancelled" if self._cancelled else "failed"] += 1
        with contextlib.suppress(Exception):  # times are not worth a failure; they stay unknown
            self._measure()

    def _first_failed_layer(self) -> int | None:
        unknown = None
        for group, event in enumerate(self._events):
            layer = self._plan.layers_of(group).start
            try:
                if event is None or not self._scheduler._backend.is_complete(event):
                    unknown = layer if unknown is None else unknown
            except Exception:  # noqa: BLE001
                return layer
        return unknown

    def _measure(self) -> None:
        if self._error is not None:
            return
        if not self._starts:
            self._elapsed_ms = 0.0
            return
        scheduler = self._scheduler
        elapsed = scheduler._backend.elapsed_ms
        self._elapsed_ms = elapsed(self._starts[0][0], self._last_event)
        scheduler._copying_ms[self._plan.direction] += self._elapsed_ms
        if not scheduler._record_layer_times:
            return
        origin = scheduler.origin_event
        times: dict[int, tuple[float, float]] = {}
        for start, groups in self._starts:
            begin = elapsed(origin, start)
            for group in groups:
                end = elapsed(origin, self._events[group])
                for layer in self._plan.layers_of(group):
                    times[layer] = (begin, end)
                begin = end
        self._layer_times_ms = [times[layer] for layer in sorted(times)]

    def abandon(self) -> None:
        self._drop(self._failure(f"the process forked while the {self._plan.direction} was in flight", None))
        self._over = True
        self._retire()

    def _retire(self) -> None:
        self._retired = True
        written = self._error is None
        self._source_domain.release(self._plan.source_ids, self, written=False)
        self._target_domain.release(self._plan.target_ids, self, written=written)
        hazards.remove_in_flight(self)
        for before in self._depends_on:
            before._dependents.remove(self)
        self._depends_on, self._reads_from = set(), set()
        for dependent in list(self._dependents):
            dependent._advance()
        hazards.changed.notify_all()

    # ---- helpers ----
    @property
    def _target_domain(self) -> hazards.BlockDomain:
        pool = self._scheduler.host_pool if self._plan.direction == "offload" else self._scheduler.device_cache
        domain: hazards.BlockDomain = pool.domain
        return domain

    @property
    def _source_domain(self) -> hazards.BlockDomain:
        pool = self._scheduler.device_cache if self._plan.direction == "offload" else self._scheduler.host_pool
        domain: hazards.BlockDomain = pool.domain
        return domain

    def _layer_index(self, layer: Any) -> int:
        if isinstance(layer, bool) or not isinstance(layer, Integral):  # tensors have an index, floats of theirs too
            raise TypeError(f"layer is {layer!r}; an integer is expected")
        found = int(layer)
        if not 0 <= found < self._plan.num_layers:
            raise IndexError(f"layer = {found} must be in [0, {self._plan.num_layers})")
        return found

    def _sleep_until_changed(self, started: float, timeout_s: float | None, layer: int | None = None) -> None:
        """Under the lock, which it gives up for a moment; raises the error or TimeoutError."""
        if timeout_s is not None and time.monotonic() - started >= timeout_s:
            what = "a layer" if layer is None else f"layer {layer}"
            raise TimeoutError(
                f"{what} was not submitted within timeout_s = {timeout_s}; {self._what_is_missing(layer)}"
            )
        hazards.changed.wait(POLL_S)
        hazards.collect()

    def _what_is_missing(self, layer: int | None) -> str:
        """Under the lock: why the layer (None: one of all) is not submitted."""
        if self._marks is not None:
            plan = self._plan
            asked = range(plan.num_layers) if layer is None else plan.layers_of(plan.group_of(layer))
            unmarked = [one for one in asked if self._marks[one] is None]
            if unmarked:
                return f"mark_layer_written was not called for {_text_of(unmarked)}"
        return "it waits for a layerwise offload of the same blocks, of which layers are not marked"

    def _wait_behind(
        self, queue: Stream, event: Event, groups: set[int], started: float, timeout_s: float | None
    ) -> None:
        # Outside of the lock: the caller may be held until the event is recorded, on the CPU until it is passed.
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started))
        try:
            self._scheduler._backend.wait_on_stream(queue, event, left)
            self._waiting.setdefault(queue, set()).update(groups)
        except TimeoutError:
            raise TimeoutError(f"a layer was not there after timeout_s = {timeout_s}") from None
        except Exception as error:  # noqa: BLE001  whatever it is, the transfer carries it
            with hazards.lock:
                if self._error is None:
                    layer = self._first_failed_layer()
                    self._drop(self._failure(f"{self._plan.direction} failed at layer {layer}: {error}", layer, error))
                self._raise_if_failed()
        finally:
            self._end_host_wait()

    def _end_host_wait(self) -> None:
        with hazards.lock:
            self._host_waits -= 1
            self.poll()


def transfer_list(given: Any, name: str) -> list[Transfer]:
    """An argument as a list, whatever iterates; TypeError unless all of it are transfers."""
    found: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(one, Transfer) for one in found):
        raise TypeError(f"{name} is {given!r}; a list of Transfer is expected")
    return found


def depend(transfer: Transfer, reads_from: set[Any], others: set[Any]) -> None:
    """Orders the transfer behind those that the hazard tracker found (under the lock)."""
    # One that failed before is read only where the block has been rewritten since: it gives the order, not the data.
    transfer._reads_from = {before for before in reads_from if not before.failed}
    transfer._depends_on = reads_from | others
    for before in transfer._depends_on:
        before._dependents.append(transfer)


def _text_of(layers: list[int]) -> str:
    """``layer 3``, or ``layers 3, 4 and 12 more``."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = layers if len(layers) <= 4 else layers[:3]
    rest = f" and {len(layers) - len(shown)} more" if len(shown) < len(layers) else ""
    return f"layers {', '.join(map(str, shown))}{rest}"
