"""H2O (Zhang et al., arXiv:2306.14048): heavy hitters, the tokens that got most attention so far, and the last ones.

    attention that token j had, summed over all tokens that looked at it, of each KV head
    | ###                 #                    |
    | ####   #      ##    #            #       |
    | ##################################### ## |
      sinks  heavy hitters, chosen per head   recent

After a prefix hit, sums start where the hit ended: who computed the rest did not keep what attention they paid. A hit
leaves the last 32 tokens to be computed, for one token alone is a poor judge.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

from pagoda.sparse.dropping import Dropping

_LEAST_OBSERVED = 32


@dataclass(frozen=True, slots=True)
class H2O(Dropping):
    """The first `sinks` tokens, the last `recent` (None: half of the budget), and of the others those of most mass."""

    name: ClassVar[str] = "h2o"
    recent: int | None = None
    sinks: int = 4

    def __post_init__(self) -> None:
        self.check(self.sinks >= 0, "sinks", "must be 0 or more")
        if self.recent is not None:
            self.check(self.recent >= 0, "recent", "must be 0 or more")
        Dropping.__post_init__(self)

    @property
    def least_budget(self) -> int:
        """The sinks, the recent ones and one heavy hitter."""
        return self.sinks + 1 + (self.recent if self.recent is not None else self.sinks + 1)

    def observed(self, num_prompt: int) -> range:
        """Every token."""
        return range(sys.maxsize)

    @property
    def least_observed(self) -> int:
        """Enough to judge by."""
        return _LEAST_OBSERVED

    def select(self, positions: torch.Tensor, mass: torch.Tensor, count: int) -> torch.Tensor:
        """Sinks and recent entries first, then by mass; among equals the earlier."""
        recent = count // 2 if self.recent is None else self.recent
        worth = mass.clone()
        worth[:, : self.sinks] = torch.inf
        worth[:, worth.shape[1] - recent :] = torch.inf
        return worth.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
