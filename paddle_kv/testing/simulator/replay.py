"""Random runs of a server on the simulator; the seed decides everything."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Collection, Iterator

from .clients import Clients
from .simulation import OrderingError
from .traffic import DEVICE_BLOCKS, Server

TRACE_LINES = 25  # of what led to a failure


def play(
    seed: int, *, num_steps: int = 60, drop: Collection[str] = (), faults: bool = True, whole_trace: bool = False
) -> Server:
    """One random run.

    Args:
        seed: decides everything.
        num_steps: actions of the server.
        drop: what to leave out.
        faults: whether copies and submissions break.
        whole_trace: whether a failure shows all actions and each step of the device, or the last actions alone.

    Raises:
        OrderingError: with the trace of the run, and the command that repeats it.
    """
    chance = random.Random(seed)
    server = Server(seed, drop=drop)
    options = "".join(f" --drop {name}" for name in sorted(drop))
    options += "" if faults else " --no-faults"  # the actions are drawn from other ones then
    with _explained(server, f"--seed {seed} --steps {num_steps}{options}", whole_trace):
        for _ in range(num_steps):
            _act(server, chance, faults)
        server.finish()
    return server


def play_clients(
    seed: int,
    *,
    num_threads: int = 3,
    num_steps: int = 20,
    faults: bool = True,
    forks: int = 0,
    prefer: Collection[str] = (),
    lines: bool = False,
    whole_trace: bool = False,
) -> Clients:
    """One random run of threads that share a manager and an adapter.

    Args:
        seed: decides everything.
        num_threads: of the server.
        num_steps: actions of each thread.
        faults: whether transfers are cancelled and made to fail, and schedulers closed.
        forks: how often one more thread forks the process.
        prefer: names of actions, as in the trace, that are taken more often.
        lines: whether threads are left at each line.
        whole_trace: see :func:`play`.

    Raises:
        OrderingError: with the trace of the run, and the command that repeats it.
    """
    collects = gc.isenabled()
    gc.disable()  # when it comes is not the seed's choice, and what it finds makes itself heard
    try:
        return _play_clients(seed, num_threads, num_steps, faults, forks, prefer, lines, whole_trace)
    finally:
        if collects:
            gc.enable()


def _play_clients(
    seed: int,
    num_threads: int,
    num_steps: int,
    faults: bool,
    forks: int,
    prefer: Collection[str],
    lines: bool,
    whole_trace: bool,
) -> Clients:
    clients = Clients(seed, num_threads=num_threads, calm=not faults, forks=forks, prefer=prefer, lines=lines)
    options = f"--seed {seed} --threads {num_threads} --steps {num_steps}"
    options += ("" if faults else " --no-faults") + (f" --forks {forks}" if forks else "") + lines * " --lines"
    options += "".join(f" --prefer {name}" for name in sorted(prefer))
    with _explained(clients, options, whole_trace):
        clients.run(num_steps)
        clients.finish()
    return clients


@contextlib.contextmanager
def _explained(player: Server | Clients, options: str, whole_trace: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        player.abandon()
        raise
    except BaseException as error:
        findings = [] if isinstance(error, OrderingError) else map(str, player.simulation.findings()[:3])
        player.abandon()
        lines = [*player.trace, *player.simulation.device.history] if whole_trace else player.trace[-TRACE_LINES:]
        raise OrderingError(
            "\n".join(
                [
                    *(f"  {line}" for line in lines),
                    f"{type(error).__name__}: {error}",
                    *findings,
                    f"repeat: python -m paddle_kv.testing.simulator {options}",
                ]
            )
        ) from error


def _act(server: Server, chance: random.Random, faults: bool) -> None:
    def some_device() -> list[int]:
        return chance.sample(range(DEVICE_BLOCKS), chance.randint(1, 3))

    action = chance.choices(
        ["allocate", "free", "read_host", "compute", "offload", "onload", "mark", "wait", "poll", "wait_on"],
        [3, 1, 1, 6, 4, 5, 6, 2, 2, 1],
    )[0]
    if chance.random() < 0.03:
        action = chance.choice(["cancel", "restart", *(["break_copy", "break_submission"] if faults else [])])
    if action == "allocate":
        server.allocate(chance.randint(1, 3), fill=chance.random() < 0.7)
    elif action == "compute":
        server.compute(chance.randrange(DEVICE_BLOCKS), write=chance.random() < 0.5, side=chance.random() < 0.3)
    elif action == "restart":
        server.restart(chance.randrange(2))
    elif action == "break_copy":
        server.break_copy(chance.randint(1, 20))
    elif action == "break_submission":
        server.break_submission(chance.randint(1, 3))
    elif action in ("free", "read_host", "offload", "onload"):
        if not server.owned:
            return
        device_ids = some_device()[: len(server.owned)]
        if action == "free":
            server.free(chance.choice(server.owned))
        elif action == "read_host":
            server.read_host(chance.choice(server.owned))
        elif action == "offload":
            host_ids = chance.sample(server.owned, len(device_ids))
            server.offload(chance.randrange(2), device_ids, host_ids, layerwise=chance.random() < 0.5)
        else:
            server.onload(chance.randrange(2), chance.choices(server.owned, k=len(device_ids)), device_ids)
    elif server.flights:
        flight = chance.choice(server.flights)
        if action == "mark":
            waiting = [flight for flight in server.flights if flight.unmarked]
            if waiting:
                flight = waiting[0]
                server.mark(flight, chance.choice(sorted(flight.unmarked)))
        elif action == "cancel":
            server.cancel(flight)
        elif action == "wait_on":
            server.wait_on(flight)
        elif action == "poll":
            server.poll(flight)
        else:
            server.wait(flight)
