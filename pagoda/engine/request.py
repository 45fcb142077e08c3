"""Request and Sample: what a caller asked for, and each output that is generated for it.

waiting ──admit──> running ──> finished
   ^                  │
   └────preempt───────┘        its blocks stay in the tree until they are evicted
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from pagoda.blend.progress import BlendProgress
from pagoda.engine.beam import BeamState
from pagoda.engine.outputs import Completion, FinishReason, LeaseOutcome, SparseReport, TokenLogprob, Usage
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.engine.text import OutputText
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.observe import Explanation
from pagoda.kv.radix_node import TokenArray
from pagoda.model.lora import Adapter
from pagoda.model.sampler import SamplerState
from pagoda.sparse.base import SparseSequence
from pagoda.sparse.report import total

_arrivals = itertools.count()


class TokenBuffer:
    """A growable array of token ids."""

    __slots__ = ("_array", "_len")

    def __init__(self, tokens: TokenArray) -> None:
        self._array = tokens
        self._len = tokens.size

    def __len__(self) -> int:
        return self._len

    @property
    def view(self) -> TokenArray:
        """All tokens, without a copy."""
        return self._array[: self._len]

    def part(self, start: int, stop: int) -> TokenArray:
        """Some of the tokens, without a copy."""
        return self._array[start:stop]

    def append(self, token_id: int) -> None:
        """Add a token."""
        if self._len == self._array.size:
            grown = np.empty(max(16, 2 * self._len), dtype=self._array.dtype)
            grown[: self._len] = self._array
            self._array = grown
        self._array[self._len] = token_id
        self._len += 1

    def fork(self) -> TokenBuffer:
        """An independent copy."""
        return TokenBuffer(self.view.copy())


class Pending(Protocol):
    """Something on its way that a waiting sample will read."""

    @property
    def is_pending(self) -> bool:
        """Whether waiting for it still makes sense."""
        ...


@dataclass(eq=False, slots=True)
class Sample:
    """One output of a request: the unit that is scheduled.

    `lease` is there while it runs; its `num_computed_tokens` of the `tokens` have KV. While it waits, `prefetch` is the
    cache's ticket for it, once it was looked for in tiers. `held` collects the output of a request that is ranked at
    the end. `sparse` is what a kv_policy does to it; None: its KV stays whole. A beam has computed all its tokens and
    has `continuations` while it waits for the other beams of its request.
    """

    request: Request
    index: int
    tokens: TokenBuffer
    sampler: SamplerState
    text: OutputText
    lease: Lease | None = None
    pending: Pending | None = None
    prefetch: int | None = None
    was_preempted: bool = False
    finish_reason: FinishReason | None = None
    held: Completion | None = None
    continuations: Sequence[TokenLogprob] = ()
    sparse: SparseSequence | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.request.prompt.size

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV; 1 while decoding, 0 for a beam that waits. The sample must be running."""
        assert self.lease is not None, "only running samples have a lease"  # not by calls: it is asked for at each step
        return len(self.tokens) - self.lease.num_computed_tokens

    def num_next(self, budget: int) -> int:
        """How many rows it may have in the next step, within `budget`. The sample must be running."""
        position, blend = self.running_lease.num_computed_tokens, self.request.blend
        left = len(self.tokens) - position
        if blend is not None:
            return min(left, blend.chunk(position, budget))
        count = min(left, budget)
        return count if self.sparse is None else min(count, self.sparse.limit(position))

    def charge(self, num_rows: int) -> int:
        """What its next rows take of a step's budget: rows that stop early take less. The sample must be running."""
        blend = self.request.blend
        return num_rows if blend is None else blend.charge(self.running_lease.num_computed_tokens, num_rows)

    def make_room(self) -> None:
        """Compress its KV, if that is due; raises OutOfBlocks. The sample must be running."""
        if self.sparse is not None:
            self.sparse.make_room(self.running_lease)

    @property
    def is_ready(self) -> bool:
        """Whether a beam waits for the others."""
        return self.lease is not None and self.num_uncomputed == 0

    @property
    def running_lease(self) -> Lease:
        """The lease of a running sample."""
        assert self.lease is not None, "only running samples have a lease"
        return self.lease


