"""InfiniGen: each layer's tokens are foretold one layer ahead and fetched from host memory; nothing is lost.

Lee et al., OSDI 2024, arXiv:2406.19707. The residual stream changes little from one layer to the next, so the next
layer's queries can be made of this layer's input. Against part of each key, skewed so that the part carries most of a
score, they say which tokens the next layer will look at: those that score within `alpha` of the best. While this layer
computes, those are on their way.

Unlike in the paper, each KV head has a choice of its own, and tokens stay in their places until better ones come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from pagoda.sparse.host import RecallMemory
from pagoda.sparse.recall import Sketch
from pagoda.sparse.recalling import Recalling
from pagoda.sparse.skew import Asked, Skew


@dataclass(frozen=True, slots=True)
class InfiniGen(Recalling):
    """What scores best is fetched, with `alpha` only what is so near the best; a `part` of each key stays.

    The paper's `alpha` is 4 or 5 and its `part` 0.3. Here what was fetched stays until better comes, so that little
    crosses without a threshold, and quality is far better (docs/sparse.md).
    """

    name: ClassVar[str] = "infinigen"
    looks_ahead: ClassVar[bool] = True
    fractions: ClassVar[frozenset[str]] = frozenset(("alpha", "part"))
    alpha: float | None = None
    part: float = 0.5

    def __post_init__(self) -> None:
        self.check(self.alpha is None or self.alpha >= 0, "alpha", "must be 0 or more")
        self.check(0 < self.part <= 1, "part", "must be above 0 and at most 1")
        Recalling.__post_init__(self)

    def sketch(self, head_dim: int, recall: RecallMemory) -> Sketch:
        """See Recalling."""
        alpha = math.inf if self.alpha is None else float(self.alpha)
        return PartialKeys(recall.asked(), max(1, round(self.part * head_dim)), alpha)


class PartialKeys:
    """The first columns of skewed keys, one sketch a token.

    A layer's first keys, which are those of a prompt, say how it is skewed from then on.
    """

    unit = 1

    def __init__(self, asked: Asked, width: int, alpha: float) -> None:
        self.width, self.alpha = width, alpha
        self._asked = asked
        self._skews: dict[int, Skew] = {}

    def of_keys(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """See Sketch."""
        if layer not in self._skews:
            self._skews[layer] = Skew.of(self._asked.squares[layer], keys, self.width)
        return keys.float() @ self._skews[layer].keys

    def columns(self, layer: int) -> torch.Tensor:
        """See Sketch."""
        return self._skews[layer].queries
