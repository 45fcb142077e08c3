"""EngineCore: requests in, outputs out, one step at a time. Synchronous, on one thread, without I/O.

add ──> Scheduler.schedule ──> Runner.execute ──> KVCache.advance ──> Chooser.choose ──> outputs
              ^                                                            │
              └──────────────────────── next step <────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pagoda.blend.progress import BlendProgress, row_charge
from pagoda.blend.segments import BlendSpec
from pagoda.engine.adapters import adapted
from pagoda.engine.audit import AuditCounts, Auditor, BlockReader
from pagoda.engine.blend.doubts import Doubts
from pagoda.engine.blend.passages import Passages, reusable
from pagoda.engine.choosing import Chooser, News
from pagoda.engine.config import EngineConfig
from pagoda.engine.forking import Forker
from pagoda.engine.history import History, Past
from pagoda.engine.intake import Intake
from pagoda.engine.lease_bounds import bound_leases
from pagoda.engine.lease_desk import LeaseDesk
from pagoda.engine.outputs import (
    Delta,
    EngineObserver,
    FinishReason,
    RequestOutput,
    StepStats,
)
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.engine.pressure.compress import Compressor
from pagoda.engine.pressure.control import PressureControl
from pagoda.engine.request import Request, Sample, TokenBuffer
from pagoda.engine.request_stats import stats_of
from pagoda.engine.runner import Runner
from pagoda.engine.scheduler import Scheduler
from pagoda.engine.sparse.sparsity import Sparsity
from pagoda.engine.step_plan import Rows
from pagoda.errors import (
    InvalidRequest,
    ModelError,
    ModelNotFound,
)
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.observe import Explanation, MissReason
from pagoda.kv.radix_node import as_tokens
from pagoda.model.lora import Adapter
from pagoda.model.sampler import NOT_FINITE
from pagoda.model.tokenizer import Tokenizer

_RESTORE_WAIT_S = 0.002


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
        self.history = History(cache)
        self.adapters: dict[str, Adapter] = {}
        self._runner = runner
        self._config = config
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._scheduler = Scheduler(cache, config)
        bound_leases(cache, config, max_model_len)
        classes = {name: spec.service_class for name, spec in config.tenants.items()}
        self.pressure = PressureControl(config.pressure, cache, self._scheduler, classes)
        self._forker = Forker(cache, self._scheduler, tokenizer, vocab_size)
        self._chooser = Chooser(self._forker, self._scheduler, self._eos_ids)
        self._passages = Passages(cache, self._forker.sample)
        self._doubts = Doubts(self._scheduler)
        self._requests: dict[str, Request] = {}
        self._desk = LeaseDesk(cache)
        self._auditor: Auditor | None = None
        self._intake = Intake(cache, config, vocab_size, self._eos_ids, max_model_len)

    @property
    def sparsity(self) -> Sparsity | None:
        """What a kv_policy needs, if the engine has it."""
        return self._intake.sparsity

    @sparsity.setter
    def sparsity(self, sparsity: Sparsity) -> None:
        self._intake.sparsity = sparsity
        self.pressure.compressor = Compressor(self._scheduler, sparsity)

    def audit(self, share: float, pool: BlockReader) -> None:
        """Compare this share of the blocks that hits are made of with what computing them gives; see Auditor."""
        self._auditor = Auditor(self.cache, self._runner, pool, self._forker.sample, share, self._config.token_budget)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests) or self._desk.is_waiting

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
        adapter: str | None = None,
        blend: BlendSpec | None = None,
    ) -> None:
        """Queue a request.

        Args:
            blend: passages of the prompt that may be reused wherever they were computed; those shorter than a block
                are computed as other text is, and so are those that cannot be reused here, if they are a default.
            adapter: the name of the adapter that answers it; it keeps that one, should the name be given to another.

        Raises:
            ModelNotFound: there is no such adapter.
            InvalidRequest: an empty prompt, a token outside the vocabulary, a lease or passage beyond the prompt, or
                an id that is in use, or passages that cannot be reused here.
            ContextTooLong: prompt and output can never fit; the message has the numbers.
            Overloaded: there is too much to do before it; see PressureConfig.
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
        chosen = None
        if adapter is not None:
            chosen = self._adapter(adapter)
            scope = adapted(scope, chosen, tokens)
        if blend is not None:
            blend = reusable(blend, int(tokens.size), params, scope, self.cache.layout)
        whole = None if blend is None else "reuses no passages"
        request = self._intake.request(request_id, tokens, params, scope, priority, whole=whole)
        self.pressure.admit(request)
        request.adapter = chosen
        request.leases = tuple(sorted(leases, key=lambda spec: spec.num_tokens))
        request.samples.append(self._forker.sample(request, 0, TokenBuffer(tokens.copy())))
        self._requests[request_id] = request
        if blend is not None:
            self._prepare(request, blend)
        self._scheduler.add(request.samples[0])

    def _prepare(self, request: Request, blend: BlendSpec) -> None:
        """Have a request's passages computed before it is."""
        spans = tuple(span for span in blend.spans if span.stop - span.start >= self.cache.block_size)
        if not spans:
            return
        spec, size = replace(blend, spans=spans), int(request.prompt.size)
        request.blend = BlendProgress(spec, size, row_charge(spec.ratio, len(self.cache.layout.layers)))
        longest = request.blend.longest(self._config.token_budget)
        if self.cache.peak_blocks(size + request.max_tokens, longest) > self.cache.num_blocks:
            request.blend = BlendProgress(spec, size)  # windowed layers hold a step's tokens: here only short ones fit
        request.passages = self._passages.prepare(request)
        for passage in request.passages:
            self._requests[passage.request_id] = passage
            self._scheduler.add(passage.samples[0])

    def _adapter(self, name: str) -> Adapter:
        if name not in self.adapters:
            raise ModelNotFound(f"there is no adapter {name!r}", param="model")
        return self.adapters[name]

    def fork(self, request_id: str, new_id: str, params: SamplingParams, *, index: int = 0) -> None:
        """Start a request that goes on from all tokens that a live one has so far, on the same blocks, copy-on-write.

        What the live one has, output included, is the new one's prompt.

        Args:
            index: which of the live request's samples.

        Raises:
            InvalidRequest: there is no such live sample, it is a beam, or `new_id` is in use.
            ContextTooLong: as in `add`.
        """
        if new_id in self._requests:
            raise InvalidRequest(f"request id {new_id!r} is in use", param="request_id")
        source = self._requests.get(request_id)
        sample = next((each for each in source.samples if each.index == index), None) if source else None
        if source is None or sample is None or sample.finish_reason is not None or source.beams is not None:
            raise InvalidRequest(f"request {request_id!r} has no live sample {index} to fork", param="request_id")
        if sample.sparse is not None:
            raise InvalidRequest(f"request {request_id!r} has a kv_policy: it cannot be forked", param="kv_policy")
        tokens = sample.tokens.view.copy()
        request = self._intake.request(new_id, tokens, params, source.scope, source.priority, whole="is no fork")
        request.adapter = source.adapter
        self._forker.branch(sample, request)
        lease = request.samples[0].lease
        if lease is not None:
            num_hit = lease.num_hit_tokens
            request.explanation = Explanation(int(request.prompt.size), num_hit, num_hit, MissReason.NONE)
        self._requests[new_id] = request

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now and let go of its blocks; nothing if it is not there any more."""
        self._desk.drop(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return []
        output = self._end(request, FinishReason.ABORT)
        for passage in self._passages.leave(request):
            self._end(passage, FinishReason.ABORT)
        return [output]

    def _end(self, request: Request, reason: FinishReason) -> RequestOutput:
        deltas: dict[Sample, Delta] = {}
        for live in [each for each in request.samples if each.finish_reason is None]:
            self._scheduler.finish(live, reason)
            deltas[live] = Delta(live.index, live.text.flush(), (), finish_reason=reason)
        return self._output(request, deltas)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what is new."""
        started = time.perf_counter()
        self.cache.retention.expire()
        self.pressure.look()
        scheduler, cache = self._scheduler, self.cache
        before = scheduler.num_preempted, cache.stats.num_evicted_blocks, scheduler.num_resumed_tokens
        returned = cache.stats.num_returned_blocks
        self.cache.poll()
        self.pressure.compress()
        plan = self._scheduler.schedule()
        if not plan:
            if self.cache.is_restoring or self._desk.is_waiting:
                self.cache.wait(_RESTORE_WAIT_S)
            return self._desk.pass_on([])
        self._note_admissions(plan)
        computing_since = time.perf_counter()
        logits = self._runner.execute(plan)
        counts = [rows.stop - rows.start for rows in plan]
        num_decode = counts.count(1)
        # Where passages are reused, many a row was computed in part.
        if num_decode < len(plan) and all(rows.sample.request.blend is None for rows in plan):
            runs = [(rows.start, rows.stop) for rows in plan]
            self._scheduler.prefill_speed.note(runs, time.perf_counter() - computing_since)
        spoilt = self._runner.spoilt(plan)  # not to be found by others, and so not advanced
        settled, logits = self._doubts.settle(plan, logits)
        for rows in settled:
            if rows in spoilt:
                continue
            sample = rows.sample
            self.cache.advance(rows.lease, sample.tokens.view, rows.stop)
            if sample.request.leases:
                self._desk.grant(sample.request, rows.stop)
        news = self._chooser.choose([rows.sample for rows in settled if rows.needs_logits], logits)
        told = [self._tell(each) for each in news]
        for rows in spoilt:
            if not rows.sample.request.is_finished:
                told.append(self._fail(rows.sample.request, ModelError(NOT_FINITE)))
        outputs = self._desk.pass_on([output for output in told if output.deltas])
        audits = self._auditor.run() if self._auditor is not None else AuditCounts()
        stats = StepStats(
            step_s=time.perf_counter() - started,
            num_prefill_tokens=sum(counts) - num_decode,
            num_decode_tokens=num_decode,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_preempted=scheduler.num_preempted - before[0],
            num_blocks=self.cache.num_blocks,
            num_held_blocks=self.cache.num_held_blocks,
            num_cached_blocks=self.cache.num_cached_blocks,
            num_evicted_blocks=cache.stats.num_evicted_blocks - before[1],
            num_resumed_tokens=scheduler.num_resumed_tokens - before[2],
            num_audited_blocks=audits.num_audited,
            num_audit_mismatches=audits.num_mismatches,
            num_returned_blocks=cache.stats.num_returned_blocks - returned,
            returned_bytes=(cache.stats.num_returned_blocks - returned) * cache.layout.pool_block_bytes,
        )
        for observer in self.observers:
            observer.on_step(stats)
        return outputs

    def _note_admissions(self, plan: Sequence[Rows]) -> None:
        for rows in plan:
            request, lease = rows.sample.request, rows.lease
            if request.first_lease is None:
                request.admitted_at = time.perf_counter()
                request.first_lease = lease
                self.cache.note_hit(lease)
            if not request.is_announced and rows.needs_logits and not request.token_times:
                request.is_announced = True  # only now it is known what came from tiers
                self._remember(request)
                self.cache.note_prompt(request.scope, int(request.prompt.size), request.num_hit_tokens)
                for observer in self.observers:
                    observer.on_admitted(int(request.prompt.size), request.num_hit_tokens)

    def _remember(self, request: Request) -> None:
        assert request.first_lease is not None, "a request is remembered once it runs"
        assert request.explanation is not None, "the scheduler asks before it starts a request"
        request.explanation = self.cache.misses.settled(request.explanation, request.first_lease)
        past = Past(request.prompt, request.scope, request.first_lease, request.explanation, request.blend)
        self.history.remember(request.request_id, past)

    def _tell(self, news: News) -> RequestOutput:
        """A request's news as its output, ending what ends with it."""
        if news.failure is not None:
            return self._fail(news.request, news.failure)
        if news.is_over:
            return self._end(news.request, FinishReason.LENGTH)
        return self._output(news.request, news.deltas)

    def _fail(self, request: Request, error: ModelError) -> RequestOutput:
        """End a request whose logits or KV are not finite. What it computed is not trusted: nobody shall hit it."""
        output = self._end(request, FinishReason.ABORT)
        self.cache.purge(request.scope, request.prompt)
        return replace(output, failure=error)

    def _output(self, request: Request, new: dict[Sample, Delta]) -> RequestOutput:
        finished = request.is_finished
        deltas = list(new.values())
        if request.params.is_ranked:
            for each, delta in new.items():
                if each.held is not None:
                    each.held.add(delta)
            deltas = self._forker.winners(request) if finished else []
        if finished:
            del self._requests[request.request_id]
        if request.is_internal:
            return RequestOutput(request.request_id, (), request.usage, finished)
        if finished:
            stats = stats_of(request)
            for observer in self.observers:
                observer.on_finished(stats)
            if self._auditor is not None:
                self._auditor.consider(request)
        outcomes, sparse = tuple(request.outcomes), request.sparse_report
        return RequestOutput(request.request_id, tuple(deltas), request.usage, finished, outcomes, sparse=sparse)

    def renew(self, fingerprint: bytes) -> None:
        """Let a changed model go on: no KV of the old one is used again. Requests keep what they have generated."""
        self._scheduler.preempt_all()
        self.cache.renew(fingerprint)

    def abort_all(self) -> list[RequestOutput]:
        """End every request now and let go of all blocks."""
        return [self._end(request, FinishReason.ABORT) for request in list(self._requests.values())]
