"""Where the blocks of all ranks are, and what moves them: for the process that schedules requests. Moves no bytes,
and imports no Paddle, nor NumPy before a policy that learns has seen enough to fit (:mod:`.score`) or a session is over
(:mod:`.hanging`); the movers beside the caches do what its jobs say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from ..errors import TransferError
from ..timeouts import check_timeout
from ..values import check_bool, check_callable, check_methods
from .checks import check_integer, check_tier, checked_count, checked_device_ids, checked_hashes, checked_list
from .contents import Contents
from .jobs import HOST, Hello, Job, Kind, Namespace, Outcome, Result, SavePlan, check_version
from .joining import Pending, Ranks
from .messages import check_hello, check_positions
from .policies import DEFAULT_POLICY, make_policy
from .policy import Policy
from .slot_lru import SlotLru
from .slots import NumberedSlots, Slots
from .uses import UseCounts


class Directory(Contents):
    """Blocks by the hash of their tokens and of all before them, on one rank or several.

    Args:
        capacity_blocks: host blocks of each rank, the same number on all.
        num_ranks: each has a mover; nothing is found or planned before all of them have said hello (:meth:`join`).
        space: what the blocks are blocks of.
        policy: "survival", "lru", "arc", "s3fifo", or a fresh object with the methods of
            :class:`~paddle_kv.offload.Policy`.
        timeout_s: of a job that names no other; None: no bound, which a rank that dies unnoticed makes for ever.
        max_events: events kept until they are taken; 0: none are collected.
        clock: seconds, never going back.
        slots: who gives out host blocks, by its methods ``take`` and ``give_back``; None: they are numbered from 0.

    Raises:
        ValueError: an unknown policy, less than one block or rank.
        TypeError: not a policy, or a number that is no int, or what does not give out host blocks.

    Of one thread: the caller serialises. Messages to a rank arrive in the order in which they were planned. It belongs
    to one process and cannot be pickled or copied: two of them would give out the same host blocks.

    Example:
        >>> from paddle_kv.offload import Directory, Hello, Result
        >>> directory = Directory(8, num_ranks=2)
        >>> for rank in range(2):
        ...     _ = directory.join(Hello(rank, epoch=7, capacity_blocks=8))
        >>> save = directory.plan_save([b"a", b"b"], [4, 2]).job
        >>> directory.complete([Result(save.id, 0, 7)]), directory.peek([b"a", b"b"])  # one rank is not all
        ([], 0)
        >>> [done] = directory.complete([Result(save.id, 1, 7)])
        >>> with directory.lookup([b"a", b"b", b"c"]) as found:
        ...     load = directory.plan_load(found.keys, [5, 6])
        >>> load.host_slots, [state.value for state in directory.states([b"a", b"c"])]
        ((0, 1), ['present', 'absent'])
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        num_ranks: int = 1,
        space: Namespace | None = None,
        policy: str | Policy[bytes] = DEFAULT_POLICY,
        timeout_s: float | None = 10.0,
        max_events: int = 0,
        clock: Callable[[], float] = time.monotonic,
        slots: Slots | None = None,
    ) -> None:
        for name, value in (("capacity_blocks", capacity_blocks), ("num_ranks", num_ranks)):
            check_integer(value, name)
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
            if value >= 2**31:
                raise ValueError(f"{name} = {value} must be below 2**31")
        if policy == "lru" and slots is None:
            policy = SlotLru(capacity_blocks)
        elif isinstance(policy, str):
            policy = make_policy(policy, capacity_blocks, clock)
        elif isinstance(policy, type) or not callable(getattr(policy, "victim", None)):
            raise TypeError(f"policy is {policy!r}; a name or an object with the methods of Policy is expected")
        checked_count(max_events, "max_events")
        check_callable(clock, "clock", "a function that gives seconds")
        if slots is not None:
            check_methods(slots, "slots", ("take", "give_back"), "an object")
        if not isinstance(space, Namespace | None):
            raise TypeError(f"space is {space!r}; a Namespace is expected")
        check_timeout(timeout_s, positive=True)
        self.space = space or Namespace()
        self.timeout_s = timeout_s
        super().__init__(policy, capacity_blocks, slots or NumberedSlots(capacity_blocks), max_events, clock)
        self.ranks = Ranks(num_ranks, clock, self._settle, self._drop_damaged)
        self.following: set[bytes] = set()  # arriving blocks that a load may follow
        self._uses = UseCounts(capacity_blocks)

    # ---- ranks ----
    @property
    def ready(self) -> bool:
        """Whether all ranks are there."""
        return self.ranks.ready

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Ranks that were lost, by :meth:`lost` or because :meth:`complete` found that they let their time pass, and
        have not joined again. Look behind each ``complete``: end the processes of these ranks and start new ones, or
        :meth:`Mover.restart` those that live. A rank that has not joined yet is not among them.

        Example:
            >>> from paddle_kv.offload import Directory, Hello
            >>> now_s = 0.0
            >>> directory = Directory(8, num_ranks=2, timeout_s=1.0, clock=lambda: now_s)
            >>> for rank in range(2):
            ...     _ = directory.join(Hello(rank, epoch=7, capacity_blocks=8))
            >>> save = directory.plan_save([b"a"], [4]).job
            >>> now_s = 1.0  # its time is over ...
            >>> [outcome.late for outcome in directory.complete()], directory.lost_ranks
            ([(0, 1)], frozenset())
            >>> [outcome.late for outcome in directory.complete([Result(save.id, 0, 7)])]  # rank 0 has ended it
            []
            >>> now_s = 2.0  # ... and over once more
            >>> [outcome.late for outcome in directory.complete()], directory.lost_ranks, directory.ready
            ([()], frozenset({1}), False)
            >>> directory.join(Hello(1, epoch=8, capacity_blocks=8)), directory.lost_ranks
            ([], frozenset())
        """
        return self.ranks.lost

    def join(self, hello: Hello) -> list[Outcome]:
        """A mover is there, for the first time or anew, with another epoch: then what its rank had is gone, and so all
        blocks are. The same hello again, or another one with the epoch that the rank has, does nothing. Returns how
        jobs have ended by that, as :meth:`lost` does.

        Raises:
            ValueError: another version, rank, spec, fewer host blocks than the directory gives out, or a life of the
                rank that was lost: what it had on its way may still move.
        """
        check_hello(hello)
        self.ranks.check_hello(hello)
        if hello.capacity_blocks < self.index.capacity_blocks:
            raise ValueError(
                f"rank {hello.rank} has {hello.capacity_blocks} host blocks; {self.index.capacity_blocks} are expected"
            )
        if hello.spec and self.space.spec and hello.spec != self.space.spec:
            raise ValueError(f"rank {hello.rank} has a cache of another spec than the directory's")
        known = self.ranks.epochs[hello.rank]
        outcomes = [] if known in (None, hello.epoch) else self.lost(hello.rank)
        self.ranks.begin(hello.rank, hello.epoch)
        return outcomes

    def lost(self, rank: int) -> list[Outcome]:
        """The rank is gone: all jobs that are not over have failed, and nothing is present. To be called when a
        process or its connection has died; who was late with a job, and is so again when as much time is over since
        :meth:`complete` has seen it, is lost without.

        Whoever comes back under its number says hello with another epoch.

        Raises:
            ValueError: no such rank.
        """
        self.ranks.check_rank(rank)
        if self.ranks.epochs[rank] is None:
            return []
        outcomes = self.ranks.lose(rank, f"rank {rank} is lost")
        self.clear()
        return outcomes

    def complete(self, results: Iterable[Result] = ()) -> list[Outcome]:
        """The results of movers, in any order and also none: call it in every step, since it looks at the clock. A rank
        that has not ended a job when twice its time is over is lost: see :attr:`lost_ranks`.

        Raises:
            ValueError: another version, no such rank, a position that the job has not. Nothing is booked.
        """
        results = checked_list(results, "results", "Result")
        for result in results:
            self.ranks.check_result(result)
        outcomes = self.ranks.take(results)
        expired, silent = self.ranks.expire()
        outcomes += expired
        for rank in silent:
            outcomes += self.lost(rank)
        return outcomes

    # ---- plans ----
    def plan_load(
        self,
        hashes: Sequence[bytes],
        device_block_ids: Sequence[int],
        *,
        timeout_s: float | None = None,
        tier: str = HOST,
    ) -> Job:
        """Loads blocks: that of ``hashes[i]`` to device block ``device_block_ids[i]``, on all ranks. They are held
        until it is over. The device blocks are the job's own until an outcome without ``late``; of one that has failed
        they hold no usable data until each rank calls ``mark_rewritten``, whoever writes them next.

        Args:
            hashes: of what :meth:`lookup` has found.
            device_block_ids: as many.
            timeout_s: None: that of the directory.
            tier: below host memory: loads those of the first blocks for which host memory has room, and keeps them
                there too. None before all ranks are there; if none is, the next :meth:`complete` ends the job.

        Raises:
            KeyError: a block is not there. Nothing is planned.
            TransferError: a block was dropped, or a rank was lost, since the lookup that holds it; also while it is
                being saved anew.
            ValueError: as many ids as hashes are expected, each once; from a tier each hash once, too.
        """
        keys = checked_hashes(hashes)
        device_ids = checked_device_ids(keys, device_block_ids)
        if timeout_s is not None:
            check_timeout(timeout_s, positive=True)
        if tier != HOST:
            check_tier(tier)
            return self._plan_load_from(tier, keys, device_ids, timeout_s)
        index = self.index
        slots = list(map(index.slots.get, keys))
        if None in slots or (index.arriving and not index.arriving.keys().isdisjoint(keys)):
            self._raise_not_present(keys)
        self.counters["loaded_blocks"] += len(keys)
        return self._begin("load", keys, slots, device_ids, timeout_s)

    def _raise_not_present(self, keys: list[bytes]) -> None:
        slots, arriving, pins = self.index.slots, self.index.arriving, self.index.pins
        for position, key in enumerate(keys):
            if key in slots and (key not in arriving or key in self.following):
                continue
            # A job holds what it brings, once; a lookup finds nothing that is arriving. So who else holds it has found
            # it before it was dropped, and perhaps saved anew.
            if pins.get(key, 0) > (key in arriving):
                raise TransferError(f"hashes[{position}] = {key.hex()} was dropped or found damaged since the lookup")
            raise KeyError(f"hashes[{position}] = {key.hex()} is not present; load what lookup() has found")

    def _plan_load_from(self, tier: str, keys: list[bytes], device_ids: Sequence[int], timeout_s: float | None) -> Job:
        if len(set(keys)) != len(keys):
            raise ValueError("hashes names a block more than once; of a tier each is loaded once")
        for position, key in enumerate(keys):
            if tier not in self._tiers.get(key, ()) or key in self.index.slots:
                raise KeyError(f"hashes[{position}] = {key.hex()} is not in tier {tier!r} alone; see states()")
        self._holds.end_lost()
        admitted = self._admit(keys) if self.ready else {}
        count = next((i for i, key in enumerate(keys) if key not in admitted), len(keys))
        self._forget(key for key in keys[count:] if key in admitted)
        self.counters["loaded_blocks"] += count
        slots = [admitted[key] for key in keys[:count]]
        return self._begin("load", keys[:count], slots, device_ids[:count], timeout_s, tier=tier)

    def plan_save(
        self,
        hashes: Sequence[bytes],
        device_block_ids: Sequence[int],
        *,
        layerwise: bool = False,
        all_or_nothing: bool = False,
        min_uses: int = 1,
        computed_from: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> SavePlan:
        """Saves blocks on all ranks: device block ``device_block_ids[i]`` becomes that of ``hashes[i]``. Those that are
        present or arriving are not moved; room is made by evicting others; what finds none is left out, from the end.
        Nobody but the pass that computes them may write the device blocks before an outcome without ``late``.

        Args:
            hashes: of blocks that are full, also from the middle of a prompt.
            device_block_ids: as many.
            layerwise: the layers will be marked one by one.
            all_or_nothing: what would be left out in part for want of room is left out as a whole, and evicts nothing.
                Blocks that ``min_uses`` leaves out are not asked for, and do not count.
            min_uses: a block is kept when it is offered for the so-manieth time: 2 leaves out what comes once. At least
                as many blocks as the capacity are remembered, at most twice as many.
            computed_from: numbers of the loads that the model reads to compute these blocks: they become present when
                these have ended well too, else never.
            timeout_s: None: that of the directory.

        Raises:
            ValueError: as many ids as hashes are expected; a number that is of no load of this very directory.
            What the policy raises; then nothing is planned.
        """
        keys = checked_hashes(hashes)
        device_ids = checked_device_ids(keys, device_block_ids, distinct=False)
        if timeout_s is not None:
            check_timeout(timeout_s, positive=True)
        if layerwise is not False:
            check_bool(layerwise, "layerwise")
        if all_or_nothing is not False:
            check_bool(all_or_nothing, "all_or_nothing")
        min_uses = checked_count(min_uses, "min_uses", least=1)
        if type(computed_from) is not tuple or computed_from:
            computed_from = checked_list(computed_from, "computed_from", "int")
            self.ranks.check_loads(computed_from)
        if not keys:  # all was found
            return SavePlan(None)
        if self._holds.lost:
            self._holds.end_lost()
        index = self.index
        wanted = named = keys if len(set(keys)) == len(keys) else list(dict.fromkeys(keys))
        if min_uses > 1:
            wanted = self._uses.often(wanted, min_uses, index.slots)
        if not self.ranks.ready or any(map(self.ranks.has_failed, computed_from)):
            wanted = [key for key in wanted if key in index.slots]
        if all_or_nothing and not self._has_room(wanted):
            wanted = [key for key in wanted if key in index.slots]
        admitted = self._admit(wanted)
        if all_or_nothing and not all(key in index.slots for key in wanted):  # a policy has its own ideas
            self._forget(admitted)
            admitted = {}
        self.counters["saved_blocks"] += len(admitted)
        left_out: tuple[int, ...] = ()
        if len(admitted) < len(named):
            left_out = tuple(i for i, key in enumerate(keys) if key not in index.slots)
            num_left_out = len({keys[i] for i in left_out})
            self.counters["deduplicated_blocks"] += len(named) - len(admitted) - num_left_out
            self.counters["left_out_blocks"] += num_left_out
        if not admitted:
            return SavePlan(None, left_out)
        if len(admitted) < len(keys):  # else all of them, in their order
            id_of = dict(zip(keys, device_ids, strict=True))
            device_ids = [id_of[key] for key in admitted]
        slots = admitted.values()
        job = self._begin("save", admitted, slots, device_ids, timeout_s, computed_from, layerwise=layerwise)
        return SavePlan(job, left_out)

    def undo(self, job: Job, damaged: Iterable[int] = ()) -> list[Outcome]:
        """It was begun on no rank and never will be: as if it had not been planned, but what was computed from it has
        failed. Of one that is over: does nothing.

        Args:
            damaged: positions that are dropped.

        Returns:
            Of the saves that end with it; and of itself, if it had failed and ranks were named as late.

        Raises:
            TypeError: not a job, or a position that is no int.
            ValueError: a position that the job has not.
        """
        check_version(job, Job)
        damaged = checked_list(damaged, "damaged", "int")
        check_positions(damaged, len(job.keys), f"damaged of job {job.id}")
        pending = self.ranks.pending.get(job.id)
        if pending is not None and not pending.decided:
            self.index.unpin(job.keys)
            counter = "saved_blocks" if job.kind == "save" else "loaded_blocks"
            self.counters[counter] -= len(job.keys)
            self._forget(key for key in job.keys if self.index.arriving.get(key) == job.id)
        outcomes = [] if pending is None else self.ranks.undo(pending)
        self._drop_damaged(job, damaged)
        return outcomes

    def stats(self) -> dict[str, int]:
        """Counts since it was made, and what there is now."""
        index = self.index
        self._holds.end_lost()
        return {
            **self.counters,
            "evicted_blocks": index.evicted_blocks,
            "blocks": len(index.slots) - len(index.arriving),
            "saving_blocks": len(index.arriving),
            "pinned_blocks": sum(key in index.slots for key in index.pins),
            "jobs_in_flight": len(self.ranks.pending),
        }

    # ---- inside ----
    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Directory cannot be pickled or copied: it holds the jobs and look-ups of this process, and a copy would "
            "give out the same host blocks again; send its snapshot() and take_events() to a Mirror, or begin with "
            "another Directory, which the ranks join after restart()"
        )

    def _begin(
        self,
        kind: Kind,
        keys: Iterable[bytes],
        slots: Iterable[Any],
        ids: Iterable[int],
        timeout_s: float | None,
        computed_from: Sequence[int] = (),
        *,
        layerwise: bool = False,
        tier: str | None = None,
    ) -> Job:
        """A job: its blocks are held until it is over, whatever becomes of them."""
        ranks, number = self.ranks, self.ranks.next_id()
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        named, slots, ids = tuple(keys), tuple(slots), tuple(ids)
        job = Job(number, kind, self.space, named, slots, ids, ranks.named_epochs, bound_s, layerwise, tier)
        index = self.index
        if job.fills_host:
            arriving = index.arriving
            for key in named:
                arriving[key] = number
        index.pin(named)
        ranks.add(job, computed_from)
        return job

    def _settle(self, pending: Pending) -> None:
        """It is decided how the job ends, for all ranks."""
        job, failed = pending.job, pending.failed
        self.index.unpin(job.keys)
        if failed:
            self.counters["failed_saves" if job.kind == "save" else "failed_loads"] += 1
        if job.fills_host:
            arriving, number = self.index.arriving, job.id
            arrived, wrong = [], []
            for key in job.keys:
                if arriving.get(key) == number:  # else it was dropped meanwhile
                    del arriving[key]
                    arrived.append(key)
            if failed:
                named = {job.keys[position] for position in failed}
                wrong = [key for key in arrived if key in named]
                arrived = [key for key in arrived if key not in named]
            if self._events.enabled:
                self._events.add("stored", HOST, arrived)
            if wrong:
                self._forget(wrong)
        if pending.damaged:
            self._drop_damaged(job, pending.damaged)

    def _drop_damaged(self, job: Job, positions: Iterable[int]) -> None:
        if job.tier is not None:
            self.tier_removed(job.tier, [job.keys[position] for position in positions])
            return
        slots = self.index.slots
        wrong = [job.keys[one] for one in positions if slots.get(job.keys[one]) == job.host_slots[one]]
        self.counters["damaged_blocks"] += self.drop(wrong)
