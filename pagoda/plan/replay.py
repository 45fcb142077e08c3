"""Replay: requests of a trace through the real tree, allocator and policy, in simulated time.

A request is served when it arrives, or once those before it have let go of enough blocks. It pins what it hits, evicts
for the rest of its prompt, puts that into the tree, and lets go when its service ends. With the default `Service` that
is at once. Of a prompt larger than the whole cache only the head is kept. Outputs are not cached: no trace says what
they share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagoda.errors import ConfigError
from pagoda.kv.allocator import Allocator, BlockIds
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.keys import Scope
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_node import TokenArray
from pagoda.plan.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Service:
    """How long a request holds its blocks: seconds per token it computes, and per token it generates."""

    seconds_per_prompt_token: float = 0.0
    seconds_per_output_token: float = 0.0

    def duration(self, num_computed: int, num_output: int) -> float:
        """Seconds from the start of a request to its end."""
        return num_computed * self.seconds_per_prompt_token + num_output * self.seconds_per_output_token


@dataclass(slots=True)
class Report:
    """What a replay counted; tokens are prompt tokens, blocks are the trace's."""

    num_requests: int = 0
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_blocks: int = 0
    num_hit_blocks: int = 0
    num_evicted_blocks: int = 0
    num_wasted_blocks: int = 0
    seconds_waited: float = 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of prompt tokens that were hits."""
        return self.num_hit_tokens / max(1, self.num_tokens)

    @property
    def block_hit_rate(self) -> float:
        """Share of prompt blocks that were hits."""
        return self.num_hit_blocks / max(1, self.num_blocks)

    @property
    def waste(self) -> float:
        """Share of evicted blocks that had served no hit."""
        return self.num_wasted_blocks / max(1, self.num_evicted_blocks)

    def count(self, request: TraceRequest, num_hit_blocks: int) -> None:
        """Add a request of whose blocks the first `num_hit_blocks` were hits."""
        self.num_requests += 1
        self.num_tokens += request.num_prompt_tokens
        self.num_hit_tokens += min(num_hit_blocks * request.block_tokens, request.num_prompt_tokens)
        self.num_blocks += request.blocks.size
        self.num_hit_blocks += num_hit_blocks


class Replay:
    """A cache of `capacity` blocks under a policy, fed with requests in the order of their arrival.

    `report` may be replaced by a fresh one between requests, to count only what follows. A subclass that adds what is
    below or around the cache overrides the four methods at the end.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy, service: Service | None = None) -> None:
        self.report = Report()
        self._service = service or Service()
        self._allocator = Allocator(capacity)
        self._tree = RadixTree(1, (None,), capacity, policy)
        self._scope = Scope()
        self._running: list[tuple[float, int, BlockIds]] = []  # (end, order, blocks)
        self._used = np.zeros(capacity, dtype=np.bool_)  # whether the block has served a hit
        self._now = 0.0
        self._last_arrival = 0.0

    def run(self, requests: Iterable[TraceRequest]) -> Report:
        """Serve requests and let the last of them end."""
        for request in requests:
            self.serve(request)
        self.finish()
        return self.report

    def finish(self) -> None:
        """Let every running request end."""
        while self._running:
            self._finish_next()

    @property
    def num_blocks(self) -> int:
        """The capacity."""
        return self._allocator.num_blocks

    def serve(self, request: TraceRequest) -> None:
        """Serve one request.

        Raises:
            ConfigError: it arrives before the one before it.
        """
        if request.time < self._last_arrival:
            raise ConfigError(
                f"requests must be in the order of arrival: {request.time} s after {self._last_arrival} s"
            )
        self._last_arrival = request.time
        prompt = request.blocks[: self._allocator.num_blocks]
        self._now = max(self._now, request.time)
        while self._running and self._running[0][0] <= self._now:
            self._finish_next()
        match = self._tree.match(prompt, self._scope)
        hits = self._tree.touch(match).blocks[0]
        self._allocator.retain(hits)
        self._used[hits] = True
        self.report.count(request, hits.size)
        duration = self._serve(request, hits.size)
        held = np.concatenate([hits, self._compute(prompt, hits)])
        heapq.heappush(self._running, (self._now + duration, self.report.num_requests, held))
        self.report.seconds_waited += self._now - request.time
        self._on_served(self._now - request.time)
        if not duration:
            self._finish_next()

    def _compute(self, prompt: TokenArray, hits: BlockIds) -> BlockIds:
        """Blocks for what missed, in the tree and held; waits for running requests if the cache has too few."""
        missing = prompt.size - hits.size
        if not missing:
            return hits[:0]
        while missing > self._allocator.num_free + self._allocator.num_cached:
            self._now = max(self._now, self._running[0][0])
            self._finish_next()
        short = missing - self._allocator.num_free
        if short > 0:
            evicted = self._tree.evict(short, self._allocator.held)
            self._allocator.leave_tree(evicted)
            self.report.num_evicted_blocks += evicted.size
            self.report.num_wasted_blocks += evicted.size - int(np.count_nonzero(self._used[evicted]))
            self._on_evicted(evicted)
        computed = self._allocator.allocate(missing)
        self._used[computed] = False
        after = int(hits[-1]) if hits.size else None
        self._tree.insert(self._scope, after, prompt[hits.size :], computed[None])
        self._allocator.enter_tree(computed)
        self._on_computed(computed, prompt[hits.size :])
        return computed

    def _finish_next(self) -> None:
        _, _, held = heapq.heappop(self._running)
        self._allocator.release(held)
        if held.size:
            self._tree.offer(int(held[-1]))

    def _serve(self, request: TraceRequest, num_hits: int) -> float:
        """Seconds for which a request holds its blocks, of which the first `num_hits` were hits."""
        num_computed = request.num_prompt_tokens - min(num_hits * request.block_tokens, request.num_prompt_tokens)
        return self._service.duration(num_computed, request.num_output_tokens)

    def _on_served(self, waited_s: float) -> None:
        """The request just served had waited so long for memory."""

    def _on_computed(self, ids: BlockIds, blocks: TokenArray) -> None:
        """These blocks of the trace are in these blocks of the cache now."""

    def _on_evicted(self, ids: BlockIds) -> None:
        """These blocks of the cache are about to be used again."""
