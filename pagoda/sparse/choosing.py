"""Choosing: what a policy that drops entries says of itself: how many stay, when, and which.

`Dropping` opens sequences for it, and `DroppingSequence` carries out what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pagoda.sparse.settings import Settings

_LEAST_INTERVAL = 32
_BUDGET_PER_INTERVAL = 8
MOST_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class Choosing(Settings):
    """Settings of every dropping policy.

    Attributes:
        interval: tokens between two compressions while decoding; None: an eighth of the budget.

    Raises:
        InvalidRequest: a setting is out of range, or the budget is too small for the others.
    """

    bounds_prefill: ClassVar[bool] = True
    only_copies: ClassVar[bool] = True
    compresses_output: ClassVar[bool] = True
    packs_positions: ClassVar[bool] = False
    """Whether rotary positions are those in the cache: entries stand close together, whatever was between them."""
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.interval is not None:
            self.check(1 <= self.interval <= MOST_TOKENS, "interval", "must be at least 1")
        if isinstance(self.budget, int):
            least = self.least_budget
            self.check(least <= self.budget, "budget", f"must be at least {least} tokens here")
            self.check(self.budget <= MOST_TOKENS, "budget", f"must be at most {MOST_TOKENS} tokens")

    @property
    def least_budget(self) -> int:
        """The smallest budget that these settings allow."""
        return 1

    @property
    def num_between(self) -> int:
        """Tokens between two compressions."""
        if self.interval is not None:
            return self.interval
        return max(_LEAST_INTERVAL, self.num_tokens // _BUDGET_PER_INTERVAL)

    @property
    def largest_layer(self) -> int:
        """The most entries that any layer keeps."""
        return self.num_tokens

    @property
    def num_packed(self) -> int:
        """With packed positions: the leading entries that are turned to stand right before the others."""
        return 0

    def layer_budget(self, index: int, num_layers: int) -> int:
        """The entries that the `index`-th of `num_layers` layers keeps."""
        return self.num_tokens

    def observed(self, num_prompt: int) -> range:
        """The tokens whose attention the choice goes by. Those from 0 on may be hit; if they start later, none is."""
        return range(0)

    @property
    def least_observed(self) -> int:
        """The tokens at the prompt's end that a prefix hit leaves to be computed, where it could be longer."""
        return 0

    def select(self, positions: torch.Tensor, mass: torch.Tensor, count: int) -> torch.Tensor:
        """Choose the entries that stay in one layer.

        Args:
            positions: int64 `[num_kv_heads, n]`, the token of each entry, rising.
            mass: float32 `[num_kv_heads, n]`, the attention that each has had from the observed tokens.
            count: how many stay, at most n.

        Returns:
            int64 `[num_kv_heads, count]`, indices of entries, rising.
        """
        raise NotImplementedError
