"""A server as a state machine: hypothesis picks what it does, and shrinks what goes wrong to a few lines."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paddle_kv.testing.simulator.traffic import DEVICE_BLOCKS, LAYERS, Server

device_blocks = st.lists(st.integers(0, DEVICE_BLOCKS - 1), min_size=1, max_size=3, unique=True)
picks = st.integers(0, 11)
ahead = st.integers(1, 12)


class ServerMachine(RuleBasedStateMachine):
    """Allocates, computes, saves, loads, waits, cancels, preempts, frees, fails and closes in any order."""

    server: Server
    finished = False

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        self.server = Server(seed)
        self.server.allocate(2, fill=True)

    @rule(count=st.integers(1, 3), fill=st.booleans())
    def allocate(self, count: int, fill: bool) -> None:
        self.server.allocate(count, fill=fill)

    @precondition(lambda self: self.server.owned)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        self.server.free(self._host(pick))

    @precondition(lambda self: self.server.owned)
    @rule(pick=picks)
    def read_on_the_host(self, pick: int) -> None:
        self.server.read_host(self._host(pick))

    @rule(block=st.integers(0, DEVICE_BLOCKS - 1), write=st.booleans(), side=st.booleans())
    def compute(self, block: int, write: bool, side: bool) -> None:
        self.server.compute(block, write=write, side=side)

    @precondition(lambda self: self.server.owned)
    @rule(scheduler=st.integers(0, 1), devices=device_blocks, shift=picks, layerwise=st.booleans())
    def offload(self, scheduler: int, devices: list[int], shift: int, layerwise: bool) -> None:
        devices = devices[: len(self.server.owned)]
        hosts = [self._host(shift + position) for position in range(len(devices))]
        self.server.offload(scheduler, devices, hosts, layerwise=layerwise)

    @precondition(lambda self: self.server.owned)
    @rule(scheduler=st.integers(0, 1), devices=device_blocks, hosts=st.lists(picks, min_size=3, max_size=3))
    def onload(self, scheduler: int, devices: list[int], hosts: list[int]) -> None:
        self.server.onload(scheduler, [self._host(pick) for pick in hosts[: len(devices)]], devices)

    @precondition(lambda self: self.server.owned)
    @rule(scheduler=st.integers(0, 1), block=st.integers(0, DEVICE_BLOCKS - 1), pick=picks)
    def preempt(self, scheduler: int, block: int, pick: int) -> None:
        """Saves a block, gives it to another request at once, and loads it back elsewhere."""
        host = self._host(pick)
        self.server.offload(scheduler, [block], [host], layerwise=False)
        self.server.compute(block, write=True)
        self.server.onload(1 - scheduler, [host], [(block + 1) % DEVICE_BLOCKS])

    @precondition(lambda self: any(flight.unmarked for flight in self.server.flights))
    @rule(pick=picks, layer=st.integers(0, LAYERS - 1))
    def mark(self, pick: int, layer: int) -> None:
        waiting = [flight for flight in self.server.flights if flight.unmarked]
        flight = waiting[pick % len(waiting)]
        layers = sorted(flight.unmarked)
        self.server.mark(flight, layers[layer % len(layers)])

    @precondition(lambda self: self.server.flights)
    @rule(pick=picks, how=st.sampled_from(["wait", "poll", "wait_on", "cancel"]))
    def follow(self, pick: int, how: str) -> None:
        getattr(self.server, how)(self.server.flights[pick % len(self.server.flights)])

    @rule(ahead=ahead, submission=st.booleans())
    def fail(self, ahead: int, submission: bool) -> None:
        if submission:
            self.server.break_submission(ahead)
        else:
            self.server.break_copy(ahead)

    @rule(scheduler=st.integers(0, 1))
    def close(self, scheduler: int) -> None:
        self.server.restart(scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        try:
            self.server.finish()
        except BaseException:
            self.server.abandon()
            raise

    def _host(self, pick: int) -> int:
        return self.server.owned[pick % len(self.server.owned)]


TestServerMachine = ServerMachine.TestCase
TestServerMachine.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
