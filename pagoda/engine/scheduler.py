"""Scheduler: which tokens of which samples the next step computes.

    budget  |d|d|d|d| prefill chunk of a running sample | prefill chunk of a newly admitted one |
             decodes first: one token each               whatever is left, so that long prompts never stop a stream

A step that needs more blocks than there are preempts the newest sample: its blocks return to the cache, and it waits at
its old place in the queue to be computed again, mostly from hits. Nothing is admitted in a step that preempted, nor
without room for all of its prompt, so samples do not chase each other out of memory. Room is what is free and what
others must give up: tenants keep their guaranteed shares, which also let them pass a request that waits for more room.
What pressure asks on top of that is in `Scheduler.relief`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from pagoda.engine.config import EngineConfig
from pagoda.engine.outputs import FinishReason
from pagoda.engine.policy import QUEUE_POLICIES, Ranks, in_turn
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.engine.request import Request, Sample
from pagoda.engine.step_plan import Rows, StepPlan
from pagoda.engine.tenants import AGED_EVERY
from pagoda.errors import OutOfBlocks
from pagoda.kv.cache import Hit, KVCache
from pagoda.kv.lease import TierUse
from pagoda.kv.observe import MissReason
from pagoda.kv.radix_node import TokenArray

_LOOK_AHEAD = 64  # waiting samples that are looked for in tiers
_OUTPUT_SPREAD = 2.0  # most outputs are shorter than so many times the mean


@dataclass(frozen=True, slots=True)
class Relief:
    """What pressure asks of the scheduler.

    Attributes:
        max_running: most samples that run when another is admitted.
        prefill_budget: most prompt tokens of a step.
        reserves_outputs: admit only what has room to its expected end, beside all that run to theirs.
        makes_way: preempt a sample for one of a higher class that waits.
    """

    max_running: int
    prefill_budget: int
    reserves_outputs: bool = False
    makes_way: bool = False


def _arrival(sample: Sample) -> tuple[int, int]:
    return sample.request.arrival, sample.index


def _table(rows: Rows) -> bytes:
    """Orders rows so that those with equal leading blocks are neighbours: attention reads such blocks once."""
    return rows.lease.tables[0].packed


def _shareable(sample: Sample) -> TokenArray:
    """A sample's tokens, as far as a hit may go: all but the last of them."""
    tokens = sample.tokens.view
    return tokens if sample.sparse is None else tokens[: sample.sparse.hit_limit + 1]


def _tier_use(sample: Sample) -> TierUse:
    """What a sample allows of tiers: no more than a hit may give it."""
    use = sample.request.params.tier_use
    if sample.sparse is None or sample.sparse.hit_limit >= len(sample.tokens):
        return use
    most = max(0, sample.sparse.hit_limit - sample.running_lease.num_computed_tokens)
    return replace(
        use, max_restored_tokens=most if use.max_restored_tokens is None else min(most, use.max_restored_tokens)
    )


