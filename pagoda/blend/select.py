"""Which rows to compute anew: those whose keys and values differ most from the passage's own, at layer 1.

    deviation of a row    (|k' - k|^2 / mean |k|^2  +  |v' - v|^2 / mean |v|^2) / 2     k, v computed; k', v' reused
    chosen                the `ratio` of the rows that deviate most
    left                  the mean over all rows of the deviation of those not chosen

`left` is what the guard looks at. Above `max_deviation` more rows are chosen until it is met, and if that takes
more than half of them, all are: blending would save little, and this text does not take to it.

Layer 0's keys and values depend on the token alone, so layer 1 is the first that shows what came before. Rows that
deviate most there do so in later layers too (CacheBlend, arXiv:2405.16444, section 4.3), so one choice serves them all:
choosing at layer 2, 3 or 6 instead, by values or keys alone, or the first tokens of every passage in any case, came no
nearer to computing everything (benchmarks/NOTES.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CHECK_LAYER = 1
_MOST_TO_BLEND = 0.5


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows to compute anew.

    Attributes:
        chosen: bool `[rows]`.
        left: the deviation that stays.
        is_raised: whether the guard chose more than was asked for.
        is_whole: whether it chose all.
    """

    chosen: torch.Tensor
    left: float
    is_raised: bool
    is_whole: bool


def deviations(reused: tuple[torch.Tensor, torch.Tensor], computed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """How far reused keys and values, each `[rows, num_kv_heads, head_dim]`, are from computed ones: float32 `[rows]`.

    Keys and values count alike, whatever their scales.
    """
    parts = []
    for old, new in zip(reused, computed, strict=True):
        old, new = old.float().flatten(1), new.float().flatten(1)
        scale = new.square().sum(1).mean().clamp_min(torch.finfo(torch.float32).tiny)
        parts.append((old - new).square().sum(1) / scale)
    return (parts[0] + parts[1]) / 2


def choose(deviation: torch.Tensor, ratio: float, max_deviation: float) -> Choice:
    """The rows to compute anew, at least `ratio` of them, so that no more than `max_deviation` is left.

    What is not finite is chosen first: it can only come from a passage that is broken.
    """
    rows = len(deviation)
    ranked, order = deviation.nan_to_num(math.inf, math.inf).sort(descending=True, stable=True)
    # after[n] is what is left when the first n are chosen
    after = torch.zeros(rows + 1, dtype=torch.float64)
    after[:rows] = ranked.double().flip(0).cumsum(0).flip(0).cpu() / max(1, rows)
    asked = math.ceil(ratio * rows)
    enough = int((after > max_deviation).sum())
    count = max(asked, enough)
    if count > asked and count > _MOST_TO_BLEND * rows:
        count = rows
    chosen = torch.zeros(rows, dtype=torch.bool, device=deviation.device)
    chosen[order[:count]] = True
    return Choice(chosen, float(after[count]), count > asked, count == rows and asked < rows)
