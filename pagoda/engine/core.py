"""EngineCore: requests in, outputs out, one step at a time. Synchronous, on one thread, without I/O.

add ──> Scheduler.schedule ──> Runner.execute ──> sample ──> KVCache.advance ──> outputs
              ^                                                   │
              └───────────────── next step <──────────────────────┘
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from pagoda.engine.config import EngineConfig
from pagoda.engine.outputs import (
    Delta,
    EngineObserver,
    FinishReason,
    LeaseOutcome,
    RequestOutput,
    RequestStats,
    StepStats,
    TokenLogprob,
)
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.engine.request import Request, Sample, TokenBuffer
from pagoda.engine.runner import Runner
from pagoda.engine.scheduler import Rows, Scheduler
from pagoda.engine.text import OutputText
from pagoda.errors import ContextTooLong, InvalidRequest, LeaseRefused
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.lease import TierUse
from pagoda.kv.observe import Explanation
from pagoda.kv.radix_node import as_tokens
from pagoda.model.sampler import SampledToken, SamplerState, sample
from pagoda.model.tokenizer import TextStream, Tokenizer

_RESTORE_WAIT_S = 0.002
_MIN_TOKENS_TO_TIME = 64
_MAX_EXPLANATIONS = 1024


class EngineCore:
    """Continuous batching over a paged, prefix-shared KV cache.

    Args:
        runner: computes the steps.
        cache: where the KV is.
        tokenizer: turns tokens into text.
        vocab_size: width of the logits.
        eos_ids: tokens that end a sample.
        max_model_len: most tokens of a prompt and its output.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_ids: Iterable[int],
        max_model_len: int,
    ) -> None:
        self.cache = cache
        self.max_model_len = max_model_len
        self.observers: list[EngineObserver] = []
        self.explanations: OrderedDict[str, tuple[str, Explanation]] = OrderedDict()  # of the last requests
        self._runner = runner
        self._tokenizer = tokenizer
        self._config = config
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._scheduler = Scheduler(cache, config)
        # Whatever is leased, the longest request must still be able to run.
        room = cache.num_blocks - cache.peak_blocks(max_model_len, config.token_budget)
        cache.retention.limit_blocks = max(0, min(int(config.lease_share * cache.num_blocks), room))
        self._requests: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Samples that hold KV."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Samples in the queue."""
        return len(self._scheduler.waiting)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        scope: Scope = Scope(),
        priority: int = 0,
        leases: Sequence[LeaseSpec] = (),
        tier_use: TierUse = TierUse(),
    ) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: an empty prompt, a token outside the vocabulary, a lease beyond the prompt, or an id that is
                in use.
            ContextTooLong: prompt and output can never fit; the message has the numbers.
        """
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        tokens = as_tokens(prompt)
        if not tokens.size:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise InvalidRequest(f"prompt token ids must be in [0, {self._vocab_size})", param="prompt")
        if any(spec.num_tokens > tokens.size for spec in leases):
            raise InvalidRequest(f"a lease ends after the prompt of {tokens.size} tokens", param="leases")
        max_tokens = self._max_tokens(int(tokens.size), params)
        request = Request(request_id, tokens, params, scope, priority, max_tokens)
        request.tier_use = tier_use
        request.leases = tuple(sorted(leases, key=lambda spec: spec.num_tokens))
        request.samples.append(self._new_sample(request, 0, TokenBuffer(tokens.copy())))
        self._requests[request_id] = request
        self._scheduler.add(request.samples[0])

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        wanted = params.max_tokens if params.max_tokens is not None else max(1, self.max_model_len - prompt_len)
        total = prompt_len + wanted
        if total > self.max_model_len:
            raise ContextTooLong(
                f"this model's context is {self.max_model_len} tokens; the prompt has {prompt_len} "
                f"and max_tokens asks for {wanted} more: {total}",
                param="prompt" if prompt_len >= self.max_model_len else "max_tokens",
            )
        needed = self.cache.peak_blocks(total, self._config.token_budget)
        if needed > self.cache.num_blocks:
            raise ContextTooLong(
                f"{prompt_len} prompt tokens and {wanted} more need {needed} KV blocks; "
                f"the pool has {self.cache.num_blocks}",
                param="prompt",
            )
        return wanted

    def _new_sample(self, request: Request, index: int, tokens: TokenBuffer) -> Sample:
        params = request.params
        stream = TextStream(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
        prompt = request.prompt.tolist() if params.repetition_penalty != 1.0 else ()  # only that penalty reads it
        sampler = SamplerState(params, self._vocab_size, prompt, index=index)
        return Sample(request, index, tokens, sampler, OutputText(stream, params.stop))

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now and let go of its blocks; nothing if it is not there any more."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        return [self._end(request, FinishReason.ABORT)]

    def _end(self, request: Request, reason: FinishReason) -> RequestOutput:
        deltas = []
        for live in [each for each in request.samples if each.finish_reason is None]:
            self._finish(live, reason)
            deltas.append(Delta(live.index, live.text.flush(), (), finish_reason=reason))
        return self._output(request, deltas)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what is new."""
        started = time.perf_counter()
        self.cache.retention.expire()
        before = self._scheduler.num_preempted, self.cache.stats.num_evicted_blocks
        self.cache.poll()
        plan = self._scheduler.schedule()
        if not plan:
            if self.cache.is_restoring:
                self.cache.wait(_RESTORE_WAIT_S)
            return []
        self._note_admissions(plan)
        computing_since = time.perf_counter()
        logits = self._runner.execute(plan)
        self._note_speed(plan, time.perf_counter() - computing_since)
        for rows in plan:
            self.cache.advance(rows.sample.running_lease, rows.sample.tokens.view, rows.stop)
            self._grant_leases(rows.sample.request, rows.stop)
        outputs = self._sample([rows.sample for rows in plan if rows.needs_logits], logits)
        num_decode = sum(rows.stop - rows.start == 1 for rows in plan)
        stats = StepStats(
            step_s=time.perf_counter() - started,
            num_prefill_tokens=sum(rows.stop - rows.start for rows in plan) - num_decode,
            num_decode_tokens=num_decode,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_preempted=self._scheduler.num_preempted - before[0],
            num_blocks=self.cache.num_blocks,
            num_held_blocks=self.cache.num_held_blocks,
            num_cached_blocks=self.cache.num_cached_blocks,
            num_evicted_blocks=self.cache.stats.num_evicted_blocks - before[1],
        )
        for observer in self.observers:
            observer.on_step(stats)
        return outputs

    def _note_speed(self, plan: Sequence[Rows], seconds: float) -> None:
        """Learn what computing a prompt costs; restores from lower tiers are weighed against it."""
        num_tokens = sum(rows.stop - rows.start for rows in plan)
        if num_tokens >= _MIN_TOKENS_TO_TIME:
            average = self._scheduler.prefill_s_per_token
            self._scheduler.prefill_s_per_token += 0.2 * (seconds / num_tokens - average)

    def _grant_leases(self, request: Request, num_computed_tokens: int) -> None:
        """Lease the prefixes that are computed now: later, what slid out of a window may be gone."""
        for spec in request.leases[len(request.outcomes) :]:
            if spec.num_tokens > num_computed_tokens:
                return
            prefix = request.prompt[: spec.num_tokens]
            try:
                kept = self.cache.retention.retain(
                    prefix, request.scope, ttl_s=spec.ttl_s, owner=request.scope.namespace
                )
            except LeaseRefused as error:
                request.outcomes.append(LeaseOutcome(spec, 0, str(error)))
            else:
                request.outcomes.append(LeaseOutcome(spec, kept.num_tokens))

    def _note_admissions(self, plan: Sequence[Rows]) -> None:
        for rows in plan:
            request, lease = rows.sample.request, rows.sample.running_lease
            if request.first_lease is None:
                request.admitted_at = time.perf_counter()
                request.first_lease = lease
                self.cache.note_hit(lease)
            if rows.needs_logits and not request.token_times and not request.is_announced:
                request.is_announced = True  # only now it is known what came from tiers
                self._remember(request)
                for observer in self.observers:
                    observer.on_admitted(int(request.prompt.size), request.num_hit_tokens)

    def _remember(self, request: Request) -> None:
        assert request.explanation is not None, "the scheduler asks before it starts a request"
        self.explanations[request.request_id] = request.scope.namespace, request.explanation
        while len(self.explanations) > _MAX_EXPLANATIONS:
            self.explanations.popitem(last=False)

    def _sample(self, samples: list[Sample], logits: torch.Tensor) -> list[RequestOutput]:
        """Choose the next tokens, forking the requests that just finished their prompt into `n` samples."""
        row_of: list[int] = []
        everyone: list[Sample] = []
        for row, first in enumerate(samples):
            forks = self._fork(first) if len(first.request.samples) < first.request.params.n else []
            everyone += [first, *forks]
            row_of += [row] * (1 + len(forks))
        rows = logits if len(row_of) == len(logits) else logits[row_of]
        chosen = sample(rows, [each.sampler for each in everyone])
        now = time.perf_counter()
        deltas: dict[Request, list[Delta]] = {}
        for each, token in zip(everyone, chosen, strict=True):
            if each.request not in deltas:
                deltas[each.request] = []
                each.request.token_times.append(now)
            new = deltas[each.request]
            if isinstance(token, SampledToken):
                new.append(self._append(each, token))
            else:
                self._finish(each, FinishReason.ABORT)
                new.append(Delta(each.index, "", (), finish_reason=FinishReason.ABORT))
        return [self._output(request, new) for request, new in deltas.items()]

    def _fork(self, first: Sample) -> list[Sample]:
        request = first.request
        forks = []
        for index in range(1, request.params.n):
            twin = self._new_sample(request, index, first.tokens.fork())
            twin.lease = self.cache.fork(first.running_lease)
            self._scheduler.start(twin)
            forks.append(twin)
        request.samples += forks
        return forks

    def _append(self, each: Sample, token: SampledToken) -> Delta:
        """Add a token to a sample, and end the sample where it must."""
        params = each.request.params
        each.tokens.append(token.token_id)
        each.sampler.append(token.token_id)
        is_eos = token.token_id in self._eos_ids and not params.ignore_eos
        text, reason = "", None
        stop_reason: str | int | None = None
        if is_eos or token.token_id in params.stop_token_ids:
            reason = FinishReason.STOP
            stop_reason = None if is_eos else token.token_id
        else:
            text = each.text.push(token.token_id)
            if each.text.stopped_by is not None:
                reason, stop_reason = FinishReason.STOP, each.text.stopped_by
            elif each.num_output_tokens >= each.request.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            text += each.text.flush()
            self._finish(each, reason)
        logprobs: tuple[TokenLogprob, ...] = ()
        if token.logprobs is not None:
            logprobs = (TokenLogprob(token.token_id, token.logprobs.chosen, token.logprobs.top),)
        return Delta(each.index, text, (token.token_id,), logprobs, reason, stop_reason)

    def _finish(self, each: Sample, reason: FinishReason) -> None:
        each.finish_reason = reason
        self._scheduler.remove(each)

    def _output(self, request: Request, deltas: list[Delta]) -> RequestOutput:
        finished = request.is_finished
        if finished:
            del self._requests[request.request_id]
            stats = _request_stats(request)
            for observer in self.observers:
                observer.on_finished(stats)
        return RequestOutput(
            request.request_id, tuple(deltas), request.usage, finished, tuple(request.outcomes), request.explanation
        )

    def abort_all(self) -> list[RequestOutput]:
        """End every request now and let go of all blocks."""
        return [self._end(request, FinishReason.ABORT) for request in list(self._requests.values())]


def _request_stats(request: Request) -> RequestStats:
    times = request.token_times
    now = time.perf_counter()
    reasons = [each.finish_reason or FinishReason.ABORT for each in request.samples]
    return RequestStats(
        request_id=request.request_id,
        finish_reason=FinishReason.ABORT if FinishReason.ABORT in reasons else reasons[0],
        usage=request.usage,
        queue_s=(request.admitted_at or now) - request.arrived_at,
        ttft_s=times[0] - request.arrived_at if times else None,
        itl_s=tuple(later - earlier for earlier, later in pairwise(times)),
        e2e_s=now - request.arrived_at,
    )
