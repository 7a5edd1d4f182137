"""More prompts for policies: what changes as it goes on, what comes from several kinds of users at once, and pauses of
many lengths. Each takes a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import count

from tests.offload.streams import STREAMS, Pause, Prompts, sessions, talks

OTHER_KEYS = 10**8


def between(low_s: float, high_s: float) -> Pause:
    return lambda rng: rng.uniform(low_s, high_s)


def tools_and_people(rng: random.Random) -> float:
    return rng.uniform(2, 15) if rng.random() < 0.8 else rng.uniform(60, 900)


def chat(rng: random.Random) -> float:
    return 6.0 + rng.lognormvariate(4.8, 0.95)


def flood(seed: int, num_prompts: int = 800) -> Prompts:
    """Prompts that never come again."""
    rng, fresh = random.Random(seed), count(1)
    return [(0.3 * number, [next(fresh) for _ in range(rng.randint(1, 60))]) for number in range(num_prompts)]


def uniform(seed: int, most_blocks: int, talks: int = 800) -> Prompts:
    """Any of them comes with the same chance at any time."""
    rng, prompts = random.Random(seed), []
    for number in range(6000):
        first = most_blocks * rng.randrange(talks)
        prompts.append((0.3 * number, list(range(first, first + rng.randint(1, most_blocks)))))
    return prompts


def shifting(seed: int) -> Prompts:
    """What is popular changes altogether, three times."""
    rng, prompts = random.Random(seed), []
    for number in range(8000):
        talk = min(int(rng.paretovariate(0.8)), 3000) + number // 2000 * 5000
        prompts.append((0.3 * number, [10 * talk + position for position in range(rng.randint(1, 10))]))
    return prompts


def recent(seed: int) -> Prompts:
    """The likelier to come, the less came since: what the order of use is made for."""
    rng, fresh = random.Random(seed), count()
    order: list[int] = []
    prompts: Prompts = []
    for number in range(8000):
        if order and rng.random() < 0.75:
            talk = order.pop(max(0, len(order) - int(rng.paretovariate(0.6))))
        else:
            talk = next(fresh)
        order.append(talk)
        prompts.append((0.3 * number, list(range(8 * talk, 8 * talk + 8))))
    return prompts


def growing_loop(seed: int) -> Prompts:
    rounds = [10 * (number % (50 + seed % 7 + number // 20)) for number in range(5000)]
    return [(0.5 * number, list(range(first, first + 10))) for number, first in enumerate(rounds)]


def templates(seed: int) -> Prompts:
    """Shared heads, some of them popular, with tails that never come again."""
    rng, fresh = random.Random(seed), count(OTHER_KEYS)
    prompts: Prompts = []
    for number in range(5000):
        first = 50 * min(int(rng.paretovariate(0.6)), 400)
        head = list(range(first, first + rng.choice([10, 20, 40])))
        prompts.append((0.3 * number, head + [next(fresh) for _ in range(rng.randint(1, 8))]))
    return prompts


def documents(seed: int) -> Prompts:
    """Each is asked about a few times within a minute, and never again."""
    rng, fresh = random.Random(seed), count()
    prompts: Prompts = []
    for number in range(900):
        document = [next(fresh) for _ in range(rng.randint(10, 40))]
        for _ in range(rng.randint(1, 8)):
            prompts.append((3.0 * number + rng.uniform(0, 60), [*document, next(fresh)]))
    return sorted(prompts)


def bursts_then_sessions(seed: int) -> Prompts:
    """As "bursts" of :mod:`.streams`, whose sessions are always the same ones."""
    prompts = [
        (0.5 * number, [OTHER_KEYS // 2 + 5 * (number // 3) + one for one in range(5)]) for number in range(2000)
    ]
    return prompts + [(1000.0 + arrival_s, prompt) for arrival_s, prompt in sessions(seed, 1200)]


def one_by_one(*parts: Prompts) -> Prompts:
    prompts: Prompts = []
    for number, part in enumerate(parts):
        start_s = prompts[-1][0] if prompts else 0.0
        prompts += [(start_s + arrival_s, [key + number * OTHER_KEYS for key in prompt]) for arrival_s, prompt in part]
    return prompts


def at_once(*parts: Prompts) -> Prompts:
    return sorted(
        (arrival_s, [key + number * OTHER_KEYS for key in prompt])
        for number, part in enumerate(parts)
        for arrival_s, prompt in part
    )


def in_turns(*kinds: Callable[[int], Prompts], times: int = 3) -> Callable[[int], Prompts]:
    return lambda seed: one_by_one(*(kind(seed + one) for one in range(times) for kind in kinds))


def chats(num_prompts: int, per_s: float) -> Callable[[int], Prompts]:
    return lambda seed: talks(seed, num_prompts, chat, goes_on=0.4, most_fresh=40, per_s=per_s)


MIXED_STREAMS: dict[str, Callable[[int], Prompts]] = {
    **STREAMS,
    "bursts, then sessions": bursts_then_sessions,
    "short sessions": partial(sessions, num_prompts=3000, length=3),
    "short, constant return": partial(sessions, num_prompts=3000, length=3, memory=False),
    "long sessions": partial(sessions, num_prompts=2500, length=40),
    "chat": chats(6000, 2.0),
    "chat, busy": chats(6000, 8.0),
    "pauses of 2 to 30 s": lambda seed: talks(seed, 4000, between(2, 30)),
    "pauses of 1 to 5 minutes": lambda seed: talks(seed, 4000, between(60, 300)),
    "pauses of 10 to 50 minutes": lambda seed: talks(seed, 3000, between(600, 3000)),
    "pauses of 200 s": lambda seed: talks(seed, 4000, between(190, 210)),
    "agents": lambda seed: talks(seed, 5000, between(2, 15), goes_on=0.92, most_fresh=5, per_s=0.4),
    "agents and people": lambda seed: talks(seed, 5000, tools_and_people, goes_on=0.92, most_fresh=5, per_s=0.2),
    "random blocks": lambda seed: uniform(seed, 1, 3000),
    "random prompts": lambda seed: uniform(seed, 10),
    "recent": recent,
    "growing loop": growing_loop,
    "templates": templates,
    "documents": documents,
    "popularity shifts": shifting,
    "a flood between sessions": lambda seed: one_by_one(sessions(seed, 2000), flood(seed), sessions(seed + 1, 2000)),
    "sessions beside a scan": lambda seed: at_once(sessions(seed, 3000), flood(seed, 3000)),
    "sessions beside popular texts": lambda seed: at_once(sessions(seed, 2500), STREAMS["zipf"](seed)),
    "bursts and sessions in turns": in_turns(
        lambda seed: bursts_then_sessions(seed)[:800], lambda seed: sessions(seed, 800)
    ),
    "kinds of returns in turns": in_turns(
        lambda seed: sessions(seed, 1000), lambda seed: sessions(seed, 1000, memory=False)
    ),
    "pauses in turns": in_turns(
        lambda seed: talks(seed, 1200, between(2, 20)), lambda seed: talks(seed, 1200, between(60, 90))
    ),
    "people, then machines": lambda seed: one_by_one(
        talks(seed, 3000, between(60, 90)), talks(seed + 1, 4000, between(1, 15))
    ),
}