class Scheduler:
    """Owns the queue of waiting samples and the set of running ones. Takes and gives leases; computes nothing."""

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self._cache = cache
        self._config = config
        self._order = QUEUE_POLICIES[config.queue_policy]
        self._ranks = Ranks(config.tenants)
        self._num_since_promoted = 0  # starts, since one that had waited long enough for that
        self.whole_relief = self.relief = Relief(config.max_num_seqs, config.token_budget)
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.num_queued: Counter[str] = Counter()  # waiting samples of each namespace
        self.num_queued_tokens = 0
        self.num_started: Counter[int] = Counter()  # by class, as Ranks numbers them
        self.num_preempted = 0
        self.num_short = 0  # of those, for want of blocks
        self.num_made_way = 0  # and for one of a higher class
        self.num_resumed_tokens = 0  # of preempted samples, restored from tiers instead of computed again
        self.prefill_speed = PrefillSpeed()
        self._mean_output = math.inf  # tokens of samples that ended by themselves, lately

    def add(self, sample: Sample) -> None:
        """Queue a sample."""
        insort(self.waiting, sample, key=_arrival)
        self.num_queued[sample.request.scope.namespace] += 1
        self.num_queued_tokens += len(sample.tokens)

    def _unqueue(self, sample: Sample) -> None:
        self.waiting.remove(sample)
        name = sample.request.scope.namespace
        self.num_queued[name] -= 1
        if not self.num_queued[name]:
            del self.num_queued[name]
        self.num_queued_tokens -= len(sample.tokens)

    def start(self, sample: Sample) -> None:
        """Run a sample that has its lease already: a fork of a running one."""
        insort(self.running, sample, key=_arrival)

    def remove(self, sample: Sample) -> None:
        """Forget a sample, whatever its state, and let go of its lease."""
        if sample.lease is None:
            self._unqueue(sample)
            self._cache.drop_prefetch(sample.prefetch or 0)
        else:
            self.running.remove(sample)
            self._release(sample)

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """End a sample, and let go of its lease."""
        sample.finish_reason = reason
        self.remove(sample)
        if reason is not FinishReason.ABORT and sample.request.max_tokens:
            count = sample.num_output_tokens
            self._mean_output = count if self._mean_output == math.inf else self._mean_output * 0.95 + count * 0.05

    def expected_output(self, request: Request) -> int:
        """Tokens that a sample of a request will probably generate at most."""
        return int(min(request.max_tokens, _OUTPUT_SPREAD * self._mean_output))

    def discard(self, sample: Sample) -> None:
        """Forget a running sample whose text nobody will ask for."""
        self.running.remove(sample)
        self._cache.discard(sample.running_lease)
        sample.lease = None

    def _release(self, sample: Sample) -> None:
        lease = sample.running_lease
        self._cache.release(lease, sample.tokens.view)
        if sample.was_preempted and lease.restore_report is not None:
            self.num_resumed_tokens += lease.restore_report.num_restored_blocks * self._cache.block_size
        if sample.sparse is not None:
            sample.sparse.forget(lease)
        sample.lease = None

    def preempt_all(self) -> None:
        """Send every running sample back to the queue, in its place."""
        for sample in list(self.running):
            self._preempt(sample)

    def schedule(self) -> list[Rows]:
        """Plan one step, reserving the blocks it writes to. Empty when nothing can run."""
        plan = StepPlan()
        preempted = self.num_preempted
        left = [(sample, sample.num_uncomputed) for sample in self.running]
        decoding = [each for each in left if each[1] == 1]
        prefilling = [each for each in left if each[1] > 1]
        for sample, num_uncomputed in decoding + prefilling:
            if sample.lease is not None and (most := self._budget(plan, num_uncomputed)) > 0:
                count = self._cache.chunk(sample.lease, sample.num_next(most))
                if count:
                    self._plan(sample, count, plan)
        if self.num_preempted == preempted:
            self._admit(plan)
            if not plan.rows and self.running and self.waiting and not self._cache.is_restoring:
                # Only beams run, each ready and waiting for one that has no room: the newest must give its own.
                self._preempt(max(self.running, key=self._newest))
        self._look_ahead()
        return sorted(plan.rows, key=_table)

    def _budget(self, plan: StepPlan, count: int) -> int:
        """What a step's budget has left for a sample with `count` tokens to compute: 1 is decoding, more are prompt."""
        left = self._config.token_budget - plan.charged
        if count > 1:
            left = min(left, self.relief.prefill_budget - plan.charged_prompts)
        return min(count, left)

    def _plan(self, sample: Sample, count: int, plan: StepPlan) -> None:
        """Reserve room for a running sample's next tokens; preempt newer ones, or at last itself, if there is none."""
        while True:
            try:
                self._reserve(sample, count)
            except OutOfBlocks:
                victim = self._victim(sample)
                self._preempt(victim)
                self.num_short += 1
                plan.drop(victim)
                if victim is sample:
                    return
            else:
                plan.put(sample, count)
                return

    def _reserve(self, sample: Sample, count: int) -> None:
        """Reserve room for a sample's next tokens. Where they are blended, its blocks are its own from here on."""
        lease, blend = sample.running_lease, sample.request.blend
        if blend is not None and lease.num_computed_tokens >= blend.first:
            self._cache.detach(lease)
        sample.make_room()
        self._cache.reserve(lease, count)

    def _victim(self, taker: Sample) -> Sample:
        """Whom to preempt for a sample: the newest of those whose blocks it may take.

        A tenant within its guaranteed share takes from those that are over theirs, if any such runs.
        """
        tenants, name = self._cache.tenants, taker.request.scope.namespace
        losers = [other for other in self.running if tenants.gives_way(other.request.scope.namespace, name)]
        if tenants.has_shares and tenants.is_within(name):
            losers = [other for other in losers if not tenants.is_within(other.request.scope.namespace)] or losers
        return max(losers, key=self._newest)

    def _newest(self, sample: Sample) -> tuple[int, int, int, int]:
        """The last in class, priority and arrival is the largest."""
        return self._ranks.aged(sample), sample.request.priority, *_arrival(sample)

    def restart(self, sample: Sample) -> None:
        """Send a running sample back to the queue, in its place."""
        self.running.remove(sample)
        self._release(sample)
        self.add(sample)

    def _preempt(self, sample: Sample) -> None:
        self.restart(sample)
        sample.was_preempted = True
        self.num_preempted += 1

    def _admit(self, plan: StepPlan) -> None:
        if not self.waiting:
            return
        tenants = self._cache.tenants
        full: set[int] = set()  # accounts whose next request has no room
        for sample in self._in_order(full):
            if sample.pending is not None and sample.pending.is_pending:
                continue
            budget = self._budget(plan, self._config.token_budget)
            if budget <= 0:
                return
            if len(self.running) >= self.relief.max_running:
                self._make_way(sample, plan)
                return
            known, scope = _shareable(sample), sample.request.scope
            hit = self._cache.lookup(known, scope)
            sample.pending = self._cache.pending(known, scope, hit.num_tokens)
            if sample.pending is not None:
                continue
            if self.running and not self._has_room(sample, hit, passing=bool(full)):
                if self._make_way(sample, plan):
                    return
                full.add(tenants.of(scope.namespace).account)
                if not tenants.has_shares:
                    return  # not the next one either: a small request must not overtake a large one for ever
                continue
            if not self._start(sample, hit, budget, plan):
                return

    def _in_order(self, full: Collection[int]) -> Iterator[Sample]:
        """The waiting samples as they are admitted: by class, but now and then the first is one that waited long."""
        tenants, ranks, waiting = self._cache.tenants, self._ranks, list(self._order(self.waiting, self._cache))
        if self._num_since_promoted >= AGED_EVERY - 1:
            promoted = [sample for sample in waiting if ranks.is_promoted(sample)]
            for sample in islice(in_turn(promoted, ranks.aged, tenants, full, self._prompt_blocks), 1):
                yield sample
                waiting.remove(sample)
        yield from in_turn(waiting, ranks.of, tenants, full, self._prompt_blocks)

    def _look_ahead(self) -> None:
        """Have tiers asked for the next waiting sample that nobody looked for yet: it may wait long enough."""
        if not self.waiting or not self._cache.can_prefetch:
            return
        unasked = [sample for sample in self.waiting[:_LOOK_AHEAD] if sample.prefetch is None]
        if unasked:
            sample = min(unasked, key=self._newest)
            use = sample.request.params.tier_use
            sample.prefetch = self._cache.prefetch(_shareable(sample), sample.request.scope, use)

    def _make_way(self, sample: Sample, plan: StepPlan) -> bool:
        """Preempt the newest sample of a lower class, if pressure asks for that; its room is there in the next step."""
        if not self.relief.makes_way:
            return False
        ranks, tenants, name = self._ranks, self._cache.tenants, sample.request.scope.namespace
        lower = [
            other
            for other in self.running
            if ranks.of(other) > ranks.of(sample)
            and not ranks.is_promoted(other)  # who was let in because it had waited long would be out again
            and tenants.gives_way(other.request.scope.namespace, name)
        ]
        if not lower:
            return False
        victim = max(lower, key=self._newest)
        self._preempt(victim)
        plan.drop(victim)
        self.num_made_way += 1
        return True

    def _start(self, sample: Sample, hit: Hit, budget: int, plan: StepPlan) -> bool:
        """Give a waiting sample a lease and room for its first tokens, and plan them; false if there is no room."""
        tokens, scope = sample.tokens.view, sample.request.scope
        if sample.request.explanation is None:  # asked before room is made for it, which may evict what it is about
            facts = self._cache.misses.facts(tokens, scope, hit.match)
            if sample.sparse is not None and hit.num_tokens == sample.sparse.hit_limit:
                facts = replace(facts, reason=MissReason.KV_POLICY, eviction=None, cached=())
            sample.request.explanation = facts
        sample.lease = self._cache.acquire(tokens, scope, hit)
        count = sample.num_next(budget)
        try:
            self._reserve(sample, count)
        except OutOfBlocks:
            self._release(sample)
            return False
        self._unqueue(sample)
        self.start(sample)
        sample.lease.tier_use = _tier_use(sample)
        self.num_started[self._ranks.of(sample)] += 1
        self._num_since_promoted = 0 if self._ranks.is_promoted(sample) else self._num_since_promoted + 1
        retention = sample.request.params.kv_retention
        if retention is not None:
            self._cache.direct(sample.lease, retention.directives(int(sample.request.prompt.size)))
        cost = self.prefill_speed.seconds_per_token(sample.lease.num_computed_tokens, tokens.size)
        self._cache.restore(sample.lease, cost, sample.prefetch or 0)
        sample.prefetch = None
        count = self._cache.chunk(sample.lease, sample.num_next(budget))
        if count:
            with suppress(OutOfBlocks):  # prefetched tokens took the room of those after them: the next step makes some
                self._reserve(sample, count)
                plan.put(sample, count)
        return True

    def _has_room(self, sample: Sample, hit: Hit, *, passing: bool) -> bool:
        """Whether a sample's tokens fit beside what runs, with a block to spare for each running sample to grow into.

        Under pressure, its expected output has to fit too, and all that the running ones are expected to grow by.
        Passing another request that waits for room, it must fit into its tenant's guaranteed share too.
        """
        scope, num_groups = sample.request.scope, len(self._cache.layout.groups)
        reserves = self.relief.reserves_outputs
        needed = self._peak(sample, self._left(sample) if reserves else 1) - hit.num_blocks
        if passing and not self._cache.tenants.is_within(scope.namespace, needed):
            return False
        spare = sum(self._growth(other) for other in self.running) if reserves else len(self.running) * num_groups
        return needed + spare <= self._cache.num_available_to(scope) - hit.num_idle_blocks

    def _peak(self, sample: Sample, num_more: int) -> int:
        """The most blocks that a sample holds with so many tokens more; a sparse one, as far as it may go."""
        if sample.sparse is not None:
            return sample.request.peak_blocks
        budget, blend = self._config.token_budget, sample.request.blend
        step_tokens = budget if blend is None else blend.longest(budget)
        return self._cache.peak_blocks(len(sample.tokens) + num_more, step_tokens)

    def _prompt_blocks(self, sample: Sample) -> int:
        return self._peak(sample, 1)

    def _left(self, sample: Sample) -> int:
        """Tokens that a sample is expected to generate yet."""
        return max(1, self.expected_output(sample.request) - sample.num_output_tokens)

    def _growth(self, sample: Sample) -> int:
        """Blocks that a running sample is expected to need beside those it has."""
        held = sum(table.held.size for table in sample.running_lease.tables)
        growth = max(0, self._peak(sample, self._left(sample)) - held)
        if sample.sparse is not None and sample.num_uncomputed <= 1:  # what it holds at most was its prompt
            num_blocks = self._left(sample) // self._cache.block_size + 2
            growth = min(growth, len(self._cache.layout.groups) * num_blocks)
        return growth
