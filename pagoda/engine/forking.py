"""Forker: several continuations of one prompt on the same blocks, copied only where they part.

    prompt computed ──spread──> n samples            a block is copied when one of them writes to it
    beams have logits ─advance─> the next beams      a beam with two heirs forks; one without frees its blocks at once
    live request ────branch───> another request      that goes on from its tokens so far

What is ranked at the end is told at the end: `winners` are the deltas of a finished request's best.
"""

from __future__ import annotations

from dataclasses import replace

from pagoda.engine.outputs import Completion, Delta, FinishReason
from pagoda.engine.request import Request, Sample, TokenBuffer
from pagoda.engine.scheduler import Scheduler
from pagoda.engine.text import OutputText
from pagoda.kv.cache import KVCache
from pagoda.model.sampler import SamplerState
from pagoda.model.tokenizer import TextStream, Tokenizer


class Forker:
    """Makes samples, and forks them.

    Args:
        cache, scheduler: the core's.
        tokenizer: turns tokens into text.
        vocab_size: width of the logits.
    """

    def __init__(self, cache: KVCache, scheduler: Scheduler, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def sample(self, request: Request, index: int, tokens: TokenBuffer) -> Sample:
        """A sample of a request, with a sampler and a text of its own."""
        params = request.params
        if params.is_ranked and params.logprobs is None:
            params = replace(params, logprobs=0)
        prompt = request.prompt.tolist() if params.repetition_penalty != 1.0 else ()  # only that penalty reads it
        sampler = SamplerState(params, self._vocab_size, prompt, index=index)
        held = Completion(index) if params.is_ranked else None
        sparse = request.sparse if index == 0 else None
        return Sample(request, index, tokens, sampler, self._text(request), held=held, sparse=sparse)

    def _text(self, request: Request) -> OutputText:
        params = request.params
        stream = TextStream(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            continues_text=params.continues_text,
        )
        return OutputText(stream, params.stop)

    def spread(self, first: Sample) -> list[Sample]:
        """The other samples of a request whose prompt is computed; they run at once."""
        request = first.request
        others = [self.sample(request, index, first.tokens.fork()) for index in range(1, request.params.num_samples)]
        for other in others:
            if first.sparse is not None:
                other.sparse = first.sparse.fork(first.running_lease)
            self._run_beside(first, other)
        request.samples += others
        return others

    def _run_beside(self, source: Sample, twin: Sample) -> None:
        twin.lease = self._cache.fork(source.running_lease)
        self._scheduler.start(twin)

    def branch(self, source: Sample, request: Request) -> None:
        """Let a new request go on from a sample's tokens: on its blocks, if it has computed its prompt."""
        twin = self.sample(request, 0, source.tokens.fork())
        request.samples.append(twin)
        if source.lease is None or source.num_uncomputed > 1:
            self._scheduler.add(twin)  # it will find what there is of the prefix, or wait for it, as any request does
        else:
            self._run_beside(source, twin)

    def advance(self, request: Request) -> None:
        """Take a beam search one token further. All its beams must be ready."""
        state = request.search
        old = request.samples
        parents = state.advance([beam.continuations for beam in old])
        if state.is_done:
            for beam in old:
                self._scheduler.finish(beam, FinishReason.STOP)
            return
        new: list[Sample] = []
        for rank, parent in enumerate(parents):
            is_last_heir = parent not in parents[rank + 1 :]
            new.append(old[parent] if is_last_heir else self._fork_beam(old[parent]))
        for beam in old:
            if beam not in new:
                self._scheduler.discard(beam)
        for beam, hypothesis in zip(new, state.beams, strict=True):
            beam.tokens.append(hypothesis.tokens[-1].token_id)
        request.samples = new

    def _fork_beam(self, beam: Sample) -> Sample:
        # Neither a sampler nor a text has a part in a search: they can be shared.
        request = beam.request
        request.num_forks += 1
        twin = Sample(request, request.num_forks, beam.tokens.fork(), beam.sampler, beam.text)
        self._run_beside(beam, twin)
        return twin

    def winners(self, request: Request) -> list[Delta]:
        """The whole samples that a finished, ranked request returns, best first."""
        if request.beams is None:
            return _best(request)
        if any(beam.finish_reason is FinishReason.ABORT for beam in request.samples):
            return [Delta(index, "", (), finish_reason=FinishReason.ABORT) for index in range(request.params.n)]
        deltas = []
        for index, ended in enumerate(request.search.finished[: request.params.n]):
            tokens = ended.beam.tokens
            text = self._text(request)
            shown = [text.push(token.token_id) for token in (tokens[:-1] if ended.stopped else tokens)]
            last = tokens[-1].token_id
            deltas.append(
                Delta(
                    index,
                    "".join(shown) + text.flush(),
                    tuple(token.token_id for token in tokens),
                    tokens if request.params.logprobs is not None else (),
                    FinishReason.STOP if ended.stopped else FinishReason.LENGTH,
                    last if ended.stopped and last in request.params.stop_token_ids else None,
                    ended.score,
                )
            )
        return deltas


def _best(request: Request) -> list[Delta]:
    completions = [sample.held for sample in request.samples if sample.held is not None]
    ranked = sorted(completions, key=_mean_logprob, reverse=True)
    return [
        Delta(
            index,
            each.text,
            tuple(each.token_ids),
            tuple(each.logprobs) if request.params.logprobs is not None else (),
            each.finish_reason,
            each.stop_reason,
            _mean_logprob(each),
        )
        for index, each in enumerate(ranked[: request.params.n])
    ]


def _mean_logprob(completion: Completion) -> float:
    logprobs = [token.logprob for token in completion.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -float("inf")
