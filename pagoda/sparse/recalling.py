"""Recalling: what the policies that lose nothing have in common, which is all but the sketch they choose by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pagoda.errors import InvalidRequest
from pagoda.kv.cache import KVCache
from pagoda.sparse.base import Demand
from pagoda.sparse.host import RecallMemory
from pagoda.sparse.recall import Sketch
from pagoda.sparse.recall_sequence import RecallingSequence
from pagoda.sparse.settings import Settings
from pagoda.sparse.store import SparseMemory

_INTERVAL = 16  # tokens decoded between two times that recent tokens are settled


@dataclass(frozen=True, slots=True)
class Recalling(Settings):
    """Settings of every recalling policy. The budget is places for what is fetched, and recent tokens.

    Attributes:
        recent: the last tokens that always stay.

    Raises:
        InvalidRequest: a setting is out of range, or the budget leaves no place.
    """

    bounds_prefill: ClassVar[bool] = False
    only_copies: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False
    recent: int = 16

    def __post_init__(self) -> None:
        self.check(self.recent >= 1, "recent", "must be at least 1")
        if isinstance(self.budget, int):
            least = self.recent + _INTERVAL + 2 * self.unit - 1
            self.check(self.budget >= least, "budget", f"must be at least {least} tokens here")

    @property
    def unit(self) -> int:
        """Tokens that are fetched together."""
        return 1

    @property
    def num_places(self) -> int:
        """Entries for what is fetched: the budget, less the most tokens that are recent or not settled yet."""
        most = self.recent + self.unit - 1 + _INTERVAL
        return (self.num_tokens - most) // self.unit * self.unit

    def sketch(self, head_dim: int, recall: RecallMemory) -> Sketch:
        """How tokens that are not on the device are scored."""
        raise NotImplementedError

    # -- for the engine ----------------------------------------------------------------------------------------------

    def demand(self, num_prompt: int, num_total: int, *, exact: bool) -> Demand:
        """See SparsePolicy."""
        return Demand(max(num_prompt, min(num_total, self.num_tokens)), min(num_total, self.num_tokens), num_total)

    def open(
        self, num_prompt: int, num_total: int, cache: KVCache, memory: SparseMemory, *, exact: bool
    ) -> RecallingSequence | None:
        """See SparsePolicy.

        Raises:
            InvalidRequest: host memory can never hold so many tokens.
        """
        if num_total <= self.num_tokens:
            return None
        recall = memory.recall
        if recall is None:
            message = f"{self.name} needs host memory, and this engine has none: `host_memory` gives it some"
            raise InvalidRequest(message, param="kv_policy")
        if num_total > recall.host.num_tokens:
            message = (
                f"{self.name} keeps {num_total} tokens in host memory, which holds {recall.host.num_tokens}: "
                "`--host-memory` (in Python `host_memory`) sets how much it is"
            )
            raise InvalidRequest(message, param="kv_policy")
        return RecallingSequence(
            self.name,
            self.sketch(memory.views[0].keys.shape[3], recall),
            num_prompt=num_prompt,
            num_total=num_total,
            budget=self.num_tokens,
            recent=self.recent,
            places=self.num_places,
            ahead=self.looks_ahead,
            cache=cache,
            memory=memory,
            recall=recall,
        )
