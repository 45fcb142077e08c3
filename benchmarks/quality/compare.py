"""Two rows of logits -> how far apart they are; many such -> figures with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
_ROWS = 64  # at a time: a row of a large vocabulary is a megabyte


@dataclass
class Compared:
    """Per predicted token: KL(full || variant) in nats, both negative log-likelihoods, same and right first choices."""

    kl: list[float] = field(default_factory=list)
    nll_full: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    right_full: list[bool] = field(default_factory=list)

    def add(self, full: torch.Tensor, other: torch.Tensor, tokens: Sequence[int]) -> None:
        """Compare float32 `[n, vocab_size]` logits before the same `n` tokens."""
        for first in range(0, len(tokens), _ROWS):
            rows = slice(first, first + _ROWS)
            p, q = full[rows].log_softmax(-1), other[rows].log_softmax(-1)
            target = torch.tensor(tokens[rows])[:, None]
            top_p, top_q = p.argmax(-1), q.argmax(-1)
            self.kl += (p.exp() * (p - q)).sum(-1).tolist()
            self.nll_full += (-p.gather(1, target)[:, 0]).tolist()
            self.nll += (-q.gather(1, target)[:, 0]).tolist()
            self.agrees += (top_p == top_q).tolist()
            self.right += (top_q == target[:, 0]).tolist()
            self.right_full += (top_p == target[:, 0]).tolist()

    @property
    def first_divergence(self) -> int | None:
        """Where the variant, having followed the full run so far, would have chosen another token."""
        return self.agrees.index(False) if False in self.agrees else None


@dataclass(frozen=True)
class Figure:
    """An estimate and its 95% bootstrap interval over `n` independent units."""

    value: float
    low: float
    high: float
    n: int

    def through(self, transform: Callable[[float], float]) -> Figure:
        """The same under a rising transformation."""
        return Figure(transform(self.value), transform(self.low), transform(self.high), self.n)


def mean_of(values: Sequence[Sequence[float]], *, rounds: int = 1000, seed: int = 0) -> Figure:
    """The mean of all values, with an interval from resampling whole units (Efron's bootstrap).

    Args:
        values: for each unit (a passage, a context with its questions) the values that belong together.
    """
    kept = [unit for unit in values if len(unit)]
    if not kept:
        return Figure(float("nan"), float("nan"), float("nan"), 0)
    sums = np.array([float(np.sum(unit)) for unit in kept])
    counts = np.array([len(unit) for unit in kept], dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(0, len(kept), size=(rounds, len(kept)))
    means: Floats = sums[chosen].sum(1) / counts[chosen].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Figure(float(sums.sum() / counts.sum()), float(low), float(high), len(kept))


def pieces(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Runs of `size` neighbours, the last perhaps shorter: units whose values are nearly independent."""
    return [values[first : first + size] for first in range(0, len(values), size)]
