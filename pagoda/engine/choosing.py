"""Chooser: from a step's logits to the next tokens, and to what each request is told of them.

logits ──┬── requests for no token      their prompt is computed: they end
         ├── beams                      note how each may go on; a search advances once all its beams have logits
         └── samples                    draw; a prompt just computed forks into its samples first
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from pagoda.engine.forking import Forker
from pagoda.engine.outputs import Delta, FinishReason, TokenLogprob
from pagoda.engine.request import Request, Sample
from pagoda.engine.scheduler import Scheduler
from pagoda.errors import ModelError
from pagoda.model.sampler import SampledToken, likeliest, sample


@dataclass(eq=False, slots=True)
class News:
    """What a step brought a request: its samples' new tokens, or a `failure`, which ends it; `is_over` ends it too."""

    request: Request
    deltas: dict[Sample, Delta] = field(default_factory=dict)
    failure: ModelError | None = None
    is_over: bool = False


class Chooser:
    """Chooses tokens and ends the samples that end with them.

    Args:
        forker, scheduler: the core's.
        eos_ids: tokens that end a sample.
    """

    def __init__(self, forker: Forker, scheduler: Scheduler, eos_ids: Collection[int]) -> None:
        self._forker = forker
        self._scheduler = scheduler
        self._eos_ids = eos_ids

    def choose(self, samples: Sequence[Sample], logits: torch.Tensor) -> list[News]:
        """Choose the next token of every sample, `logits` being theirs, row by row. Mutates samples and requests."""
        done = [row for row, each in enumerate(samples) if not each.request.max_tokens]
        searching = [row for row, each in enumerate(samples) if each.request.beams is not None]
        if not done and not searching:
            return self._draw(samples, logits)
        drawing = [row for row, each in enumerate(samples) if each.request.beams is None and row not in done]
        return [
            *(self._warmed(samples[row].request, logits[row]) for row in done),
            *self._search([samples[row] for row in searching], logits[searching]),
            *(self._draw([samples[row] for row in drawing], logits[drawing]) if drawing else ()),
        ]

    def _warmed(self, request: Request, logits: torch.Tensor) -> News:
        """A request that only wanted its prompt computed, and leased as it wished, is over."""
        [healthy] = likeliest(logits[None], 1)
        return News(request, failure=healthy if isinstance(healthy, ModelError) else None, is_over=True)

    def _search(self, beams: Sequence[Sample], logits: torch.Tensor) -> list[News]:
        """Note how beams may go on, and advance the searches that have this of all their beams."""
        rows_of: dict[Request, list[int]] = {}
        for row, beam in enumerate(beams):
            rows_of.setdefault(beam.request, []).append(row)
        news = []
        for request, rows in rows_of.items():
            num_shown = request.params.logprobs or 0
            found = likeliest(logits[rows], max(request.search.num_candidates, num_shown))
            for row, tokens in zip(rows, found, strict=True):
                if isinstance(tokens, ModelError):
                    news.append(News(request, failure=tokens))
                    break
                top = tuple(tokens[:num_shown])
                beams[row].continuations = [TokenLogprob(token, logprob, top) for token, logprob in tokens]
            else:
                if all(beam.is_ready for beam in request.samples):
                    self._forker.advance(request)
                    request.token_times.append(time.perf_counter())
                    if request.is_finished:
                        news.append(News(request))
        return news

    def _draw(self, samples: Sequence[Sample], logits: torch.Tensor) -> list[News]:
        """Draw the next tokens, forking the requests that just finished their prompt into their samples."""
        row_of: list[int] = []
        everyone: list[Sample] = []
        for row, first in enumerate(samples):
            everyone.append(first)
            row_of.append(row)
            if len(first.request.samples) < first.request.params.num_samples:
                forks = self._forker.spread(first)
                everyone += forks
                row_of += [row] * len(forks)
        rows = logits if len(row_of) == len(samples) else logits[row_of]
        chosen = sample(rows, [each.sampler for each in everyone])
        now = time.perf_counter()
        news: dict[Request, News] = {}
        for each, token in zip(everyone, chosen, strict=True):
            request = each.request
            of_request = news.get(request)
            if of_request is None:
                of_request = news[request] = News(request)
                request.token_times.append(now)
            if isinstance(token, SampledToken):
                of_request.deltas[each] = self._append(each, token)
            else:
                of_request.failure = token
        return list(news.values())

    def _append(self, each: Sample, token: SampledToken) -> Delta:
        """Add a token to a sample, and end the sample where it must."""
        params, token_id = each.request.params, token.token_id
        each.tokens.append(token_id)
        each.sampler.append(token_id)
        is_eos = token_id in self._eos_ids and not params.ignore_eos
        text, reason = "", None
        stop_reason: str | int | None = None
        if is_eos or token_id in params.stop_token_ids:
            reason = FinishReason.STOP
            stop_reason = None if is_eos else token_id
        else:
            text = each.text.push(token_id)
            if each.text.stopped_by is not None:
                reason, stop_reason = FinishReason.STOP, each.text.stopped_by
            elif each.num_output_tokens >= each.request.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            text += each.text.flush()
            self._scheduler.finish(each, reason)
        logprobs: tuple[TokenLogprob, ...] = ()
        if token.logprobs is not None:
            logprobs = (TokenLogprob(token_id, token.logprobs.chosen, token.logprobs.top),)
        return Delta(each.index, text, (token_id,), logprobs, reason, stop_reason)
