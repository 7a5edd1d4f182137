"""What the scheduler knows of one load or save, and the one place in which its state changes.

A transfer moves its layers in groups. A group is *submitted* (handed to the backend, with an event behind it) as soon
as its layers are marked (layerwise offload; load into a ring of layer buffers) and the same layers of all transfers
that it depends on are submitted. What is not submitted can still be *dropped*: by ``cancel`` or by a failure.

Two ends have to be told apart. A transfer is *over* for its user when its own submitted work is done; its events are
given back then. It is *retired*, and its blocks are given back, when in addition (if groups were dropped) the transfers
that it depended on are retired: later ones that wait for this one inherit their order.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..backend.protocol import Backend
from ..backend.work import Event, Stream, TransferPlan
from ..errors import BackendError, CancelledError, CudaError, TransferError
from ..tracking.domain import BlockDomain
from ..tracking.group import Guard, MemoryGroup, wake
from ..tracking.keeper import Waiter
from .resources import DeviceResources, Events


class State(enum.Enum):
    """Of a transfer. ``PENDING``: nothing of it was submitted; ``SUBMITTED``: a part was; ``ARRIVING``: nothing more
    will be, and what was still runs; then one of the ends."""

    PENDING = "pending"
    SUBMITTED = "submitted"
    ARRIVING = "arriving"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether the transfer is over."""
        return self in _ENDS

    __hash__ = object.__hash__  # that of an enumeration is Python code, and each change of a state asks for it


_ENDS = {State.DONE, State.FAILED, State.CANCELLED}
_NEXT = {
    State.PENDING: {State.SUBMITTED, State.ARRIVING},
    State.SUBMITTED: {State.ARRIVING},
    State.ARRIVING: _ENDS,
}


@dataclass(frozen=True)
class Failure:
    """Why a transfer did not move everything. Text and numbers: an exception would keep the frames of its callers."""

    state: State  # FAILED or CANCELLED
    message: str
    layer: int | None = None
    cause: tuple[str, int, str] | None = None  # CUDA's name, code and text; "" and 0 for what is not CUDA's
    reason: str = ""  # the message of the first one, where others failed with it
    damaged: tuple[int, ...] = ()  # host blocks that do not hold what was saved to them

    @classmethod
    def of(cls, message: str, layer: int | None, cause: BaseException | None = None) -> Failure:
        """With what the backend raised."""
        told = None
        if cause is not None:
            cause.__traceback__ = None  # whoever keeps it would keep the frames of our callers
        if isinstance(cause, CudaError):
            told = (cause.name, cause.code, str(cause))
        elif cause is not None:
            told = ("", 0, f"{type(cause).__name__}: {cause}")
        return cls(State.FAILED, message, layer, told)

    def exception(self, block_ids: list[int]) -> TransferError | CancelledError:
        """A new one for whoever asks."""
        kind = CancelledError if self.state is State.CANCELLED else TransferError
        error = kind(self.message, layer=self.layer, block_ids=block_ids)
        if isinstance(error, TransferError):
            error.damaged_host_blocks = list(self.damaged)
        if self.cause is not None:
            name, code, text = self.cause
            error.__cause__ = CudaError(name, code, text) if name else BackendError(text)
        return error


class Reading(Protocol):
    """What writes to host blocks of a load while it is under way: a job of a tier.

    Attributes:
        block_ids: those that it writes.
    """

    block_ids: list[int]

    def cancel(self) -> None:
        """Nobody wants the rest. Takes no lock and waits for nothing."""


class Follower:
    """Who hears of a transfer, in sections."""

    def submitted(self, movement: Movement, groups: range) -> None:
        """These groups were handed to the backend."""

    def failed(self, movement: Movement) -> None:
        """Nothing more of it will be."""

    def holds(self, movement: Movement) -> bool:
        """Asked when nothing of it runs any more: whether its blocks are in use all the same, so that it is not over.
        Who holds it looks at it (:mod:`.settling`) when he does no more."""
        return False

    def loss_of(self, movement: Movement) -> Failure | None:
        """Asked when all of it was moved: whether it is worth nothing all the same."""

    def ended(self, movement: Movement) -> None:
        """It is over, whatever its end."""


class Owner(Protocol):
    """The scheduler, as its transfers see it."""

    device_cache: Any
    host_pool: Any
    backend: Backend
    resources: DeviceResources
    engine: str
    bytes_per_block: int
    layers_per_event: int
    default_stream: Any
    record_layer_times: bool
    observer: Any

    def compute_stream(self, stream: Any) -> Stream:
        """The stream that the caller means; None stands for that of the scheduler."""

    def check_open(self) -> None:
        """Raises unless calls are taken."""

    def note_start(self, movement: Movement) -> None:
        """The transfer is about to be submitted."""

    def forget_start(self, movement: Movement) -> None:
        """Takes that back."""

    def note_end(self, movement: Movement) -> None:
        """The transfer is over."""

    def note_alone(self, alone: Any) -> None:
        """The one that was :mod:`.alone` is over."""

    def look_at(self, movement: Movement) -> None:
        """Asks the device how far it is."""

    def abandon(self, movement: Movement) -> None:
        """See :class:`~paddle_kv.tracking.group.Tracked`."""


