"""When blocks come back, learnt while serving: how often runs of a class have returned at each age, and what it is
worth to keep one.

Ages are parted geometrically. Of each class and part it is counted how many runs came back in it and how many lived
through it: events over those at risk, the estimate of E. L. Kaplan, P. Meier, "Nonparametric estimation from
incomplete observations", Journal of the American Statistical Association 53, 1958. Runs that are still watched count
as far as they have come, so that what came back early does not seem to be all.

The worth of a run at an age is its Gittins index: the most hits per block and second that any time of further keeping
promises (J. C. Gittins, "Bandit processes and dynamic allocation indices", Journal of the Royal Statistical Society B
41(2), 1979). With P(a) the chance to have come back by age a, and K(a) the mean time for which it was kept by then,
it is the largest slope from (K(a), P(a)) to any later point of that curve: one pass over its hull.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

FIRST_S = 2.0  # the first part ends here
PARTS_PER_OCTAVE = 4
OCTAVES = 11  # up to 4096 s
EDGES_S = [0.0, *(FIRST_S * 2 ** (step / PARTS_PER_OCTAVE) for step in range(PARTS_PER_OCTAVE * OCTAVES + 1))]
NUM_PARTS = len(EDGES_S) - 1
WIDTHS_S = [end - start for start, end in pairwise(EDGES_S)]
PRIOR_RUNS = 2.0  # how many runs that counts for
POOL_RUNS = 8.0  # how many runs of its own a class needs to be believed as much as all of its kind
HALVED_AT = 16384.0  # returns: then all counts are halved, and what was long ago is forgotten


def part_of(age_s: float) -> int:
    """The part in which an age lies."""
    return min(bisect_right(EDGES_S, age_s), NUM_PARTS) - 1


def gittins(chances: list[float]) -> list[float]:
    """For a run at the beginning of each part: the most returns per second of keeping.

    Args:
        chances: of a return in each part, of a run that has come so far.
    """
    kept_s = returned = 0.0
    alive = 1.0
    curve = [(kept_s, returned)]  # at the beginning of each part, and at the end of the last
    for chance, width_s in zip(chances, WIDTHS_S, strict=True):
        returned += alive * chance
        kept_s += alive * width_s * (1 - chance / 2)  # who returns does so in the middle, on average
        alive *= 1 - chance
        curve.append((kept_s, returned))
    hull = [curve.pop()]  # behind the part, from its farthest point to its nearest
    found = []
    for point in reversed(curve):
        kept_s, returned = point
        end_s, end = hull[-1]
        best = (end - returned) / (end_s - kept_s) if end_s > kept_s else 0.0
        while len(hull) > 1:
            end_s, end = hull[-2]
            slope = (end - returned) / (end_s - kept_s) if end_s > kept_s else 0.0
            if slope < best:
                break
            best = slope
            hull.pop()
        hull.append(point)
        found.append(best)
    found.reverse()
    return found


class Returns:
    """Counts for ``kinds`` kinds of classes, each of ``per_kind`` classes, numbered one after the other.

    Args:
        kinds: the chance that is believed of a return in each part before anything was seen, for each kind.
    """

    def __init__(self, kinds: list[float], per_kind: int, per_group: int) -> None:
        self._kinds, self._per_kind, self._per_group = kinds, per_kind, per_group
        self.num_classes = len(kinds) * per_kind
        self.returned = [[0.0] * NUM_PARTS for _ in range(self.num_classes)]
        self.survived = [[0.0] * NUM_PARTS for _ in range(self.num_classes)]
        self._total = 0.0

    def came_back(self, number: int, part: int) -> None:
        """A run of the class, at an age in this part."""
        self.returned[number][part] += 1
        self._total += 1
        if self._total > HALVED_AT:
            self._total /= 2
            for table in (self.returned, self.survived):
                for row in table:
                    row[:] = [count / 2 for count in row]

    def chances(self) -> list[list[float]]:
        """Of a return in each part, for each class. Where little was seen, a class is like its group, and a group like
        all of its kind: then it is the very same list."""
        counted = [any(back) or any(alive) for back, alive in zip(self.returned, self.survived, strict=True)]
        found = []
        for kind, prior in enumerate(self._kinds):
            first = kind * self._per_kind
            end = first + self._per_kind
            of_kind = [one for one in range(first, end) if counted[one]]
            all_ = self._chances(of_kind, [prior] * NUM_PARTS, PRIOR_RUNS)
            for start in range(first, end, self._per_group):
                group = [one for one in range(start, start + self._per_group) if counted[one]]
                likely = self._chances(group, all_, POOL_RUNS)
                own = {one: self._chances([one], likely, POOL_RUNS) for one in group}
                found += [own.get(one, likely) for one in range(start, start + self._per_group)]
        return found

    def _chances(self, classes: list[int], prior: list[float], runs: float) -> list[float]:
        """``classes``: those of which anything was seen."""
        if not classes:
            return prior
        returned, survived = self.returned[classes[0]], self.survived[classes[0]]
        if len(classes) > 1:
            returned = list(map(sum, zip(*map(self.returned.__getitem__, classes), strict=True)))
            survived = list(map(sum, zip(*map(self.survived.__getitem__, classes), strict=True)))
        return [
            (back + runs * likely) / (back + alive + runs)
            for back, alive, likely in zip(returned, survived, prior, strict=True)
        ]

    def worth(self) -> Worth:
        """The Gittins index of each class and part."""
        return Worth(self.chances())


class Worth(dict[int, list[float]]):
    """Of each class, worked out when it is asked for."""

    def __init__(self, chances: list[list[float]]) -> None:
        self._chances = chances

    def __missing__(self, number: int) -> list[float]:
        found = self[number] = gittins(self._chances[number])
        return found
