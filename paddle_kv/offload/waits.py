"""What the model does next with a prompt: whether it should wait for what is loaded, or compute it first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..schedule.movement import Movement
from .decision import Decision, Prompt, best_way
from .passes import WholePass
from .pieces import Piece, PieceState
from .prefetch import Prefetch
from .rates import RateSnapshot


@dataclass(frozen=True)
class Step:
    """What the model does next.

    Attributes:
        piece: to compute; None: what comes behind the prefix.
        loads: what it needs of what is before that, layer by layer.
        leaving: this one first has to be over: the piece was taken from it.
        reading: this first comes from the tier, or :attr:`left_s` is over: sooner than the piece could be computed.
        left_s: for that.
    """

    piece: Piece | None = None
    loads: tuple[Movement, ...] = ()
    leaving: Movement | None = None
    reading: Prefetch | None = None
    left_s: float = 0.0


class Waits:
    """Of one prompt, by the rates as they are when it is asked. A pass of the model follows loads layer by layer, so it
    begins with the first layer of them and ends behind the last one.

    Args:
        num_blocks: of the prefix that was found.
        num_tokens: of the whole prompt.
        chunk_tokens: that the model computes in one pass, at most.
        aligned: a pass ends at a multiple of them.

    A pass may be over other prompts too: see :meth:`share_passes`. Loads go on meanwhile, so the pass hides the more of
    them; and each pass more that this prompt needs takes longer for it, and no longer for the others. All prompts of a
    pass weigh alike: what is sooner is so in the mean of them.
    """

    def __init__(
        self, num_blocks: int, num_tokens: int, chunk_tokens: int, num_layers: int, *, aligned: bool = True
    ) -> None:
        self._num_blocks, self._num_tokens = num_blocks, num_tokens
        self._chunk_tokens, self._num_layers, self._aligned = chunk_tokens, num_layers, aligned
        self._shared = range(1), WholePass(1, 1)

    def share_passes(self, tokens: range, whole: WholePass) -> None:
        """A pass is over these tokens of the prompt, and those of others: the next ones will be too."""
        self._shared = tokens, whole

    @property
    def times_as_long(self) -> float:
        """The time of what is computed of this prompt, with what the same passes compute of others. At most as many as
        there are prompts: one that had less than its part of the last pass may have more of the next ones."""
        tokens, whole = self._shared
        return min(whole.tokens / len(tokens), whole.prompts)

    def for_one(
        self, rates: RateSnapshot, start: int, stop: int, begin_s: float, there_s: float, others_s: float
    ) -> bool:
        """Whether to wait for a load of these blocks.

        Args:
            begin_s, there_s: until it begins, and until it is there.
            others_s: until all loads are there that a pass over these blocks has to wait for; 0: there are none.
        """
        if rates.base_s is None:
            return False
        prefill_s, num_tokens, layers = rates.prefill_s, self._num_tokens, self._num_layers
        start_token, stop_token, end = (blocks * rates.block_tokens for blocks in (start, stop, self._num_blocks))
        stop_of_pass = self._stop_of_pass(end)
        beside_s = self._beside_s(rates)
        pass_s = prefill_s(end, stop_of_pass) + beside_s  # over what comes behind the prefix
        first_layer_s = begin_s + (there_s - begin_s) / layers
        waited_s = max(first_layer_s + pass_s, there_s + pass_s / layers)
        if stop == self._num_blocks:  # the pass over them has room for more
            stop_token = max(end, self._stop_of_pass(start_token))
        computed_s = self._behind_s(others_s, prefill_s(start_token, stop_token) + beside_s)
        more_s = prefill_s(max(end, stop_token), num_tokens) - prefill_s(stop_of_pass, num_tokens) + beside_s
        return waited_s <= computed_s + more_s / self._shared[1].prompts

    def for_rest(
        self,
        rates: RateSnapshot,
        start: int,
        first_stop: int,
        stop: int,
        *,
        tier_blocks: int,
        behind_blocks: int,
        link_wait_s: float,
        tier_wait_s: float,
        others_s: float,
    ) -> bool:
        """Whether to wait for all blocks ``[start, stop)``, which wait in host memory, rather than compute those before
        ``first_stop`` and go on from there.

        Args:
            tier_blocks: that come from the tier, behind these.
            behind_blocks: of the prefix that are computed, behind all of those.
            link_wait_s, tier_wait_s: until link and tier have done what stands before.
            others_s: see :meth:`for_one`.
        """
        if rates.base_s is None:
            return False
        tier_stop, block_tokens = stop + tier_blocks, rates.block_tokens
        num_tokens = self._num_tokens - (self._num_blocks - tier_stop - behind_blocks) * block_tokens
        end = tier_stop * block_tokens
        own, rates, beside_s = rates, self._with_others(rates), self._beside_s(rates)
        end_s = rates.prefill_s(end, num_tokens)
        all_s = (stop - start) * rates.link_s
        there_s, begun_s = link_wait_s + all_s + end_s, link_wait_s + all_s / self._num_layers + end_s  # at best
        if beside_s:  # a load goes on behind that, and not behind as much as if the end were as long for all
            own_s = own.prefill_s(end, min(end + self._chunk_tokens, num_tokens))
            hidden_s = (beside_s - (self.times_as_long - 1.0) * own_s) * (1 - 1 / self._num_layers)
            link_wait_s, tier_wait_s = link_wait_s - hidden_s, tier_wait_s - hidden_s

        def weighed(first: int, wait_s: float, link_wait_s: float) -> Decision:
            """Of the blocks from ``first`` on."""
            return best_way(
                rates,
                Prompt((first, stop), (stop, tier_stop), end, num_tokens),
                chunk_tokens=self._chunk_tokens,
                num_layers=self._num_layers,
                wait_s=wait_s,
                link_wait_s=link_wait_s,
                tier_wait_s=tier_wait_s,
            )

        def mean_s(over_s: float, begin_s: float) -> float:
            """This prompt is over then, and what comes behind the prefix could begin then."""
            return self._mean_s(over_s, begin_s / self.times_as_long + over_s - begin_s - end_s)

        loaded = weighed(start, 0.0, link_wait_s)
        if loaded.host_first == start:
            computes_tier = loaded.tier_first > stop
            loaded_s = mean_s(max(loaded.expected_s, there_s if computes_tier else begun_s), loaded.pass_s)
        else:
            loaded_s = mean_s(max(loaded.load_s, begun_s), 0.0)
            if tier_blocks:  # all of them, and not all that the tier has
                some = weighed(stop, 0.0, link_wait_s + all_s)  # a pass over what the tier has follows them
                loaded_s = min(loaded_s, mean_s(max(some.expected_s, there_s), some.pass_s))
        computed_s = self._behind_s(others_s, _compute_s(own, start, first_stop) + beside_s)
        others = weighed(first_stop, computed_s, link_wait_s)
        return loaded_s <= mean_s(others.expected_s, others.pass_s)

    def is_loaded_sooner(self, rates: RateSnapshot, start: int, stop: int, link_wait_s: float) -> bool:
        """Whether the pass behind the prefix, if it follows a load of these blocks, of which none is under way, layer
        by layer, is over as if they had been there, but for a layer, or sooner than if the model computes some of the
        first of them meanwhile.

        Args:
            link_wait_s: until the link has done what comes before.
        """
        if rates.base_s is None or not rates.link_waits:
            return False
        pass_s, layers, link_s = self.pass_s(rates), self._num_layers, rates.link_s
        left_s = (stop - start) * link_s
        if left_s <= pass_s:
            return True
        computed_s, left_s = 0.0, link_wait_s + left_s
        over_s = left_s + pass_s / layers
        loaded_s = self._mean_s(over_s, over_s - pass_s)
        passes_s = 0.0  # with what they compute of others
        while start < stop and passes_s < left_s:  # behind that the others are there, and it only takes longer
            end = min(max(self._stop_of_pass(start * rates.block_tokens) // rates.block_tokens, start + 1), stop)
            computed_s += _compute_s(rates, start, end)
            passes_s = computed_s * self.times_as_long
            left_s -= (end - start) * link_s
            waited_s = max(0.0, left_s - passes_s)
            if self._mean_s(passes_s + waited_s + pass_s, computed_s + waited_s) < loaded_s:
                return False
            start = end
        return True

    def is_time_to_follow(self, rates: RateSnapshot, others: int) -> bool:
        """Whether the tier would read what is left behind the next piece, so many blocks, in less than the pass that
        could follow it: what it reads from now on is loaded while it reads it. Behind more than that nothing is lost
        where the next piece is read by itself."""
        if rates.base_s is None or not (rates.link_waits and rates.tier_waits):
            return False
        return others * rates.tier_s < self.pass_s(rates)

    def is_followed_sooner(
        self,
        rates: RateSnapshot,
        pieces: Sequence[Piece],
        *,
        tier_wait_s: float,
        link_wait_s: float,
        model_wait_s: float,
    ) -> bool:
        """Whether a pass behind these pieces is over sooner if it follows them as they come from the tier, than if the
        model computes the first of them meanwhile: all, or those that lie in the tier.

        Args:
            pieces: in order.
            tier_wait_s, link_wait_s: until tier and link have done what else they have to do before that pass.
            model_wait_s: until the model has computed other prompts.
        """
        pass_s, layers = self.pass_s(rates), self._num_layers
        below = sum(piece.tier_blocks for piece in pieces if piece.state is PieceState.BELOW)
        tier_blocks = below + sum(piece.tier_blocks for piece in pieces if piece.state is PieceState.READING)
        link_blocks = sum(piece.size for piece in pieces)
        tier_s, link_s = tier_wait_s + tier_blocks * rates.tier_s, link_wait_s + link_blocks * rates.link_s
        first_s = max(tier_s - below * rates.tier_s * (1 - 1 / layers), link_wait_s + (link_s - link_wait_s) / layers)
        # That it begins later where the model is not free says nothing: what is computed meanwhile does too.
        followed_s = max(first_s + pass_s, max(tier_s, link_s) + pass_s / layers)
        all_s = some_s = model_wait_s  # of the model, for the first pieces, and for those of them that lie in the tier
        left_link_s = link_s  # where these alone are computed
        for piece in pieces:
            computed_s = _compute_s(rates, piece.start, piece.stop)
            all_s += computed_s
            link_s -= piece.size * rates.link_s
            if piece.tier_blocks and piece.state in (PieceState.BELOW, PieceState.READING):
                some_s += computed_s
                left_link_s -= piece.size * rates.link_s
                tier_s -= piece.tier_blocks * rates.tier_s
            if min(max(all_s, tier_s, link_s), max(some_s, tier_s, left_link_s)) + pass_s < followed_s:
                return False
        return True

    def over_s(self, rates: RateSnapshot, begin_s: float, there_s: float) -> float:
        """When all behind the prefix is computed, if the model begins then, and all loads are there then."""
        rest_s = rates.prefill_s(self._num_blocks * rates.block_tokens, self._num_tokens)
        return max(begin_s + rest_s, there_s + rest_s / self._num_layers)

    def pass_s(self, rates: RateSnapshot, piece: Piece | None = None) -> float:
        """Of the pass over the piece, or over what is behind the prefix."""
        if piece is not None:
            return _compute_s(rates, piece.start, piece.stop) + self._beside_s(rates)
        end = self._num_blocks * rates.block_tokens
        return rates.prefill_s(end, self._stop_of_pass(end)) + self._beside_s(rates)

    def _beside_s(self, rates: RateSnapshot) -> float:
        """What a pass takes for others, by their tokens in the last one, and as if these stood where its own did."""
        tokens, whole = self._shared
        if whole.prompts == 1:
            return 0.0
        return (whole.tokens / len(tokens) - 1.0) * rates.prefill_s(tokens.start, tokens.stop)

    def _with_others(self, rates: RateSnapshot) -> RateSnapshot:
        """What this prompt computes takes as long as the passes over it and the others."""
        times = self.times_as_long
        if times == 1.0 or rates.base_s is None:
            return rates
        return replace(rates, base_s=times * rates.base_s, slope_s=times * rates.slope_s)

    def _mean_s(self, over_s: float, late_s: float) -> float:
        """Of all prompts of the passes: this one is over then, and the others are so much later for it."""
        prompts = self._shared[1].prompts
        return (over_s + (prompts - 1) * late_s) / prompts

    def _stop_of_pass(self, token: int) -> int:
        """That begins there."""
        start = token // self._chunk_tokens * self._chunk_tokens if self._aligned else token
        return min(start + self._chunk_tokens, self._num_tokens)

    def _behind_s(self, loads_s: float, compute_s: float) -> float:
        """Until a pass is over that follows loads which end then."""
        return max(loads_s / self._num_layers + compute_s, loads_s + compute_s / self._num_layers)


def _compute_s(rates: RateSnapshot, start: int, stop: int) -> float:
    return rates.prefill_s(start * rates.block_tokens, stop * rates.block_tokens)