# All that are not retired: what keeps the memory of a transfer alive, whoever forgets it.
movements: dict[int, Movement] = {}
numbers = itertools.count(1)


class Movement:
    """One transfer in flight. Changes in a section of its group (:mod:`paddle_kv.tracking.group`) alone, but for
    those who wait, ``ordered``, ``unmarked``, and the ``marks`` of what is submitted by marks."""

    # What most never set lies here: a start has to be short.
    computed_from: tuple[Movement, ...] | None = None  # the loads that a save was computed from, if it is known
    last_event: Event | None = None
    fence_event: Event | None = None  # behind a submission that failed half way
    held: tuple[Events, ...] = ()  # all events of it
    state = State.PENDING
    failure: Failure | None = None
    loss: Failure | None = None  # some blocks do not come; it moves the others, and fails at its end
    lost: np.ndarray | None = None  # of each block whether it is one of those
    submission_failed = False  # already in the call that started it
    report: Callable[[], Any] | None = None  # what the backend calls at its end
    watched: Any = None  # by the backend, as long as its end is all that is to come
    through = False  # nothing of it runs any more
    told = False  # somebody knows of the failure
    elapsed_ms = float("nan")
    layer_times_ms: Sequence[tuple[float, float]] = ()
    sample: tuple[int, float] | None = None  # bytes and ms of what was submitted last: between, it may wait
    shares_link = False  # with a load on another stream: the time that it takes says little of the link
    guard: Guard | None = None  # of the handle
    by_marks: Any = None  # of :mod:`.by_marks`, as long as the backend submits its layers as they are marked
    is_noted = False  # a section will look which it has

    def __init__(
        self,
        scheduler: Owner,
        plan: TransferPlan,
        stream: Stream,
        *,
        layerwise: bool,
        reading: Reading | None = None,
        follows: bool = False,
    ) -> None:
        self.number = next(numbers)
        self.scheduler = scheduler  # keeps the pools: their memory must not go away under a copy
        self.plan = plan
        bytes_per_layer = scheduler.bytes_per_block // plan.num_layers
        self.bytes: int = len(plan.device_ids) * bytes_per_layer * plan.num_moved_layers
        self.stream = stream
        self.layerwise = layerwise
        self.queued = stream is scheduler.resources.streams.get("onload")  # behind other loads: the scheduler counts it
        # Submission
        self.unmarked: dict[int, Event] = {}  # layer -> the event that its mark records
        ring = scheduler.device_cache.layer_buffers
        self.ring = ring if ring < plan.num_layers else 0  # layer buffers that the layers share in turn; 0: none do
        unmarked = 0 if layerwise else self.ring or plan.num_layers  # saves of a ring are layerwise
        self.to_mark = range(unmarked, plan.num_layers)
        self.marks: list[Event | None] = [None] * plan.num_layers if self.to_mark else []
        self.savers: dict[Movement, None] = {}  # see :mod:`.rings`
        self.sharing: dict[Movement, bool] = {}  # the same
        self.reading = reading  # what still writes some of its source blocks; None once nobody touches them
        self.unread = set(range(plan.num_layers)) if reading or follows else set()  # layers that are not there yet
        self.ready = list(plan.groups)  # marked, not submitted; ascending
        if self.to_mark or self.unread:
            self.ready = [group for group in self.ready if not self.is_held_back(group)]
        self.after: Sequence[Event] = ()  # events that come before the first layer: the compute stream's
        self.depends_on: set[Movement] = set()
        self.reads_from: set[Movement] = set()  # those of them whose result is read
        self.dependents: dict[Movement, None] = {}
        self.events: list[Event | None] = [None] * plan.num_groups  # one a group, None until submitted
        self.num_unsubmitted = len(plan.groups)
        self.starts: list[tuple[Event, range]] = []  # one a submission
        self.spare: MutableSequence[Event] = []  # held, and not in use yet
        self.followers: list[Follower] = []
        # Those who wait
        self.waiters: list[Waiter] = []  # for the end
        self.layer_waiters: list[Waiter] = []
        self.callbacks: list[Callable[[], object]] = []
        self.ordered: dict[Stream, set[int]] = {}  # stream -> groups that its later work waits for
        self.handle: Callable[[], Any] = _no_handle  # the user's, as long as there is one
        to_host = plan.direction == "offload"
        pools = (scheduler.device_cache, scheduler.host_pool)
        source, target = pools if to_host else pools[::-1]
        self.source: BlockDomain = source.domain
        self.target: BlockDomain = target.domain

    @property
    def group(self) -> MemoryGroup:
        return self.target.group

    @property
    def direction(self) -> str:
        return self.plan.direction

    @property
    def failed(self) -> bool:
        """Whether it is known that not all of it is moved; nothing more is submitted then."""
        return self.failure is not None

    @property
    def spoiled(self) -> bool:
        """Whether it is known that some blocks do not arrive."""
        return self.failure is not None or self.loss is not None

    @property
    def lost_positions(self) -> list[int]:
        """Of the blocks that do not arrive, as far as it is known."""
        if self.failure is None or self.failure is self.loss:
            return [] if self.lost is None else np.flatnonzero(self.lost).tolist()
        return list(range(len(self.plan.target_ids)))

    @property
    def dropped(self) -> bool:
        """Whether layers of it will never be submitted: what is behind it is behind what it was behind, for those."""
        # One whose host blocks are still being written keeps its place: those behind it write them too.
        return bool(self.plan.left_out) or (
            self.failure is not None and self.num_unsubmitted > 0 and self.reading is None
        )

    @property
    def over(self) -> bool:
        return self.state in _ENDS

    @property
    def over_after(self) -> set[Movement]:
        """Those that must be over before it can be: of one that moves nothing, all that it stands behind."""
        return self.reads_from if self.plan.num_groups else self.depends_on

    @property
    def retired(self) -> bool:
        return self.number not in movements

    def error(self) -> TransferError | CancelledError | None:
        """A new exception that says what went wrong, as far as it is known."""
        failure = self.failure or self.loss
        if failure is None:
            return None
        self.told = True
        return failure.exception(self.plan.target_ids[self.lost_positions].tolist())

    def raise_if_failed(self) -> None:
        if self.failure is None and self.loss is None:  # the rule
            return
        error = self.error()
        if error is not None:
            raise error

    def is_behind(self, before: Movement) -> bool:
        """Whether nothing has to be waited for: the order of the stream is enough for one that is submitted as a whole
        on the same stream."""
        return before.retired or (not before.num_unsubmitted and (before.over or before.stream is self.stream))

    def hold_all_events(self) -> None:
        """Takes what all of it is likely to need, at once: to take an event costs more than to make one."""
        submissions = self.plan.num_groups if self.to_mark or self.unread else 1
        of_compute = 0 if self.layerwise else 1
        self.spare = self.hold_events(of_compute + len(self.to_mark) + submissions + self.plan.num_groups)

    def hold_events(self, count: int) -> MutableSequence[Event]:
        """Events that live until it is over."""
        spare = self.spare
        if len(spare) >= count:
            taken = spare[:count]
            del spare[:count]
            return taken
        events = self.scheduler.resources.take_events(count)
        self.held = (*self.held, events)
        copied: MutableSequence[Event] = events.events[:]  # type: ignore[assignment]
        return copied

    def note_submitted(self, start: Event, groups: range, records: Sequence[Event]) -> None:
        """The backend has these groups, by one submission; whoever follows hears of it."""
        self.starts.append((start, groups))
        self.events[groups.start : groups.stop] = records
        self.num_unsubmitted -= len(groups)
        self.last_event = records[-1]
        for follower in self.followers:
            with contextlib.suppress(Exception):  # whoever wants to hear of layers hears of the end all the same
                follower.submitted(self, groups)

    def is_held_back(self, group: int) -> bool:
        """Whether a layer of the group is not marked, or is being read into host memory."""
        layers = self.plan.layers_of(group)
        return any(layer in self.unread or (layer in self.to_mark and self.marks[layer] is None) for layer in layers)

    def enter(self, state: State) -> None:
        """The one place in which the state changes; whoever waits looks again."""
        if state not in _NEXT.get(self.state, ()):
            raise AssertionError(f"a transfer cannot be {state.value} behind {self.state.value}")
        self.state = state
        if state in _ENDS:
            self.scheduler.note_end(self)
        self.notify()

    def notify(self) -> None:
        """Something has changed that somebody may wait for."""
        for waiters in (self.waiters, self.layer_waiters, self.target.group.waiters):
            if waiters:
                wake(waiters)

    # ---- what the tracker asks ----
    def look(self) -> None:
        self.scheduler.look_at(self)

    def abandon(self) -> None:
        self.scheduler.abandon(self)

    def is_ordered_before(self, stream: int | None, layer: int) -> bool:
        if layer in self.unmarked:
            return True  # it reads the layer only after the mark that is still to come
        groups = set(self.plan.groups)
        if layer >= 0:
            groups &= {self.plan.group_of(layer)}
        if layer < -1:  # a buffer: what was marked last of the layers in it comes behind the others
            occupants = range(-2 - layer, self.plan.num_layers, self.ring)
            groups = set([one for one in occupants if one not in self.unmarked][-1:])
        return self.over or self.ordered.get(stream, set()).issuperset(groups)


def _no_handle() -> None:
    return None
