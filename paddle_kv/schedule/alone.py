"""A transfer that is started while nothing else is in flight: one call of the library, and nothing in any book.

Most that come alone end alone: until then no other transfer, lease or question has to do with their blocks. So all that
the tracker would note of one is kept here, and written down only by a section that might ask for it
(:class:`paddle_kv.tracking.group.Alone`): by any one but that which ends it. From then on it is as any other.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backend.work import Direction, Event, Stream, TransferPlan
from ..ops import _arguments as arguments
from ..tracking.group import Guard, MemoryGroup, change
from ..tracking.keeper import Deadline, nothing
from . import settling
from .movement import Movement, Owner, State, movements, numbers
from .resources import Events
from .transfer import Transfer, let_go, raise_if_device_failed
from .uses import holding

ID_BYTES = 8
COMPUTE, START, FIRST_GROUP = range(3)  # in the events of one: of the compute stream, of its start, of each group


class Alone:
    """See the module. Changes in sections of its group alone, but for ``ordered``, as in a movement.

    Attributes:
        number: of the transfer, in this process.
        held: its events, as long as it is in flight.
        token: what the backend has its end watched by.
        movement: what it has become when it was written down.
        over: it has ended without that, with all blocks moved.
        ordered: stream -> groups of layers that later work on it waits for.
        handle: the user's, as long as there is one.
    """

    failure = None  # as of a movement: such a one is written down
    state = State.DONE
    handle: Callable[[], Any]

    def __init__(self, scheduler: Owner, direction: Direction, ids: tuple[bytearray, bytearray], held: Events) -> None:
        self.number = next(numbers)
        self.scheduler = scheduler  # keeps the pools: their memory must not go away under a copy
        self.direction = direction
        self.ids = ids  # of the device, of the host
        self.held: Events | None = held
        self.num_blocks = len(ids[0]) // ID_BYTES
        self.bytes = self.num_blocks * scheduler.bytes_per_block
        self.queued = direction == "onload"
        self.ordered: dict[Stream, set[int]] = {}
        # What is set later lies here: that takes no memory then.
        self.token: Any = None
        self.movement: Movement | None = None
        self._making: Movement | None = None
        self.over = False
        self.elapsed_ms = float("nan")

    @property
    def group(self) -> MemoryGroup:
        group: MemoryGroup = self.scheduler.host_pool.domain.group
        return group

    # ---- sections ----
    def __call__(self) -> None:
        """Ends it, if it is over; the only section before which it is not written down."""
        if self.movement is not None:
            settling.look(self.movement)
        elif self.held is not None:
            self._look(self.held.events)

    def _look(self, events: Sequence[Event]) -> None:
        backend, elapsed_ms = self.scheduler.backend, float("nan")
        try:
            if not backend.is_complete(events[-1]):
                return
        except Exception:  # noqa: BLE001  whoever looks at it as at any other tells of it
            self.write_down()
        else:
            with contextlib.suppress(Exception):  # as of any other: times are not worth a failure
                elapsed_ms = backend.elapsed_ms(events[START], events[-1])
        self.elapsed_ms = elapsed_ms
        group = self.group
        if self.movement is not None:  # or a finalizer has asked for it meanwhile
            settling.look(self.movement)
            return
        self.over = True  # from here on it is as if it had never been in flight, whoever comes in between
        group.alone = None
        self.held = None
        self.scheduler.note_alone(self)

    def write_down(self, *, is_guarded: bool = True) -> None:
        movement = self._as_movement()
        if self._is_known():
            return  # a finalizer has come to it meanwhile, in here
        group, handle = movement.group, self.handle()
        try:
            self._making = movement
            movement.source.read(movement.plan.source_ids, movement)
            movement.target.write(movement.plan.target_ids, movement)
            if handle is not None and is_guarded:
                movement.guard = Guard.over(handle, movement, functools.partial(let_go, movement))
            movements[movement.number] = movement
            group.transfers[movement.number] = movement
            self.scheduler.note_start(movement)
            if handle is not None:
                handle._movement = movement
                handle._alone = None
            group.alone = None
            self.movement = movement  # from here on other threads find it
        except BaseException:  # of memory: the next section does it
            group.alone = self
            if handle is not None:
                handle._alone = self
                handle.__dict__.pop("_movement", None)
            self.scheduler.forget_start(movement)
            movements.pop(movement.number, None)
            group.transfers.pop(movement.number, None)
            if movement.guard is not None:
                movement.guard.cancel()
            for domain in (movement.source, movement.target):
                domain.release(movement, written=False)
            self._making = None
            raise
        self.held = self._making = None

    def _is_known(self) -> bool:
        return self.movement is not None or self._making is not None

    def _as_movement(self) -> Movement:
        """As it would be if it had been started as any other, and was submitted."""
        scheduler, held = self.scheduler, self.held
        device, host = (np.frombuffer(ids, np.int64) for ids in self.ids)
        num_layers = scheduler.device_cache.spec.num_layers
        plan = TransferPlan(self.direction, device, host, num_layers, scheduler.layers_per_event)
        stream = scheduler.resources.streams.get(self.direction)
        movement = Movement(scheduler, plan, stream, layerwise=False)
        movement.number, movement.handle, movement.ordered = self.number, self.handle, self.ordered
        movement.ready = []
        if self.over or held is None:
            movement.queued, movement.stream, movement.num_unsubmitted = False, None, 0
            movement.state, movement.elapsed_ms = State.DONE, self.elapsed_ms
            return movement
        movement.held, movement.after, movement.watched = (held,), held.events[:START], self.token
        movement.note_submitted(held.events[START], range(plan.num_groups), held.events[FIRST_GROUP:])
        movement.enter(State.ARRIVING)
        return movement

    # ---- outside of every lock ----
    def written_down(self) -> Movement:
        """What it has become, or would have."""
        while self.movement is None and not self.over:
            if not self.group.inside:
                change(self, nothing)
            elif self._making is not None:  # a finalizer, in the middle of it
                return self._making
            else:  # a finalizer, in the section that ends it
                self.write_down()
        if self.movement is None:
            self.movement = self._as_movement()
        return self.movement

    def wait(self, deadline: Deadline) -> bool:
        """Waits for its end where the backend tells of it. Whether it is over, without having been written down."""
        group = self.group
        group.check_outside()
        hear = getattr(self.scheduler.backend, "hear", None)
        if hear is not None and not group.host.serves and self.held is not None:  # see :mod:`.hearing`
            hear(self.token, deadline.left_s(), functools.partial(change, self, self), self.reporter())
        if not self.over:  # the time is over, or somebody else is told, perhaps only soon
            change(self, self)
        return self.over

    @holding(lambda names: names["self"].scheduler)
    def wait_layer(self, layer: int, stream: Any, timeout_s: float | None) -> bool:
        """Of a layer that there is: work submitted to the stream from now on runs behind it. False: it is written down,
        or nothing is to be waited for."""
        scheduler = self.scheduler
        scheduler.host_pool.domain.group.check_outside()
        backend: Any = scheduler.backend
        group = layer // scheduler.layers_per_event
        named = scheduler.default_stream if stream is None else stream
        held = self.held
        try:
            if held is None:
                return False
            compute = backend.wait_on_compute(named, held.events[FIRST_GROUP + group], timeout_s)
        except TimeoutError:
            raise TimeoutError(f"a layer was not there after timeout_s = {timeout_s}") from None
        except Exception:  # of the device, or of a signal handler: the device knows
            raise_if_device_failed(self.written_down())
            raise
        finally:
            del held  # an exception would keep it with this frame
        self.ordered.setdefault(compute, set()).add(group)
        return True

    def reporter(self) -> Callable[[], None]:
        """What the backend calls at its end, out of any of its threads; it keeps the events until then."""
        return functools.partial(_report, self)


def _report(alone: Alone) -> None:
    alone.group.host.post(functools.partial(change, alone, alone))


def start(scheduler: Owner, direction: Direction, device_ids: Any, host_ids: Any) -> Transfer | None:
    """None: nothing has happened. Other transfers, or leases, have to be looked at, or something is wrong with the ids
    and has to be told."""
    device_cache, host_pool, resources = scheduler.device_cache, scheduler.host_pool, scheduler.resources
    group: MemoryGroup = host_pool.domain.group
    sections = group.sections
    if not (resources.reserve and group.is_idle() and host_pool.domain.is_quiet() and device_cache.domain.is_quiet()):
        return None
    scheduler.check_open()
    to_host = direction == "offload"
    device = arguments.plain_ids(device_ids, device_cache.num_blocks, not to_host)
    host = arguments.plain_ids(host_ids, host_pool.num_blocks, to_host)
    if not device or not host or len(device) != len(host):
        return None
    try:  # they stay in there until the step takes them, so an exception that keeps this frame keeps none from others
        alone = Alone(scheduler, direction, (device, host), resources.reserve[0])
    except IndexError:  # another thread was quicker
        return None
    transfer = Transfer(None, alone)
    alone.handle = weakref.ref(transfer)
    backend: Any = scheduler.backend
    return transfer if backend.start_alone(resources.binding, alone, group, sections) else None