@dataclass(eq=False, slots=True)
class Request:
    """What a caller asked for. Times are `time.perf_counter()` seconds.

    Attributes:
        max_tokens: most tokens of each sample, the context's end considered.
        leases: wishes, in order of their ends.
        outcomes: what became of the first of them.
        samples: one until the prompt is computed, then `params.num_samples`, or the live beams.
        beams: the state of a beam search.
        num_forks: beams made so far.
        adapter: changes the model for it, from the scope's `adapter_from` on.
        sparse: what its kv_policy does to its first sample, before the others fork from it; None: its KV stays whole.
        peak_blocks: the most blocks that a sample then holds at once.
        is_pressed: pressure had its KV compressed, or compressed to less.
        first_lease: with which it first ran: what that found and got is its hit.
        explanation: why not more were found.
        is_announced: observers were told of it.
        blend: its passages, where it has any.
        passages: those that are computed alone because it was the first to want them, or the next after one that left.
        is_internal: it computes a passage for another request, and nobody is told of it.
    """

    request_id: str
    prompt: TokenArray
    params: SamplingParams
    scope: Scope
    priority: int
    max_tokens: int
    leases: tuple[LeaseSpec, ...] = ()
    outcomes: list[LeaseOutcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    adapter: Adapter | None = None
    beams: BeamState | None = None
    num_forks: int = 0
    sparse: SparseSequence | None = None
    peak_blocks: int = 0
    is_pressed: bool = False
    first_lease: Lease | None = None
    explanation: Explanation | None = None
    arrival: int = field(default_factory=lambda: next(_arrivals))
    arrived_at: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    is_announced: bool = False
    blend: BlendProgress | None = None
    passages: Sequence[Request] = ()
    is_internal: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether every sample ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def sparse_report(self) -> SparseReport | None:
        """What its kv_policy did so far, if it has one by now."""
        reports = [each.sparse.report for each in self.samples if each.sparse is not None]
        if not reports:
            return None
        report = total(reports)
        return replace(report, under_pressure=True) if report is not None and self.is_pressed else report

    @property
    def search(self) -> BeamState:
        """The state of the beam search that this request is."""
        assert self.beams is not None, "only a beam search has beams"
        return self.beams

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens found in the cache, or restored, when the request first ran."""
        return 0 if self.first_lease is None else self.first_lease.num_hit_tokens

    @property
    def num_extra_tokens(self) -> int:
        """Tokens computed for it beside its prompt: its passages alone, and what was computed for a doubted blend."""
        alone = sum(
            int(passage.prompt.size) - passage.num_hit_tokens
            for passage in self.passages
            if passage.samples[0].finish_reason is FinishReason.LENGTH
        )
        return alone + (self.blend.num_given_up if self.blend else 0)

    @property
    def usage(self) -> Usage:
        """Token counts so far: of every sample that was drawn, and of the beams that are returned."""
        if self.beams is None:
            num_output_tokens = sum([sample.num_output_tokens for sample in self.samples])
        else:
            num_output_tokens = sum(len(ended.beam.tokens) for ended in self.beams.finished[: self.params.n])
        num_prompt_tokens, num_hit_tokens = self.prompt.size, self.num_hit_tokens
        if self.blend is None:
            return Usage(num_prompt_tokens, num_hit_tokens, num_output_tokens)
        return Usage(
            num_prompt_tokens,
            num_hit_tokens,
            num_output_tokens,
            # What was hit may have been evicted while the request was preempted, and blended after: it counts as a hit.
            min(self.blend.num_blended, num_prompt_tokens - num_hit_tokens),
            self.blend.num_recomputed,
            self.num_extra_tokens,
        )
