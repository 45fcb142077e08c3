"""BlendSpec: which parts of a prompt may be reused wherever they stand, and how much of them is computed anew."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvalidRequest
from pagoda.kinds import is_integer, is_number

DEFAULT_RATIO = 0.15
# Ordinary text leaves 0.001 to 0.004 at a ratio of 0.15, and 0.006 to 0.015 at 0 (docs/blend.md).
DEFAULT_MAX_DEVIATION = 0.003
# A tenth of the questions of benchmarks/blend begin less surely, and most of those that blending gets wrong.
DEFAULT_MIN_CONFIDENCE = 0.2


# The first token of a sequence draws much attention, and its keys and values are unlike all others'. Were a passage
# computed from its own first token on, every passage would bring such a token into the middle of the prompt.
ANCHOR_TOKENS = 1


class Span(NamedTuple):
    """Tokens `start` to `stop`, exclusive, of a prompt: one passage."""

    start: int
    stop: int

    @property
    def num_anchor_tokens(self) -> int:
        """How many tokens of the prompt's beginning precede the passage where it is computed alone."""
        return min(ANCHOR_TOKENS, self.start)

    def alone(self, prompt: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """What is computed for the passage alone, and found by its tokens: the prompt's first, and the passage."""
        return np.concatenate((prompt[: self.num_anchor_tokens], prompt[self.start : self.stop]))


@dataclass(frozen=True, slots=True)
class BlendSpec:
    """The passages of a prompt, in order, none overlapping another; empty ones are dropped.

    `ratio` of the tokens that are found is computed anew: 0 reuses all as they are, 1 computes all. `max_deviation`
    bounds what may be left wrong: see `pagoda.blend.select`. Below `min_confidence`, a probability of the answer's
    likeliest first token, the prompt is computed whole; 0 has it never. If it `is_default`, the request did not ask for
    it: where passages cannot be reused, they are then not.

    Raises:
        InvalidRequest: a number is out of range or of another type, or passages overlap.
    """

    spans: tuple[Span, ...]
    ratio: float = DEFAULT_RATIO
    max_deviation: float = DEFAULT_MAX_DEVIATION
    min_confidence: float = DEFAULT_MIN_CONFIDENCE
    is_default: bool = False

    def __post_init__(self) -> None:
        for name, value in (("ratio", self.ratio), ("min_confidence", self.min_confidence)):
            if not is_number(value) or not 0 <= value <= 1:
                raise InvalidRequest(f"blend.{name} must be between 0 and 1, got {value!r}", param=f"blend.{name}")
        if not is_number(self.max_deviation) or not self.max_deviation >= 0:
            message = f"blend.max_deviation must be 0 or more, got {self.max_deviation!r}"
            raise InvalidRequest(message, param="blend.max_deviation")
        if not all(isinstance(span, Span) and is_integer(span.start) and is_integer(span.stop) for span in self.spans):
            raise InvalidRequest(f"passages are Spans of token positions, got {self.spans!r}", param="blend")
        if any(span.start < 0 or span.stop < span.start for span in self.spans):
            raise InvalidRequest("a passage must end where it begins, or after that", param="blend")
        if any(one.stop > other.start for one, other in pairwise(self.spans)):
            raise InvalidRequest("passages must be in order and must not overlap", param="blend")
        object.__setattr__(self, "spans", tuple(span for span in self.spans if span.stop > span.start))
