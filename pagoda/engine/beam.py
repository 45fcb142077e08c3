"""BeamState: which hypotheses of a beam search live, end and win. Numbers only: no cache, no tensors.

    candidates of all beams, best first   c0  c1  c2  c3  c4 ...      (score = sum of log-probabilities)
      end token, among the first `width`  ──> finished, ranked by score / length ** length_penalty; `width` are kept
      the first `width` that go on        ──> the beams of the next step

The rules are those of Transformers' `num_beams`, whose results they give: enough candidates are looked at that
`width` of them go on whatever ends, and the search is over when no beam can beat the worst finished one
(`early_stopping=False`: at its present length; "never": at any length; True: as soon as `width` are finished).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.engine.outputs import TokenLogprob
from pagoda.engine.params import BeamSearch


@dataclass(frozen=True, slots=True)
class Beam:
    """A hypothesis: its new tokens with their log-probabilities, and the sum of these."""

    tokens: tuple[TokenLogprob, ...] = ()
    logprob: float = 0.0

    def extended(self, token: TokenLogprob) -> Beam:
        """This hypothesis with one token more."""
        return Beam((*self.tokens, token), self.logprob + token.logprob)


@dataclass(frozen=True, slots=True)
class Finished:
    """A hypothesis that ended, at an end token or, if not `stopped`, at the last position."""

    beam: Beam
    score: float
    stopped: bool


class BeamState:
    """The search of one request.

    Args:
        search: its settings.
        end_ids: tokens that end a hypothesis.
        max_tokens: most tokens of a hypothesis.

    Attributes:
        beams: the live hypotheses, best first: one empty one at first.
        finished: the best that ended, best first, at most `width`.
        is_done: whether nothing can improve on `finished`.
    """

    def __init__(self, search: BeamSearch, end_ids: frozenset[int], max_tokens: int) -> None:
        self._search = search
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self.num_candidates = max(2, 1 + len(end_ids)) * search.width
        self.beams = [Beam()]
        self.finished: list[Finished] = []
        self.is_done = False

    def advance(self, continuations: Sequence[Sequence[TokenLogprob]]) -> list[int]:
        """Choose the next step's beams. Mutates this state.

        Args:
            continuations: each beam's likeliest next tokens, at least `num_candidates` or all.

        Returns:
            For each new beam the number of the old one that it continues.
        """
        width, length = self._search.width, len(self.beams[0].tokens) + 1
        candidates = sorted(
            (
                (beam.logprob + token.logprob, parent, token)
                for parent, (beam, tokens) in enumerate(zip(self.beams, continuations, strict=True))
                for token in tokens
            ),
            key=lambda candidate: -candidate[0],
        )[: self.num_candidates]
        parents: list[int] = []
        beams: list[Beam] = []
        for rank, (logprob, parent, token) in enumerate(candidates):
            stopped = token.token_id in self._end_ids
            if stopped or length >= self._max_tokens:
                if rank < width:
                    ended = self.beams[parent].extended(token)
                    self.finished.append(Finished(ended, logprob / length**self._search.length_penalty, stopped))
            elif len(beams) < width:
                parents.append(parent)
                beams.append(self.beams[parent].extended(token))
        self.finished = sorted(self.finished, key=lambda each: -each.score)[:width]
        self.beams = beams
        self.is_done = not beams or not self._can_improve(length)
        return parents

    def _can_improve(self, length: int) -> bool:
        search = self._search
        if len(self.finished) < search.width:
            return True
        if search.early_stopping is True:
            return False
        longest = search.early_stopping == "never" and search.length_penalty > 0
        best: float = self.beams[0].logprob / (self._max_tokens if longest else length) ** search.length_penalty
        return best > self.finished[-1].score
