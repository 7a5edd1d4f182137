"""Blocks that one prompt used last."""

from __future__ import annotations

from typing import Generic

from .policy import Key


class Run(Generic[Key]):
    """
    Attributes:
        keys: along the path of the prompt; some of them may be another's by now, or gone.
        parent: the block before the first that is its own.
        sign: a prompt that has this block goes on from here. It is the last but one, where the last may have been
            partly filled.
        touched_s: when it was used last.
        turn: how often it was.
        length: blocks of the prompt.
        live: how many of its own blocks are there.
        number: in :class:`~paddle_kv.offload.owners.Owners`.
        end: none of its own lies behind this position.
        klass, part: where it is counted and queued.
        watched: its age is followed: the number of its entry there, 0 if it is not.
        leaf: it is in the queue of those that may go.
        head: several prompts go on from it.
        facts: for the score, until its outcome is known.
    """

    __slots__ = (
        "end",
        "facts",
        "head",
        "keys",
        "klass",
        "leaf",
        "length",
        "live",
        "number",
        "parent",
        "part",
        "sign",
        "touched_s",
        "turn",
        "watched",
    )

    def __init__(self, keys: list[Key], parent: Key | None, sign: Key, touched_s: float, turn: int, klass: int) -> None:
        self.keys, self.parent, self.sign = keys, parent, sign
        self.touched_s, self.turn, self.klass = touched_s, turn, klass
        self.length = self.end = len(keys)
        self.live = self.part = self.number = 0
        self.watched = 0
        self.leaf = self.head = False
        self.facts: tuple[float, ...] | None = None
