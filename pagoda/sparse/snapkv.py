"""SnapKV (Li et al., arXiv:2404.14469): a prompt compressed by what its last tokens, usually the question, look at.

    prompt   | ........... document ............ | observation window |
    votes    attention of the window's tokens, smoothed over neighbours so that no kept token stands alone
    kept       the budget's worth of votes         all of the window

The prompt is compressed once. What is generated is all kept, so a request's memory is the budget and its output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from pagoda.sparse.dropping import Dropping


@dataclass(frozen=True, slots=True)
class SnapKV(Dropping):
    """The last `window` tokens of the prompt, and the others by votes, averaged over `kernel` neighbours."""

    name: ClassVar[str] = "snapkv"
    bounds_prefill: ClassVar[bool] = False  # the window looks at all of the prompt
    compresses_output: ClassVar[bool] = False
    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        self.check(self.interval is None, "interval", "has no meaning: only the prompt is compressed")
        self.check(self.window >= 1, "window", "must be at least 1")
        self.check(1 <= self.kernel <= 255 and self.kernel % 2 == 1, "kernel", "must be odd, up to 255")
        Dropping.__post_init__(self)

    @property
    def least_budget(self) -> int:
        """The window and one more."""
        return self.window + 1

    def observed(self, num_prompt: int) -> range:
        """The window, which a prefix hit must leave to be computed."""
        return range(max(0, num_prompt - self.window), num_prompt)

    def select(self, positions: torch.Tensor, mass: torch.Tensor, count: int) -> torch.Tensor:
        """The window's entries first, then by smoothed votes; among equals the earlier."""
        votes = F.avg_pool1d(mass[:, None], self.kernel, stride=1, padding=self.kernel // 2)[:, 0]
        votes[:, votes.shape[1] - self.window :] = torch.inf
        return votes.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
