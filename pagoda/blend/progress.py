"""BlendProgress: how far a request with passages is, and where the KV of its prompt came from.

A step's budget is the rows that it may compute. Most rows of passages stop after two layers, so they are charged what
part of the layers they are expected to pass, and a step takes more of them: as many as cost what others' rows would.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pagoda.blend.segments import BlendSpec
from pagoda.blend.select import CHECK_LAYER, Choice

_BLENDED, _RECOMPUTED = 1, 2
_ROUNDING = 1e-6
_NEVER = 1 << 62  # more tokens than any sequence has
_LEAST_CHARGE = 1 / 8  # all rows of a step are in memory at once, however few go on


def row_charge(ratio: float, num_layers: int) -> float:
    """What a passage's row is charged where others' are charged 1."""
    share = (CHECK_LAYER + ratio * (num_layers - CHECK_LAYER)) / num_layers
    return min(1.0, max(_LEAST_CHARGE, share))


class BlendProgress:
    """A BlendSpec at work on one prompt of `num_tokens` tokens. What is computed again is noted again.

    `charge` is what a passage's row takes of a step's budget.

    Attributes:
        first: where the first passage starts: from there on the KV is the request's own.
        num_raised, num_whole: how often the guard had more, or all, computed than was asked for; a chunk of the
            prompt counts once, and a prompt that is given up once more.
        num_given_up: tokens that were computed for a blend that was abandoned, and are computed again.
    """

    def __init__(self, spec: BlendSpec, num_tokens: int, charge: float = 1.0) -> None:
        self.spec = spec
        self.first = spec.spans[0].start
        self.num_raised = 0
        self.num_whole = 0
        self.num_given_up = 0
        self._left = 0.0
        self._num_found = 0
        self._sources: npt.NDArray[np.uint8] = np.zeros(num_tokens, dtype=np.uint8)
        self._least_charge = charge
        charges = np.ones(num_tokens)
        for span in spec.spans:
            charges[span.start : span.stop] = charge
        self._charged = np.concatenate(([0.0], charges.cumsum()))  # of all tokens before each position

    def abandon(self, num_hit_tokens: int) -> None:
        """Nothing of the prompt is blended any more: it is computed from where its exact KV ends.

        Args:
            num_hit_tokens: of the prompt, which nobody computed.
        """
        own = self._sources.size - max(self.first, num_hit_tokens)
        self.num_given_up += max(0, own - self.num_blended)
        self.first = _NEVER
        self.num_raised += 1
        self.num_whole += 1
        self._sources[:] = 0
        self._least_charge = 1.0
        self._charged = np.arange(self._sources.size + 1, dtype=np.float64)

    def chunk(self, position: int, budget: int) -> int:
        """How many of the next tokens go into a step with room for `budget` rows, at least 1; maybe more than exist.

        What precedes the first passage is exact and for all to share: no step holds some of it and some that is not.
        """
        if position < self.first:
            return min(budget, self.first - position)
        if position >= self._sources.size:
            return budget
        most = self._charged[position] + budget + _ROUNDING
        beyond = max(0, int(most - self._charged[-1]))  # of the output, to which a preempted request comes back
        return int(self._charged.searchsorted(most, side="right")) - 1 - position + beyond

    def longest(self, budget: int) -> int:
        """The most tokens that a step of `budget` rows may have of it."""
        return math.ceil(budget / self._least_charge)

    def charge(self, position: int, num_tokens: int) -> int:
        """What so many tokens from `position` on take of a step's budget."""
        end = min(position + num_tokens, self._sources.size)
        start = min(position, end)
        charged = float(self._charged[end] - self._charged[start])
        return math.ceil(charged - _ROUNDING) + num_tokens - (end - start)

    def note(self, positions: npt.NDArray[np.int64], choice: Choice) -> None:
        """Tokens of passages were found, and some of them chosen to be computed anew."""
        chosen = choice.chosen.cpu().numpy()
        self._sources[positions] = np.where(chosen, _RECOMPUTED, _BLENDED)
        self.num_raised += choice.is_raised
        self.num_whole += choice.is_whole
        self._left += choice.left * positions.size
        self._num_found += positions.size

    @property
    def deviation(self) -> float:
        """The deviation that stays, as a mean over all tokens that were found; 0 if none were."""
        return self._left / self._num_found if self._num_found else 0.0

    @property
    def num_blended(self) -> int:
        """Tokens whose KV is a passage's own."""
        return int(np.count_nonzero(self._sources == _BLENDED))

    @property
    def num_recomputed(self) -> int:
        """Tokens whose KV was found, and computed anew."""
        return int(np.count_nonzero(self._sources == _RECOMPUTED))
