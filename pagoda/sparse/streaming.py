"""StreamingLLM (Xiao et al., arXiv:2309.17453): the first few tokens, and a window of the last.

    tokens      0 1 2 3 . . . . . . . . . . 91 92 93 94 95
                 sinks     gone             window
    positions   87 88 89 90                 91 92 93 94 95     the sinks stand right before the window

Models pay what attention they have left to the first tokens, whatever these say; without them the output falls apart.
Rotary positions are positions in the cache, not in the text, so a text may be of any length: here the sinks, which are
few, move along with the window, and all of it moves back at once when the model's positions run out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from pagoda.errors import InvalidRequest
from pagoda.sparse.choosing import MOST_TOKENS
from pagoda.sparse.dropping import Dropping

_SINKS = 4


@dataclass(frozen=True, slots=True)
class Streaming(Dropping):
    """`sinks` first tokens, and the last `budget - sinks`.

    A request may give the `window` instead of the budget.
    """

    name: ClassVar[str] = "streaming"
    packs_positions: ClassVar[bool] = True
    only_copies: ClassVar[bool] = False
    sinks: int = _SINKS

    def __post_init__(self) -> None:
        self.check(self.sinks >= 0, "sinks", "must be 0 or more")
        Dropping.__post_init__(self)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Self:
        """See SparsePolicy."""
        given = dict(given)
        if "window" in given:
            window = given.pop("window")
            if "budget" in given:
                raise InvalidRequest("streaming: give budget or window, not both", param="kv_policy")
            sinks = given.get("sinks", _SINKS)
            if type(window) is not int or type(sinks) is not int:
                raise InvalidRequest("streaming: window and sinks are numbers of tokens", param="kv_policy")
            if not 1 <= window <= MOST_TOKENS - sinks:  # said of the window, as it was given and not the budget
                message = f"streaming: window must be between 1 and {MOST_TOKENS - sinks}, got {window}"
                raise InvalidRequest(message, param="kv_policy")
            given["budget"] = window + sinks
        return super(Streaming, cls).from_fields(given)

    @property
    def least_budget(self) -> int:
        """The sinks and one more."""
        return self.sinks + 1

    @property
    def num_packed(self) -> int:
        """The sinks."""
        return self.sinks

    def select(self, positions: torch.Tensor, mass: torch.Tensor, count: int) -> torch.Tensor:
        """The first `sinks` entries and the last ones."""
        num_heads, n = positions.shape
        first = min(self.sinks, count)
        chosen = torch.cat((torch.arange(first), torch.arange(n - (count - first), n)))
        return chosen.expand(num_heads, -1)
