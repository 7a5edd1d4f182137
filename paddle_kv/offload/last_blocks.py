"""How often a prompt that comes back brings its last block: one that was not full is another block then."""

from __future__ import annotations

MEMORY = 256.0  # prompts; what is longer ago counts less


class LastBlocks:
    """
    Attributes:
        share: of the prompts that came back, those of which the last block did too. All, as long as none was seen.
    """

    def __init__(self) -> None:
        self._seen = self._back = 1.0
        self.share = 1.0

    def came_back(self, last_too: bool) -> None:
        self._seen += 1 - self._seen / MEMORY
        self._back += last_too - self._back / MEMORY
        self.share = self._back / self._seen
