"""BlendProgress: how far a request with passages is, and where the KV of its prompt came from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagoda.blend.segments import BlendSpec
from pagoda.blend.select import Choice

_BLENDED, _RECOMPUTED = 1, 2


class BlendProgress:
    """A BlendSpec at work on one prompt of `num_tokens` tokens. What is computed again is noted again.

    Attributes:
        first: where the first passage starts: from there on the KV is the request's own.
        num_raised, num_whole: how often the guard had more, or all, computed than was asked for; a chunk of the
            prompt counts once.
    """

    def __init__(self, spec: BlendSpec, num_tokens: int) -> None:
        self.spec = spec
        self.first = spec.spans[0].start
        self.num_raised = 0
        self.num_whole = 0
        self._sources: npt.NDArray[np.uint8] = np.zeros(num_tokens, dtype=np.uint8)

    def chunk(self, position: int, num_tokens: int) -> int:
        """How many of the next tokens, at most `num_tokens`, go into one step.

        What precedes the first passage is exact and for all to share: no step holds some of it and some that is not.
        """
        return min(num_tokens, self.first - position) if position < self.first else num_tokens

    def note(self, positions: npt.NDArray[np.int64], choice: Choice) -> None:
        """Tokens of passages were found, and some of them chosen to be computed anew."""
        chosen = choice.chosen.cpu().numpy()
        self._sources[positions] = np.where(chosen, _RECOMPUTED, _BLENDED)
        self.num_raised += choice.is_raised
        self.num_whole += choice.is_whole

    @property
    def num_blended(self) -> int:
        """Tokens whose KV is a passage's own."""
        return int(np.count_nonzero(self._sources == _BLENDED))

    @property
    def num_recomputed(self) -> int:
        """Tokens whose KV was found, and computed anew."""
        return int(np.count_nonzero(self._sources == _RECOMPUTED))
