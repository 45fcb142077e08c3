"""What the scheduler's side and the workers' sides tell each other, with each step of vLLM. Pickled by vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagoda.kv.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Ask:
    """Look these blocks of a request up, in this order, and start to load them.

    Attributes:
        recompute_s: seconds that computing all of them would take.
        patience_s: seconds that may be waited in vain.
    """

    request_id: str
    keys: Sequence[BlockKey]
    recompute_s: float
    patience_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Put what was asked for, from its block `first` on, into these blocks of vLLM's cache."""

    request_id: str
    first: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a block of vLLM's cache out, when this step is done, and write it to the tiers: high priorities first."""

    key: BlockKey
    block_id: int
    priority: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Let the tiers keep these blocks until a Unix time."""

    keys: Sequence[BlockKey]
    until: float


@dataclass(slots=True)
class Orders:
    """What the scheduler wants of the workers with one step.

    `num_tokens` is what the step computes, `started` when it was scheduled, by the scheduler's clock. `ended` are
    requests whose asks and loads are of no use any more; they come before the asks.
    """

    num_tokens: int = 0
    started: float = 0.0
    ended: list[str] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """How many leading blocks of an Ask there are, and the tier of each.

    `num_there` is how many leading blocks the tiers said they have. `num_slower` and `num_failed` are blocks that a
    tier has but that are not worth loading, or could not be read; `skipped` are tiers that were not asked, being out or
    slower than computing, or did not answer in time.
    """

    sources: tuple[str, ...]
    num_there: int = 0
    num_slower: int = 0
    num_failed: int = 0
    skipped: tuple[str, ...] = ()

    def both(self, other: Answer) -> Answer:
        """What two shards have in common."""
        fewer = min(self, other, key=lambda answer: len(answer.sources))
        return Answer(
            fewer.sources,
            min(self.num_there, other.num_there),
            max(self.num_slower, other.num_slower),
            max(self.num_failed, other.num_failed),
            tuple(dict.fromkeys(self.skipped + other.skipped)),
        )


Told = dict[str, tuple[int, Answer]]
"""By request: how many workers told it, and what they have in common."""


@dataclass(slots=True)
class Replies:
    """What became of orders. `answers` are to Asks; `loaded` to Loads, whose sources are the blocks now in place.

    `step` is the last step that computed anything, as it was ordered: when it started, and how many tokens. vLLM does
    not bring every step's output here.
    """

    answers: Told = field(default_factory=dict)
    loaded: Told = field(default_factory=dict)
    step: tuple[float, int] | None = None

    def aggregate(self, other: Replies) -> Replies:
        """The replies of several workers as one; vLLM calls this."""
        step = self.step or other.step
        return Replies(together(self.answers, other.answers), together(self.loaded, other.loaded), step)

    def __bool__(self) -> bool:
        return bool(self.answers or self.loaded or self.step)


def together(some: Told, others: Told) -> Told:
    """What both told."""
    both = dict(some)
    for name, (count, answer) in others.items():
        if name in both:
            count, answer = both[name][0] + count, both[name][1].both(answer)
        both[name] = count, answer
    return both
